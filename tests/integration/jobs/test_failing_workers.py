"""A worker that cannot load its model says so where people look, and is given nothing to do."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from scheduler.pruner import Pruner
from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, make_items, register_worker, submit
from tests.waiting import wait_for
from vectormill.domain.errors import ModelError
from vectormill.jobs.dispatch import list_rooms
from vectormill.jobs.item import MODEL_NOT_LOADED
from vectormill.jobs.jobs import find_job, list_item_errors, pause_job, retry_job
from vectormill.jobs.wait_reasons import LIST_STUCK_JOBS, explain_waits
from vectormill.workers.workers import count_failing_workers, count_workers, list_workers
from worker.app import start_engine
from worker.engine.engine import Engine as LoadedEngine
from worker.identity import FailureNotice, WorkerIdentity

REASON = "openvino cannot run this model: the model process was killed by SIGFPE"
IDENTITY = WorkerIdentity("fake-cpu0@host", uuid4(), uuid4(), SPEC.model, 16)


class BrokenEngine:
    """Stands for an engine whose model is loaded at the third try."""

    def __init__(self, number: int) -> None:
        self._number = number

    def start(self) -> None:
        if self._number < 3:
            raise ModelError(REASON)

    def stop(self) -> None: ...

    def report(self) -> dict[str, object]:
        pooling, revision = SPEC.pooling, SPEC.revision
        return {"state": "dead", "state_reason": REASON, "pooling": pooling, "revision": revision}


@pytest.fixture
def notice(engine: Engine) -> Iterator[FailureNotice]:
    notice = FailureNotice(engine, IDENTITY, 0.05, lambda: ["cuda:0 is lost."])
    yield notice
    notice.end()


def test_a_job_waits_with_the_reason_why_no_worker_can_load_its_model(
    engine: Engine, notice: FailureNotice
) -> None:
    job = submit(engine, make_items(2))
    notice.tell(BrokenEngine(1).report())

    def explain() -> str | None:
        reason = ask(engine, explain_waits, [job])[job.id]
        return reason if REASON in reason else None

    assert f"fake-cpu0@host is dead ({REASON})" in wait_for(explain)
    assert ask(engine, count_workers) == {}
    assert ask(engine, count_failing_workers) == 1
    assert ask(engine, list_rooms) == []
    assert [worker.report["lost_devices"] for worker in ask(engine, list_workers)] == [["cuda:0 is lost."]]


def test_a_model_that_is_not_loaded_is_tried_again_after_growing_pauses(notice: FailureNotice) -> None:
    made: list[BrokenEngine] = []
    pauses: list[float] = []

    def make() -> BrokenEngine:
        made.append(BrokenEngine(len(made) + 1))
        return made[-1]

    start_engine(cast(Callable[[], LoadedEngine], make), notice, pauses.append)
    assert len(made) == 3
    assert pauses == [30.0, 60.0]


def test_a_model_that_leaves_its_certificate_is_reported_and_tried_again(
    engine: Engine, notice: FailureNotice
) -> None:
    flaws = iter(["'a text' agrees with the reference of the certificate by 0.90000", ""])

    def check(loaded: LoadedEngine) -> None:
        if flaw := next(flaws):
            raise ModelError(flaw)

    pauses: list[float] = []

    def wait(seconds: float) -> None:
        pauses.append(seconds)
        wait_for(lambda: "0.90000" in explain(engine))

    start_engine(cast(Callable[[], LoadedEngine], lambda: BrokenEngine(3)), notice, wait, check)
    assert pauses == [30.0]


def explain(engine: Engine) -> str:
    """Return what the listed worker says of its state."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT report ->> 'state_reason' FROM vectormill.workers")).scalars()
        return " ".join(rows)


DAY = 86400.0
NEVER = 1e9


def fail_stuck_jobs(engine: Engine) -> None:
    """Give the pruner a round in which nothing but a day's failed loading is past its time."""
    Pruner(engine, NEVER, NEVER, NEVER, DAY).prune()


def list_failing_worker(engine: Engine, notice: FailureNotice) -> None:
    """Have the worker tell that it cannot load its model."""
    notice.tell(BrokenEngine(1).report())

    def is_listed() -> bool:
        return ask(engine, count_failing_workers) == 1

    wait_for(is_listed)


def let_pass(engine: Engine, seconds: float, table: str = "jobs, workers") -> None:
    """Move what jobs and workers have last done into the past."""
    moved = {
        "jobs": "UPDATE vectormill.jobs SET updated_at = updated_at - make_interval(secs => :seconds)",
        "workers": "UPDATE vectormill.workers SET started_at = started_at - make_interval(secs => :seconds)",
    }
    with engine.begin() as connection:
        for name in table.split(", "):
            connection.execute(text(moved[name]), {"seconds": seconds})


def test_a_job_whose_model_no_worker_loads_for_a_day_fails_with_the_reason_and_is_there_for_a_retry(
    engine: Engine, notice: FailureNotice
) -> None:
    job = submit(engine, make_items(50), chunk_max_items=4)  # more chunks than of one transaction
    list_failing_worker(engine, notice)
    let_pass(engine, DAY + 1)
    fail_stuck_jobs(engine)
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_failed, ended.num_open_chunks) == ("failed", 50, 0)
    assert ended.finished_at is not None
    with engine.begin() as connection:
        errors = list_item_errors(connection, job.id, after=None, limit=100)
        assert [(error.key, error.code) for error in errors] == [
            (f"k{number}", MODEL_NOT_LOADED) for number in range(50)
        ]
        assert REASON in errors[0].detail
        assert retry_job(connection, job.id).state == "queued"
    fail_stuck_jobs(engine)
    assert ask(engine, find_job, job.id).state == "queued"  # the retry has a day of its own
    notice.end()
    register_worker(engine, name="other")
    while not complete(engine, claim_next(engine)):
        pass
    assert ask(engine, find_job, job.id).state == "completed"


def test_items_that_had_their_vector_before_the_model_was_lost_keep_it(
    engine: Engine, notice: FailureNotice
) -> None:
    job = submit(engine, make_items(8), chunk_max_items=4)
    register_worker(engine, name="gone")
    complete(engine, claim_next(engine))
    execute(engine, "DELETE FROM vectormill.workers")
    list_failing_worker(engine, notice)
    let_pass(engine, DAY + 1)
    fail_stuck_jobs(engine)
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed_with_errors", 4, 4)


@pytest.mark.parametrize("young", ["jobs", "workers"])
def test_a_job_fails_only_when_it_and_the_failure_to_load_are_older_than_the_limit(
    engine: Engine, notice: FailureNotice, young: str
) -> None:
    job = submit(engine, make_items(2))
    list_failing_worker(engine, notice)
    let_pass(engine, DAY + 1, "workers" if young == "jobs" else "jobs")
    let_pass(engine, DAY - 60, young)
    fail_stuck_jobs(engine)
    assert ask(engine, find_job, job.id).state == "queued"


def test_a_job_that_another_worker_may_encode_or_that_nobody_was_started_for_waits_on(
    engine: Engine, notice: FailureNotice
) -> None:
    absent, other = (
        submit(engine, make_items(2), spec=spec)
        for spec in (replace(SPEC, model="absent"), replace(SPEC, revision="2"))
    )
    list_failing_worker(engine, notice)
    let_pass(engine, DAY + 1)
    fail_stuck_jobs(engine)
    assert [ask(engine, find_job, job.id).state for job in (absent, other)] == ["queued", "queued"]
    served = submit(engine, make_items(2))
    register_worker(engine, name="other")
    let_pass(engine, DAY + 1)
    fail_stuck_jobs(engine)
    assert ask(engine, find_job, served.id).state == "queued"


def test_a_paused_job_is_not_failed(engine: Engine, notice: FailureNotice) -> None:
    job = submit(engine, make_items(2))
    ask(engine, pause_job, job.id)
    list_failing_worker(engine, notice)
    let_pass(engine, DAY + 1)
    fail_stuck_jobs(engine)
    assert ask(engine, find_job, job.id).state == "paused"


def test_stuck_jobs_are_found_without_reading_ended_ones(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        plan = connection.execute(
            text(f"EXPLAIN {LIST_STUCK_JOBS.text}"), {"models": ["fake"], "seconds": DAY}
        ).scalars()
        assert any("ix_jobs_dispatched" in line for line in plan)
