"""Why jobs wait, on a real Postgres."""

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event, text

from tests.database import ask, execute
from tests.protocol import (
    INCARNATION,
    SPEC,
    claim,
    claim_next,
    complete,
    dispatch_all,
    make_items,
    register_worker,
    submit,
)
from tests.statements import name_statement
from vectormill.jobs import wait_reasons
from vectormill.jobs.chunks import release_chunk
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job, list_jobs, pause_job
from vectormill.jobs.wait_reasons import RecentAnswers, explain_waits
from vectormill.workers.workers import beat_scheduler, beat_worker

REPORT = {"revision": SPEC.revision, "pooling": SPEC.pooling, "state": "running"}


def beat(engine: Engine, slots: int = 4, **report: Any) -> None:
    """A scheduler and a worker say that they live."""
    ask(engine, beat_scheduler)
    ask(engine, beat_worker, "w", INCARNATION, SPEC.model, slots, REPORT | report)


def explain(engine: Engine, job: Job) -> str | None:
    with engine.connect() as connection:
        return explain_waits(connection, [find_job(connection, job.id)]).get(job.id)


def test_a_job_says_what_is_missing_until_it_makes_progress(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    assert "No live worker serves fake" in str(explain(engine, job))
    beat(engine, revision="2")
    assert "live workers have revision 2 and pooling mean" in str(explain(engine, job))
    beat(engine, revision="2", aliases=["0", SPEC.revision])
    assert explain(engine, job) is None
    beat(engine, state="loading", state_reason="")
    assert "w is loading." in str(explain(engine, job))
    with engine.begin() as connection:
        beat_worker(connection, "w", INCARNATION, SPEC.model, 4, {})  # a worker of an earlier release
        beat_scheduler(connection, is_redis_away=True)
    assert "cannot reach Redis" in str(explain(engine, job))
    beat(engine)
    assert explain(engine, job) is None
    held = claim_next(engine)
    execute(engine, "UPDATE vectormill.heartbeats SET beat_at = beat_at - interval '16 s'")
    assert explain(engine, job) is None  # what a worker holds needs no scheduler
    complete(engine, held)
    assert explain(engine, job) is None


def test_a_job_whose_scheduler_is_gone_says_so(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    beat(engine)
    execute(engine, "UPDATE vectormill.heartbeats SET beat_at = beat_at - interval '16 s'")
    assert "`vectormill scheduler`" in str(explain(engine, job))


def test_chunks_that_are_kept_back_by_an_error_name_it_and_others_go_on(engine: Engine) -> None:
    beat(engine)
    job = submit(engine, make_items(8))
    held = claim_next(engine)
    ask(engine, release_chunk, held, "ValueError: no good", is_counted=True, delay_seconds=60)
    assert explain(engine, job) is None  # its second chunk waits for nothing
    complete(engine, claim_next(engine))
    assert "after an error: ValueError: no good" in str(explain(engine, job))


def test_a_job_behind_others_says_how_many_and_which_come_first(engine: Engine) -> None:
    beat(engine, slots=2)
    for priority in (1, 5):
        urgent = submit(engine, make_items(4), priority=priority)
        assert [dispatch.job_id for dispatch in dispatch_all(engine)] == [urgent.id]
    job = submit(engine, make_items(4))
    assert "busy with 2 other jobs, 1 of them of higher priority" in str(explain(engine, job))


def test_an_offer_that_no_worker_takes_is_told_and_an_expired_lease_is_no_progress(engine: Engine) -> None:
    beat(engine)
    job = submit(engine, make_items(8))
    first, _ = dispatch_all(engine)
    execute(engine, "UPDATE vectormill.chunks SET queued_at = now() - interval '16 s'")
    assert "no worker takes them" in str(explain(engine, job))
    claim(engine, first.chunk_id, lease_seconds=-1)
    assert "no worker takes them" in str(explain(engine, job))
    claim(engine, first.chunk_id)
    assert explain(engine, job) is None


def test_a_page_of_jobs_has_a_reason_for_each_that_waits(engine: Engine) -> None:
    beat(engine)
    ended = submit(engine, make_items(4))
    complete(engine, claim_next(engine))
    paused = submit(engine, make_items(4))
    ask(engine, pause_job, paused.id)
    nobodys = submit(engine, make_items(4), spec=replace(SPEC, model="other"))
    jobs = ask(engine, list_jobs, state=None, before_seq=None, limit=10)
    reasons = ask(engine, explain_waits, jobs)
    assert set(reasons) == {paused.id, nobodys.id}
    assert ended.id not in reasons
    assert "Live workers serve fake." in reasons[nobodys.id]


@pytest.mark.parametrize("states", [(), ("completed", "cancelling", "uploading")])
def test_jobs_that_wait_for_nothing_cost_no_query(engine: Engine, states: tuple[str, ...]) -> None:
    job = submit(engine, make_items(4))
    jobs = [replace(job, id=UUID(int=number), state=state) for number, state in enumerate(states)]
    with engine.connect() as connection:
        connection.close()
        assert explain_waits(connection, jobs) == {}


def test_a_job_of_which_a_worker_has_a_chunk_is_explained_without_reading_what_others_have(
    engine: Engine,
) -> None:
    submit(engine, make_items(4))
    job = submit(engine, make_items(8))
    for dispatch in dispatch_all(engine)[:2]:
        claim(engine, dispatch.chunk_id)
    beat(engine)
    names: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        names.append(name_statement(statement))

    event.listen(engine, "before_cursor_execute", note)
    assert explain(engine, job) is None
    assert "LIST_HELD_JOBS" in names
    assert "LIST_IN_HAND" not in names


def test_a_large_answer_is_shared_for_a_second_and_a_small_one_is_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter([0.0, 0.1, 0.2, 0.9, 1.3])
    recent = RecentAnswers(clock=lambda: next(moments))
    names = text(
        "SELECT name FROM vectormill.workers WHERE model = ANY(CAST(:models AS text[])) ORDER BY name"
    )

    def read() -> int:
        return len(ask(engine, recent.read, names, {"models": [SPEC.model]}, str))

    monkeypatch.setattr(wait_reasons, "LARGE_ANSWER", 2)
    assert read() == 0
    register_worker(engine, name="a")
    assert read() == 1
    register_worker(engine, name="b")
    assert read() == 2
    register_worker(engine, name="c")
    assert read() == 2, "it is kept"
    assert read() == 3
