"""The console in a real Chromium: what it shows moves by itself, buttons do what they say, and everybody can use it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, Route, expect
from sqlalchemy import Engine, text

from api.app import create_app
from tests.api_server import serving
from tests.database import ask, execute
from tests.indexed import draw_vectors, make_collection
from tests.protocol import SPEC, claim_next, complete, make_items, register_worker, submit
from tests.schedules import add_source, make_schedule
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.jobs import cancel_job, find_job
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key, revoke_key
from vectormill.settings import Settings
from vectormill.workers.samples import RECENT, Sample, write_samples
from vectormill.workers.workers import beat_worker

TOO_LONG: Final = ItemFailure("text-too-long", "It has 1,200,000 characters, and at most 1,000,000 are read.")
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
    """A served console with a worker, a collection, a schedule, a job at work, and one that ended with errors."""

    url: str
    engine: Engine
    running: UUID
    ended: UUID


def beat(engine: Engine, state: str = "running") -> None:
    samples = [Sample(10.0 * ago, 40_000 + 1000 * (ago % 7), 9216, 85 + ago % 10) for ago in range(60, 0, -1)]
    report: dict[str, Any] = {
        "state": state,
        "device": {"value": "cuda:0", "reason": "requested"},
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
    assert ask(engine, beat_worker, WORKER, INCARNATION, SPEC.model, 4, report)


@pytest.fixture(scope="module")
def site(engine: Engine) -> Iterator[Site]:
    register_worker(engine)
    ended = submit(engine, make_items(8, "e"), collection="docs")
    complete(engine, claim_next(engine), {1: TOO_LONG})
    complete(engine, claim_next(engine))
    running = submit(engine, make_items(400, "r"), collection="wiki")
    complete(engine, claim_next(engine))
    vectors = draw_vectors(300)
    vectors[:100] += np.eye(8, dtype=np.float32)[0] * 3
    make_collection(
        engine, vectors, lambda number: b'{"lang": "%s"}' % (b"de", b"en", b"fr")[number % 3], name="mapped"
    )
    add_source(engine, "mapped")
    make_schedule(engine, "nightly", collection="mapped", timezone="Europe/Berlin")
    with serving(create_app(Settings(), engine)) as url:
        yield Site(url, engine, running.id, ended.id)


@contextmanager
def open_page(browser: Browser, url: str, **context: Any) -> Iterator[Page]:
    """A page of a fresh visitor. It must log no error, run no script of its own text and miss nothing foreign."""
    wrong: list[str] = []
    opened = browser.new_context(viewport=context.pop("viewport", DESKTOP), **context)
    opened.set_default_timeout(PATIENCE)
    page = opened.new_page()

    def hear(message: ConsoleMessage) -> None:
        if message.type == "error":
            wrong.append(message.text)

    def see(asked: Request) -> None:
        if not asked.url.startswith((url, "data:")):
            wrong.append(asked.url)

    page.on("console", hear)
    page.on("request", see)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    try:
        yield page
    finally:
        opened.close()
    assert not wrong


@pytest.fixture
def page(browser: Browser, site: Site) -> Iterator[Page]:
    with open_page(browser, site.url) as page:
        yield page


def paths_of(site: Site) -> dict[str, str]:
    return {
        "jobs": "/console/jobs",
        "submit": "/console/submit",
        "job at work": f"/console/jobs/{site.running}",
        "job that ended": f"/console/jobs/{site.ended}",
        "errors": f"/console/jobs/{site.ended}/errors",
        "queue": "/console/queue",
        "workers": "/console/workers",
        "worker": f"/console/workers/{WORKER}",
        "collections": "/console/collections",
        "collection": "/console/collections/mapped",
        "search": "/console/collections/mapped/search?like=5",
        "schedules": "/console/schedules",
        "schedule": "/console/schedules/nightly",
        "no page": "/console/nothing",
    }


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
def test_axe_finds_nothing_on_any_page_and_none_is_wider_than_its_window(
    browser: Browser, site: Site, scheme: str, viewport: dict[str, int]
) -> None:
    found: dict[str, list[str]] = {}
    with opened_quietly(browser, scheme, viewport) as page:
        for name, path in paths_of(site).items():
            beat(site.engine)  # the worker is alive for a while
            page.goto(site.url + path)
            if violations := find_violations(page):
                found[name] = violations
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{name} is {overflow} px wider than its window"
    assert not found


@contextmanager
def opened_quietly(browser: Browser, scheme: Any, viewport: Any) -> Iterator[Page]:
    """A page whose errors are no matter: one of those looked at is answered 404."""
    context = browser.new_context(viewport=viewport, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    try:
        yield context.new_page()
    finally:
        context.close()


def test_a_job_moves_on_its_page_and_in_the_list_while_both_are_only_looked_at(
    browser: Browser, site: Site
) -> None:
    with open_page(browser, site.url) as job, open_page(browser, site.url) as jobs:
        job.goto(f"{site.url}/console/jobs/{site.running}")
        jobs.goto(f"{site.url}/console/jobs")
        row = jobs.locator(f"#job-{site.running}")
        expect(job.get_by_text("4 of 400 texts")).to_be_visible()
        expect(row).to_contain_text("4 of 400")
        for _ in range(2):
            complete(site.engine, claim_next(site.engine))
        expect(job.get_by_text("12 of 400 texts")).to_be_visible(timeout=PATIENCE)
        expect(row).to_contain_text("12 of 400", timeout=PATIENCE)
        complete(site.engine, claim_next(site.engine))
        expect(job.locator("#rate canvas")).to_be_visible(timeout=PATIENCE)  # a second stretch makes a line


def test_a_phone_shows_the_progress_and_the_numbers_of_jobs_without_scrolling_aside(
    browser: Browser, site: Site
) -> None:
    with open_page(browser, site.url, viewport={"width": 390, "height": 844}) as page:
        page.goto(f"{site.url}/console/jobs")
        row = page.locator(f"#job-{site.running}")
        for shown in (
            row.get_by_role("img"),
            row.get_by_text("of 400"),
            row.locator(".state"),
            row.locator("time"),
            row.locator("[data-label=Failed]"),
        ):
            box = shown.bounding_box()
            assert box is not None
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 390
        region = page.get_by_role("region", name="Jobs, newest first")
        assert region.evaluate("element => element.scrollWidth <= element.clientWidth")
        # Other tables go on at a side, and a shadow says so.
        page.goto(f"{site.url}/console/collections")
        region = page.locator(".scroll").first
        assert region.evaluate("element => element.scrollWidth > element.clientWidth")
        assert "local" in region.evaluate("element => getComputedStyle(element).backgroundAttachment")


def test_a_file_is_submitted_by_a_form_whose_refusals_leave_what_was_filled_in(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    file = tmp_path / "papers.csv"
    file.write_text("doi,body\nx/1,one\nx/2,two\n")
    with opened_quietly(browser, "light", {"width": 390, "height": 844}) as page:
        page.goto(f"{site.url}/console/jobs")
        page.get_by_role("button", name="Submit a file").click()
        page.get_by_label("File").set_input_files(file)
        page.get_by_label("Collection").fill("papers")
        page.get_by_role("button", name="Submit").click()
        refusal = page.locator("form").get_by_role("alert")
        expect(refusal).to_contain_text("papers.csv has no column 'text'", timeout=PATIENCE)
        expect(refusal).to_be_in_viewport()
        assert find_violations(page) == []
        page.get_by_label("Column of the texts").fill("body")
        page.get_by_role("button", name="Submit").click()
        page.wait_for_url("**/console/jobs/*-*", timeout=PATIENCE)
        expect(page.get_by_text("0 of 2 texts")).to_be_visible(timeout=PATIENCE)
        expect(page.get_by_role("link", name="papers")).to_be_visible()


def test_a_page_whose_scripts_come_slowly_follows_all_the_same(browser: Browser, site: Site) -> None:
    """htmx looks through the page once: what is loaded behind that moment would follow nothing."""

    def come_late(route: Route) -> None:
        time.sleep(1)  # a slow network, which sends no event
        route.continue_()

    with opened_quietly(browser, "light", DESKTOP) as page:
        page.route("**/hx-sse.min*", come_late)
        page.goto(f"{site.url}/console/jobs")
        expect(page.locator("#live-mark")).to_be_visible(timeout=PATIENCE)


def test_a_page_whose_stream_was_refused_at_first_follows_all_the_same(browser: Browser, site: Site) -> None:
    refused: list[str] = []

    def refuse_twice(route: Route) -> None:
        if len(refused) == 2:
            route.continue_()
            return
        refused.append(route.request.url)
        if len(refused) == 1:
            route.abort()
        else:
            route.fulfill(status=503, content_type="text/html", body="busy")

    with opened_quietly(browser, "light", DESKTOP) as page:
        page.route("**/console/live/jobs*", refuse_twice)
        page.goto(f"{site.url}/console/jobs")
        expect(page.locator("#live-mark")).to_be_visible(timeout=PATIENCE)
        complete(site.engine, claim_next(site.engine))
        num_done = ask(site.engine, find_job, site.running).num_done
        expect(page.locator(f"#job-{site.running}")).to_contain_text(f"{num_done} of 400", timeout=PATIENCE)
    assert len(refused) == 2


def test_buttons_pause_resume_and_cancel_by_keyboard_and_focus_stays(site: Site, page: Page) -> None:
    job = submit(site.engine, make_items(40, "b"))
    page.goto(f"{site.url}/console/jobs/{job.id}")
    pause = page.get_by_role("button", name="Pause")
    pause.focus()
    page.keyboard.press("Enter")
    resume = page.get_by_role("button", name="Resume")
    expect(resume).to_be_focused(timeout=PATIENCE)
    expect(page.locator(".headline .state")).to_have_text("paused")
    page.keyboard.press("Enter")
    expect(pause).to_be_focused(timeout=PATIENCE)
    questions: list[str] = []

    def agree(dialog: Dialog) -> None:
        questions.append(dialog.message)
        dialog.accept()

    page.on("dialog", agree)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".headline .state")).to_have_text("cancelled", timeout=PATIENCE)
    assert "Vectors already committed are kept" in questions[0]
    expect(page.locator(".actions button")).to_have_count(0)


def test_failed_texts_are_told_with_their_keys_and_tried_again(site: Site, page: Page) -> None:
    page.goto(f"{site.url}/console/jobs/{site.ended}")
    errors = page.get_by_role("region", name="Failed texts")
    expect(errors.get_by_role("row", name="e1")).to_contain_text("1,200,000 characters")
    with page.expect_download() as download:
        page.get_by_role("button", name="ndjson").click()
    assert download.value.suggested_filename == f"{site.ended}.ndjson"
    page.get_by_role("button", name="Retry failed texts").click()
    expect(page.locator(".headline .state")).to_have_text("queued", timeout=PATIENCE)


def test_what_cannot_be_done_any_more_is_a_notice_on_the_page(browser: Browser, site: Site) -> None:
    job = submit(site.engine, make_items(4, "n"))
    with opened_quietly(browser, "light", DESKTOP) as page:
        page.route(
            "**/console/live/**", lambda route: route.abort()
        )  # the page is not told what happens meanwhile
        page.goto(f"{site.url}/console/jobs/{job.id}")
        ask(site.engine, cancel_job, job.id)
        page.get_by_role("button", name="Pause").click()
        expect(page.get_by_role("alert")).to_contain_text("The job is cancelled; only a job that is waiting")
        expect(page.locator(".headline .state")).to_have_text("queued")


def test_a_worker_has_its_charts_and_its_state_moves_by_itself(browser: Browser, site: Site) -> None:
    beat(site.engine)
    with open_page(browser, site.url) as page:
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
    with open_page(browser, site.url) as page:
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
        expect(history).to_contain_text("manual")
        page.once("dialog", lambda dialog: dialog.accept())
        history.get_by_role("button", name="Cancel").click()
        expect(history).to_contain_text("cancelled", timeout=PATIENCE)
        expect(history.get_by_role("button")).to_have_count(0)


def test_the_reference_of_the_api_needs_no_internet(site: Site, page: Page) -> None:
    page.goto(f"{site.url}/docs")
    expect(page.locator(".opblock-summary-path", has_text="/v1/rerank")).to_be_visible(timeout=PATIENCE)
    page.locator(".opblock-summary-path", has_text="/v1/rerank").click()
    expect(page.locator(".opblock-body").first).to_be_visible(timeout=PATIENCE)


def test_a_theme_that_was_chosen_is_kept(site: Site, page: Page) -> None:
    page.goto(f"{site.url}/console/queue")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.get_by_role("button", name="Switch between dark and light").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.goto(f"{site.url}/console/jobs")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_ten_thousand_jobs_are_listed_a_page_at_a_time(site: Site, page: Page) -> None:
    with site.engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO vectormill.jobs (state, model, spec, priority, num_items, num_done, id, finished_at)
                SELECT 'completed', model, spec, priority, 4, 4, gen_random_uuid(), now()
                  FROM vectormill.jobs, generate_series(1, 10000) WHERE id = :id
            """),
            {"id": site.running},
        )
    page.goto(f"{site.url}/console/jobs?state=completed")
    rows = page.locator("table.jobs tbody tr")
    expect(rows).to_have_count(50)
    first = rows.first.get_attribute("id")
    page.get_by_role("button", name="Older").click()
    expect(page.get_by_role("button", name="Newest")).to_be_visible()
    expect(rows).to_have_count(50)
    assert rows.first.get_attribute("id") != first
    painted = page.evaluate(
        "performance.getEntriesByType('paint').find((entry) => entry.name === 'first-contentful-paint').startTime"
    )
    assert painted < 30_000  # far above what it takes, for machines with much else to do


def test_a_key_logs_in_looks_presses_nothing_and_is_shown_out_when_it_is_revoked(
    browser: Browser, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)
    secret = make_secret()
    ask(site.engine, create_key, "looker", secret, "read")
    ask(site.engine, create_key, "other", make_secret(), "admin")
    try:
        with opened_quietly(browser, "light", DESKTOP) as page:
            page.goto(f"{site.url}/console/jobs/{site.running}")
            assert find_violations(page) == []
            page.get_by_label("API key").fill("vmk_" + "x" * 43)
            page.get_by_role("button", name="Log in").click()
            expect(page.locator("#refusal")).to_contain_text("Unknown API key")
            page.get_by_label("API key").fill(secret)
            page.keyboard.press("Enter")
            expect(page).to_have_url(f"{site.url}/console/jobs/{site.running}")
            expect(page.get_by_role("button", name="Pause")).to_be_disabled()
            expect(page.get_by_text("Your key has scope read")).to_be_visible()
            assert find_violations(page) == []
            ask(site.engine, revoke_key, "looker")
            page.goto(f"{site.url}/console/queue")
            expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    finally:
        execute(site.engine, "DELETE FROM vectormill.api_keys")
