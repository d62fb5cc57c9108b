"""Pause and resume of the chunk protocol on a real Postgres, without Celery."""

from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import claim, claim_next, complete, dispatch_all, make_items, submit
from vectormill.domain.errors import WrongJobState
from vectormill.jobs.chunks import renew_leases
from vectormill.jobs.dispatch import list_demands
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import cancel_job, find_job, pause_job, resume_job, retry_job
from vectormill.jobs.transitions import recall_paused_chunks

FAILURE = ItemFailure(EMPTY_TEXT, "empty")


def pause(engine: Engine, job_id: UUID) -> Job:
    return ask(engine, pause_job, job_id)


def resume(engine: Engine, job_id: UUID) -> Job:
    return ask(engine, resume_job, job_id)


def move_back(engine: Engine, job_id: UUID, column: str, seconds: float) -> None:
    """As if that moment of the job had been so much earlier."""
    statement = text(
        f"UPDATE vectormill.jobs SET {column} = {column} - make_interval(secs => :seconds) WHERE id = :job_id"
    )
    execute(engine, statement, job_id=job_id, seconds=seconds)


def test_a_paused_job_dispatches_nothing_and_its_late_messages_claim_nothing(engine: Engine) -> None:
    job = submit(engine, make_items(12))
    dispatches = dispatch_all(engine, 2)
    assert pause(engine, job.id).state == "paused"
    assert dispatch_all(engine) == []
    assert [claim(engine, dispatch.chunk_id) for dispatch in dispatches] == [None, None]
    assert resume(engine, job.id).state == "running"
    assert len(dispatch_all(engine)) == 3  # those that were with Redis too, at once


def test_a_job_that_is_paused_before_its_first_dispatch_waits_as_queued_again(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    pause(engine, job.id)
    assert dispatch_all(engine) == []
    assert resume(engine, job.id).state == "queued"
    complete(engine, claim_next(engine))
    assert ask(engine, find_job, job.id).state == "completed"


def test_a_chunk_in_flight_is_finished_and_committed_while_its_job_is_paused(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    held = claim_next(engine)
    pause(engine, job.id)
    assert ask(engine, renew_leases, [held], 30) == {held.chunk_id: "paused"}
    assert complete(engine, held) is False
    paused = ask(engine, find_job, job.id)
    assert (paused.state, paused.num_done, paused.num_open_chunks) == ("paused", 4, 1)
    resume(engine, job.id)
    assert complete(engine, claim_next(engine)) is True
    assert ask(engine, find_job, job.id).state == "completed"


@pytest.mark.parametrize(
    ("failures", "state"), [(None, "completed"), ({0: FAILURE}, "completed_with_errors")]
)
def test_a_job_whose_last_chunk_is_finished_while_it_is_paused_has_ended(
    engine: Engine, failures: dict[int, ItemFailure] | None, state: str
) -> None:
    job = submit(engine, make_items(4))
    held = claim_next(engine)
    pause(engine, job.id)
    assert complete(engine, held, failures) is True
    ended = ask(engine, find_job, job.id)
    assert ended.state == state
    assert ended.finished_at is not None
    for wish in (pause, resume):
        with pytest.raises(WrongJobState, match=f"The job is {state}"):
            wish(engine, job.id)


def test_a_dispatch_that_ends_after_the_pause_is_recalled(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    (dispatch,) = dispatch_all(engine)
    pause(engine, job.id)
    with engine.begin() as connection:  # what a dispatcher writes that looked at the job before the pause
        connection.execute(text("UPDATE vectormill.chunks SET state = 'queued', queued_at = now()"))
    assert claim(engine, dispatch.chunk_id) is None
    assert ask(engine, recall_paused_chunks) == 1
    assert ask(engine, recall_paused_chunks) == 0
    resume(engine, job.id)
    assert len(dispatch_all(engine)) == 1


def test_a_paused_job_is_cancelled_as_any_other(engine: Engine) -> None:
    waiting = submit(engine, make_items(4))
    pause(engine, waiting.id)
    assert ask(engine, cancel_job, waiting.id).state == "cancelled"
    held_one = submit(engine, make_items(8))
    claim_next(engine)
    pause(engine, held_one.id)
    cancelling = ask(engine, cancel_job, held_one.id)
    assert (cancelling.state, cancelling.num_open_chunks) == ("cancelling", 1)
    for wish in (pause, resume):
        with pytest.raises(WrongJobState, match="The job is cancelling"):
            wish(engine, held_one.id)


def test_failed_items_of_a_paused_job_are_retried_when_it_goes_on(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    complete(engine, claim_next(engine), {1: FAILURE})
    pause(engine, job.id)
    with engine.begin() as connection:
        retried = retry_job(connection, job.id)
        assert (retried.state, retried.num_failed, retried.num_open_chunks) == ("paused", 0, 2)
        with pytest.raises(WrongJobState, match="none of its items have failed"):
            retry_job(connection, job.id)
    assert dispatch_all(engine) == []
    resume(engine, job.id)
    for dispatch in dispatch_all(engine):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        complete(engine, claimed)
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed", 8, 0)


def test_pauses_and_the_rest_before_a_retry_do_not_slow_the_rate(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    complete(engine, claim_next(engine), {0: FAILURE})
    move_back(engine, job.id, "started_at", 50_000)
    pause(engine, job.id)
    move_back(engine, job.id, "paused_at", 49_000)
    assert ask(engine, find_job, job.id).elapsed_seconds == pytest.approx(1000, abs=400)
    resumed = resume(engine, job.id)
    assert resumed.elapsed_seconds == pytest.approx(1000, abs=400)
    assert resumed.paused_at is None
    assert resumed.idle_seconds == pytest.approx(49_000, abs=400)
    complete(engine, claim_next(engine))
    move_back(engine, job.id, "started_at", 20_000)
    move_back(engine, job.id, "finished_at", 20_000)
    assert ask(engine, retry_job, job.id).elapsed_seconds == pytest.approx(1000, abs=400)


def test_a_resumed_job_ages_from_its_resumption(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    pause(engine, job.id)
    move_back(engine, job.id, "updated_at", 3600)
    resume(engine, job.id)
    (demand,) = ask(engine, list_demands, [job.spec.model], 10)
    assert demand.waited_seconds < 1800
