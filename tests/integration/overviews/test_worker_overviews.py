"""A worker by name, and the plan that it and its mates carry out, on a real Postgres."""

from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine

from tests.database import ask
from tests.protocol import SPEC
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.workers.plan_picture import draw_plan, join_parts
from vectormill.workers.workers import beat_worker, find_worker, list_plan_parts
from worker.devices.described import describe_inventory
from worker.launcher import assign_replicas
from worker.placement.placement import draw_placement
from worker.plan import plan_machine
from worker.settings import WorkerSettings


def beat(engine: Engine, name: str, report: dict[str, Any], launcher: UUID | None = None) -> None:
    assert ask(engine, beat_worker, name, uuid4(), SPEC.model, 4, report, launcher)


def test_the_picture_of_a_plan_is_put_together_from_what_its_workers_report(engine: Engine) -> None:
    card = Registry({}).outline(DEFAULT_MODEL)
    (planned,) = plan_machine([card], describe_inventory("3x24GiB"), WorkerSettings())
    launcher = uuid4()
    for number, assignment in enumerate(assign_replicas(planned)):
        beat(engine, f"m-cuda{number}@host", {"placement": assignment.part}, launcher)
    beat(engine, "m-cuda0@other", {"placement": {"strategy": "replicate"}}, uuid4())
    parts = ask(engine, list_plan_parts, "m-cuda1@host")
    assert list(parts) == [f"m-cuda{number}@host" for number in range(3)]
    assert draw_plan(join_parts(list(parts.values()))) == draw_placement(planned.placement)


def test_a_worker_of_an_earlier_release_is_found_and_has_no_mates(engine: Engine) -> None:
    beat(engine, "old", {})
    beat(engine, "older", {"placement": {"strategy": "replicate", "stages": []}})
    with engine.connect() as connection:
        found = find_worker(connection, "old")
        assert found is not None
        assert found.report == {}
        assert list_plan_parts(connection, "old") == {}
        assert list(list_plan_parts(connection, "older")) == ["older"]
        assert find_worker(connection, "nobody") is None
