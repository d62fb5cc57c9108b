"""Every way in which a job or a run ends leaves exactly one event, in the transaction that ends it, or none at all."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute, load_payload
from tests.protocol import (
    SPEC,
    claim_next,
    complete,
    complete_on,
    make_items,
    submit,
)
from tests.schedules import make_collection
from tests.states import ALL_JOB_STATES
from tests.webhooks import events_of, make_webhook
from vectormill.collections.removals import stop_work
from vectormill.jobs.chunks import release_chunk
from vectormill.jobs.completion import cancel_chunk, fail_chunk
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import cancel_job, retry_job
from vectormill.jobs.submission import JobWriter
from vectormill.jobs.transitions import end_cancelled_jobs, end_finished_jobs
from vectormill.runs.run import REINDEX, RUN_STATES
from vectormill.runs.runs import cancel_run, claim_run, create_run, end_run
from vectormill.settings import Settings
from vectormill.sources.pushes import prune_pushes
from vectormill.webhooks.webhook import EVENTS

FAILURE = ItemFailure("encoding_failed", "so it is")


def finish(engine: Engine) -> None:
    complete(engine, claim_next(engine))


def finish_with_an_error(engine: Engine) -> None:
    complete(engine, claim_next(engine), {0: FAILURE})


def finish_without_a_vector(engine: Engine) -> None:
    claimed = claim_next(engine)
    with engine.begin() as connection:
        fail_chunk(connection, claimed, load_payload(connection, claimed.chunk_id), FAILURE, None)


def cancel(engine: Engine) -> None:
    ask(engine, cancel_job, job_id_of(engine))


def cancel_under_a_worker(engine: Engine) -> None:
    claimed = claim_next(engine)
    cancel(engine)
    ask(engine, cancel_chunk, claimed)


def cancel_under_a_worker_that_is_lost(engine: Engine) -> None:
    claimed = claim_next(engine)
    cancel(engine)
    ask(engine, release_chunk, claimed, "lost", is_counted=True)
    ask(engine, end_cancelled_jobs)


def lose_the_finisher(engine: Engine) -> None:
    execute(engine, "UPDATE vectormill.jobs SET num_open_chunks = 0, num_done = num_items")
    end_finished_jobs(engine)


def take_the_collection(engine: Engine) -> None:
    stop_work(engine, "docs")


def job_id_of(engine: Engine) -> UUID:
    with engine.connect() as connection:
        found: UUID = connection.execute(text("SELECT id FROM vectormill.jobs")).scalar_one()
        return found


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (finish, "completed"),
        (finish_with_an_error, "completed_with_errors"),
        (finish_without_a_vector, "failed"),
        (cancel, "cancelled"),
        (cancel_under_a_worker, "cancelled"),
        (cancel_under_a_worker_that_is_lost, "cancelled"),
        (lose_the_finisher, "completed"),
        (take_the_collection, "cancelled"),
    ],
)
def test_a_job_that_ends_leaves_one_event(engine: Engine, end: Callable[[Engine], None], state: str) -> None:
    webhook, _ = make_webhook(engine)
    job = submit(engine, make_items(4), collection="docs")
    assert events_of(engine, webhook) == []
    end(engine)
    (event,) = events_of(engine, webhook)
    data = event["data"]
    assert event["type"] == f"job.{state}"
    assert {name: data[name] for name in ("id", "state", "model", "collection", "num_items")} == {
        "id": str(job.id), "state": state, "model": "fake", "collection": "docs", "num_items": 4,
    }  # fmt: skip
    assert datetime.fromisoformat(data["finished_at"]) <= datetime.fromisoformat(event["timestamp"])
    assert datetime.fromisoformat(event["timestamp"]).utcoffset() == datetime.now(UTC).utcoffset()
    with engine.begin() as connection:  # nothing that comes later ends it once more
        discard_job(connection, job.id)
    assert len(events_of(engine, webhook)) == 1


def test_the_counts_are_those_of_the_end(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    submit(engine, make_items(8))
    finish_with_an_error(engine)
    assert events_of(engine, webhook) == []  # a chunk is still open
    finish(engine)
    (event,) = events_of(engine, webhook)
    data = event["data"]
    assert (data["num_items"], data["num_done"], data["num_failed"], data["collection"]) == (8, 7, 1, None)


def test_a_retried_job_ends_twice(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    job = submit(engine, make_items(4))
    finish_with_an_error(engine)
    ask(engine, retry_job, job.id)
    finish(engine)
    assert [event["type"] for event in events_of(engine, webhook)] == [
        "job.completed_with_errors",
        "job.completed",
    ]


def test_a_commit_that_is_rolled_back_leaves_no_event(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    submit(engine, make_items(4))
    claimed = claim_next(engine)
    with engine.connect() as connection:
        assert complete_on(connection, claimed)
        connection.rollback()
    assert events_of(engine, webhook) == []
    complete(engine, claimed)
    assert len(events_of(engine, webhook)) == 1


def test_a_webhook_that_is_deleted_meanwhile_fails_no_commit(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    submit(engine, make_items(4))
    claimed = claim_next(engine)
    with engine.connect() as deleting:
        deleting.execute(text("DELETE FROM vectormill.webhooks WHERE id = :id"), {"id": webhook})
        assert complete(engine, claimed)
        deleting.commit()


def test_each_webhook_is_told_of_what_it_asked_for_and_a_disabled_one_of_nothing(engine: Engine) -> None:
    of_all, _ = make_webhook(engine)
    of_failures, _ = make_webhook(engine, events=["job.failed"])
    disabled, _ = make_webhook(engine)
    with engine.begin() as connection:
        disable = text("UPDATE vectormill.webhooks SET is_enabled = false WHERE id = :id")
        connection.execute(disable, {"id": disabled})
    submit(engine, make_items(4))
    finish(engine)
    assert [len(events_of(engine, each)) for each in (of_all, of_failures, disabled)] == [1, 0, 0]


def test_jobs_that_nobody_submitted_say_nothing(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    for seconds in (60, float("inf")):  # of a search, and of a put
        with JobWriter(engine, NewJob(SPEC, lifetime_seconds=seconds), Settings()) as writer:
            writer.add(make_items(1)[0])
            writer.finish()
        finish(engine)
    submit(engine, make_items(4))
    execute(engine, "UPDATE vectormill.jobs SET twin_of = :id", id=uuid4())
    finish(engine)
    assert events_of(engine, webhook) == []


def make_run(engine: Engine, **given: Any) -> UUID:
    with engine.begin() as connection:
        run = create_run(connection, "docs", REINDEX, **given)
        assert run is not None
        return run.id


def test_a_run_that_ends_or_is_held_leaves_one_event(engine: Engine) -> None:
    webhook, _ = make_webhook(engine, events=[event for event in EVENTS if event.startswith("run.")])
    make_collection(engine, "docs")
    told = ["completed", "completed_with_errors", "failed", "held"]
    run_id = None
    for state in told:
        run_id = make_run(engine)
        with engine.begin() as connection:
            claimed = claim_run(connection, "somebody", 30)
            assert claimed is not None
            end_run(connection, claimed[0], state, "why")
        event = events_of(engine, webhook)[-1]
        data = event["data"]
        assert event["type"] == f"run.{state}"
        assert (data["id"], data["kind"], data["collection"], data["error"]) == (
            str(run_id), "reindex", "docs", "why",
        )  # fmt: skip
        assert data["counts"]["num_seen"] == 0
    with engine.begin() as connection:
        assert run_id is not None
        cancel_run(connection, run_id)  # which is held
    for state in ("failed", "skipped"):  # which never began
        make_run(engine, state=state, error="why")
    assert ask(engine, create_run, "docs", REINDEX, state="uploading") is not None
    ask(engine, prune_pushes, -1.0)
    assert [event["type"] for event in events_of(engine, webhook)] == [
        f"run.{state}" for state in (*told, "cancelled", "failed", "skipped", "failed")
    ]


def test_triggers_fire_for_the_states_that_the_table_of_events_names(engine: Engine) -> None:
    webhook, _ = make_webhook(engine)
    make_collection(engine, "docs")
    make_run(engine)
    for table, states in (("jobs", ALL_JOB_STATES), ("runs", RUN_STATES)):
        for state in states:
            for each in ("uploading", state):  # from another state, in a transaction of its own
                execute(engine, f"UPDATE vectormill.{table} SET state = :state", state=each)
    assert sorted(event["type"] for event in events_of(engine, webhook)) == sorted(EVENTS)
