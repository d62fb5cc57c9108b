"""The console's workers on a real API: those that tell all, and those of earlier releases, which tell less."""

import html
import re
from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.workers.samples import RECENT, Sample, write_samples
from vectormill.workers.workers import beat_worker, delete_worker
from worker.devices.described import describe_inventory
from worker.launcher import assign_replicas
from worker.placement.placement import draw_placement
from worker.plan import plan_machine
from worker.settings import WorkerSettings

INCARNATION = uuid4()


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        yield client


def words_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", answer.text).split()))


def beat(engine: Engine, name: str, report: dict[str, Any], launcher: UUID | None = None) -> None:
    with engine.begin() as connection:
        assert beat_worker(connection, name, INCARNATION, DEFAULT_MODEL, 4, report, launcher)


def report_of(placement: dict[str, Any]) -> dict[str, Any]:
    return {
        "state": "running",
        "state_reason": "",
        "device": {"value": "cuda:0", "reason": "the first that is free"},
        "backend": {"value": "torch", "reason": "the only one on <cuda>"},
        "precision": {"value": "bf16", "reason": "the device has bf16 matrix instructions"},
        "attention": "packed",
        "notes": ["int8 was not chosen."],
        "num_restarts": 0,
        "padding_waste": 0.02,
        "bound_by": {"value": "run", "reason": "The device was computing in 90% of the time."},
        "placement": placement,
        "device_memory_used_bytes": 6 << 30,
        "device_memory_total_bytes": 24 << 30,
        "device_utilisation": 0.93,
        RECENT: write_samples([Sample(10.0 * ago, 1000.0 * ago, 6000, 90 + ago) for ago in range(5, 0, -1)]),
    }


def test_without_workers_the_page_says_how_one_is_started(client: httpx.Client) -> None:
    page = client.get("/console/workers")
    assert "No worker is alive" in words_of(page)
    assert 'aria-current="page">Workers' in page.text


def test_a_list_tells_what_each_runs_on_how_fast_it_is_and_what_bounds_it(
    client: httpx.Client, engine: Engine
) -> None:
    beat(engine, "m-cuda0@host", report_of({}))
    beat(engine, "old", {})  # as a worker of the first release
    beat(engine, "sick", {"state": "waiting to commit", "state_reason": "No space left on device"})
    page = client.get("/console/workers")
    said = words_of(page)
    assert "m-cuda0@host all-MiniLM-L6-v2 running cuda:0 torch, bf16 1,000" in said
    assert "6.0 GiB of 24.0 GiB 93 % run" in said
    assert "sick is waiting to commit: No space left on device" in said
    assert "old all-MiniLM-L6-v2 starting – –, –" in said
    assert 'points="0.0,0.0' in page.text


def test_a_worker_shows_its_minutes_its_choices_and_the_plan_as_the_command_prints_it(
    client: httpx.Client, engine: Engine
) -> None:
    card = Registry({}).outline(DEFAULT_MODEL)
    (planned,) = plan_machine([card], describe_inventory("2x24GiB"), WorkerSettings())
    launcher = uuid4()
    for number, assignment in enumerate(assign_replicas(planned)):
        beat(engine, f"m-cuda{number}@host", report_of(dict(assignment.part)), launcher)
    page = client.get("/console/workers/m-cuda0@host")
    said = words_of(page)
    assert "one of 2 replicas" in said
    assert "backend torch the only one on <cuda>" in said
    assert "int8 was not chosen." in said
    assert "10 s 1,000 6,000 MiB 91 %" in said
    assert draw_placement(planned.placement) in html.unescape(page.text)
    for chart in ("rates", "memory", "busy"):
        assert f'id="{chart}"' in page.text


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"state": "loading", "recent": "?"},
        {"placement": {"strategy": "replicate", "stages": []}},  # without the plan's own sentences
        {"placement": [], "device": None, "bound_by": None, "notes": None},
    ],
)
def test_a_worker_that_tells_less_is_shown_all_the_same(
    client: httpx.Client, engine: Engine, report: dict[str, Any]
) -> None:
    beat(engine, "old", report)
    said = words_of(client.get("/console/workers/old"))
    assert "No samples yet" in said
    assert "This worker tells no plan" in said


def test_a_worker_that_is_not_there_is_not_found(client: httpx.Client) -> None:
    for name in ("nobody", "a%00b", "x" * 600, "org/model-cpu0@host"):
        answer = client.get(f"/console/workers/{name}")
        assert answer.status_code == 404
        assert "is alive" in answer.text


def test_a_look_at_a_worker_follows_it_to_its_end(client: httpx.Client, engine: Engine) -> None:
    beat(engine, "org/model@host", report_of({}))
    with client.stream("GET", "/console/live/workers/org/model@host") as answer:
        lines = answer.iter_lines()
        assert any("The worker is running" in line for line in lines)
        with engine.begin() as connection:
            delete_worker(connection, "org/model@host", INCARNATION)
        rest = "\n".join(lines)
    assert "no sign of life any more" in rest
    assert "event: end" in rest
