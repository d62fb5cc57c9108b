"""Workers, collections and schedules in a real Chromium: charts are drawn, and everybody can use them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from sqlalchemy import Engine

from api.app import create_app
from tests.api_server import serving
from tests.indexed import draw_vectors, make_collection
from tests.protocol import SPEC
from tests.schedules import add_source, make_schedule
from vectormill.settings import Settings
from vectormill.workers.samples import RECENT, Sample, write_samples
from vectormill.workers.workers import beat_worker

DESKTOP: Final = {"width": 1280, "height": 900}
PHONE: Final = {"width": 360, "height": 740}
# Until a page shows what has happened: a stream looks every second, and machines are busy.
PATIENCE: Final = 60_000
WORKER: Final = "m-cuda0@host"
SHARD: Final = {
    "device": "cuda:0",
    "capacity_bytes": 24 << 30,
    "weight_bytes": 6 << 30,
    "activation_bytes": 3 << 30,
    "headroom_bytes": 15 << 30,
}
PLACEMENT: Final = {
    "strategy": "replicate",
    "micro_batches": 1,
    "max_batch_tokens": 65536,
    "relative_rate": 1.0,
    "stages": [{"first_layer": 0, "num_layers": 24, "shards": [SHARD]}],
    "plan": {
        "num_replicas": 1,
        "strategy": "replicate",
        "precision": "bf16",
        "relative_rate": 1.0,
        "idle": {},
        "reasons": ["A device holds a whole replica with room for a full batch."],
        "rejected": [],
        "proposals": [],
    },
}
INCARNATION: Final = uuid4()


@dataclass(frozen=True, slots=True)
class Site:
    """A served console with a worker, a collection and a schedule that it shows."""

    url: str
    engine: Engine


def beat(engine: Engine, state: str = "running") -> None:
    samples = [Sample(10.0 * ago, 40_000 + 1000 * (ago % 7), 9216, 85 + ago % 10) for ago in range(60, 0, -1)]
    report: dict[str, Any] = {
        "state": state,
        "device": {"value": "cuda:0", "reason": "asked for"},
        "backend": {"value": "torch", "reason": "the only one on cuda"},
        "precision": {"value": "bf16", "reason": "the device has bf16 matrix instructions"},
        "bound_by": {"value": "run", "reason": "The device was computing in 90% of the time."},
        "placement": PLACEMENT,
        "device_memory_used_bytes": 9 << 30,
        "device_memory_total_bytes": 24 << 30,
        "device_utilisation": 0.91,
        "padding_waste": 0.01,
        RECENT: write_samples(samples),
    }
    with engine.begin() as connection:
        assert beat_worker(connection, WORKER, INCARNATION, SPEC.model, 4, report)


@pytest.fixture(scope="module")
def site(engine: Engine) -> Iterator[Site]:
    vectors = draw_vectors(300)
    vectors[:100] += np.eye(8, dtype=np.float32)[0] * 3
    make_collection(
        engine, vectors, lambda number: b'{"lang": "%s"}' % (b"de", b"en", b"fr")[number % 3], name="mapped"
    )
    add_source(engine, "mapped")
    make_schedule(engine, "nightly", collection="mapped", timezone="Europe/Berlin")
    with serving(create_app(Settings(), engine)) as url:
        yield Site(url, engine)


@contextmanager
def open_page(browser: Browser, site: Site, **context: Any) -> Iterator[Page]:
    """A page of a fresh visitor that logs no error."""
    beat(site.engine)  # it is alive for a while
    wrong: list[str] = []
    opened = browser.new_context(**{"viewport": DESKTOP, "reduced_motion": "reduce", **context})
    opened.set_default_timeout(PATIENCE)
    page = opened.new_page()
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    try:
        yield page
    finally:
        opened.close()
    assert not wrong


def find_violations(page: Page) -> list[str]:
    """What axe finds; a sentence each."""
    results = Axe().run(page)
    return [
        f"{violation['id']}: {violation['help']} at {[node['target'] for node in violation['nodes']][:3]}"
        for violation in results.response["violations"]
    ]


@pytest.mark.parametrize(
    ("scheme", "viewport"), [("light", DESKTOP), ("dark", PHONE)], ids=["light", "dark, 360 px"]
)
def test_axe_finds_nothing_and_no_page_is_wider_than_its_window(
    browser: Browser, site: Site, scheme: str, viewport: dict[str, int]
) -> None:
    paths = [
        "/console/workers",
        f"/console/workers/{WORKER}",
        "/console/collections",
        "/console/collections/mapped?like=5",
        "/console/schedules",
        "/console/schedules/nightly",
    ]
    found: dict[str, Any] = {}
    with open_page(browser, site, color_scheme=scheme, viewport=viewport) as page:
        for path in paths:
            beat(site.engine)
            page.goto(site.url + path)
            if violations := find_violations(page):
                found[path] = violations
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            if overflow > 0:
                found[f"{path} overflow"] = overflow
    assert not found, "\n".join(f"{path}: {what}" for path, what in found.items())


def test_a_worker_has_its_charts_and_its_state_moves_by_itself(browser: Browser, site: Site) -> None:
    with open_page(browser, site) as page:
        page.goto(f"{site.url}/console/workers")
        expect(page.locator("svg.spark polyline")).to_have_count(1)
        page.get_by_role("link", name=WORKER).click()
        for chart in ("rates", "memory", "busy"):
            expect(page.locator(f"#{chart} canvas")).to_be_visible()
        page.get_by_text("The numbers").click()
        expect(page.get_by_role("group", name="Samples of the last ten minutes")).to_contain_text("9,216 MiB")
        beat(site.engine, "waiting to commit")
        expect(page.locator(".tile .state")).to_have_text("waiting to commit", timeout=PATIENCE)
        expect(page.get_by_text("9,216 MiB").first).to_be_visible()  # what was opened stays open
        page.get_by_text("prints it").click()
        expect(page.get_by_role("group", name="The plan as text")).to_contain_text("████████▒▒▒▒····")


def test_a_schedule_is_paused_and_resumed_by_keyboard(browser: Browser, site: Site) -> None:
    with open_page(browser, site) as page:
        page.goto(f"{site.url}/console/schedules")
        page.get_by_role("link", name="nightly").click()
        page.get_by_role("button", name="Pause").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Resume")).to_be_visible()
        expect(page.locator(".tile .state")).to_have_text("paused")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator(".tile .state")).to_have_text("on time")
        page.get_by_role("button", name="Run now").click()
        history = page.get_by_role("group", name="History")
        expect(history).to_contain_text("asked for")
        page.once("dialog", lambda dialog: dialog.accept())
        history.get_by_role("button", name="Cancel").click()
        expect(history).to_contain_text("cancelled", timeout=PATIENCE)
        expect(history.get_by_role("button")).to_have_count(0)
