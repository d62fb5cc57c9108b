"""What the dispatcher finds to do in a real Postgres, and what becomes of a bell that could not be rung."""

from dataclasses import replace
from typing import cast
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from scheduler.dispatcher import MAX_DEMANDS, Dispatcher
from tests.clusters import connect
from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, make_items, register_worker, submit
from vectormill.broker.queues import QueueReader, RedisLossDetector, task_id_of
from vectormill.jobs.backlog import count_backlog
from vectormill.jobs.chunk import LARGEST_CHUNK_TOKENS, Dispatch
from vectormill.jobs.dispatch import WorkerCapacity, list_demands, list_rooms, mark_queued
from vectormill.jobs.item import Item, ItemFailure
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import retry_job
from vectormill.jobs.submission import JobWriter
from vectormill.jobs.transitions import rescue_expired_chunks
from vectormill.settings import Settings
from vectormill.workers.workers import (
    REDIS_AWAY,
    SCHEDULER,
    beat_scheduler,
    beat_worker,
    list_signs_of_life,
)
from worker.engine.tuner import choose_tokens_in_flight

# Of a chunk of four texts of make_items, estimated.
TOKENS = 4 * 4


class QuietSentinel:
    """A Redis that is there and has lost nothing."""

    def has_lost_content(self) -> bool:
        return False


class FakeQueues:
    """Task ids that wait in Redis."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()

    def list_task_ids(self, lists: object) -> set[str]:
        return self.waiting


def chunk_states(engine: Engine) -> list[str]:
    return list(execute(engine, "SELECT state FROM vectormill.chunks ORDER BY id").scalars())


def test_jobs_of_a_model_without_a_worker_do_not_hide_those_of_another(engine: Engine) -> None:
    for _ in range(3):
        submit(engine, make_items(1), spec=replace(SPEC, model="nobody serves it"))
    served = submit(engine, make_items(1))
    with engine.connect() as connection:
        assert [each.job_id for each in list_demands(connection, [SPEC.model], 2)] == [served.id]


def test_a_job_ages_while_nothing_moves_in_it_and_not_while_it_is_served(engine: Engine) -> None:
    submit(engine, make_items(12))
    execute(
        engine,
        "UPDATE vectormill.jobs SET created_at = created_at - interval '1 day', "
        "updated_at = updated_at - interval '1 hour'",
    )
    (waiting,) = ask(engine, list_demands, [SPEC.model], 10)
    assert 3600 <= waiting.waited_seconds < 7200
    complete(engine, claim_next(engine))
    (served,) = ask(engine, list_demands, [SPEC.model], 10)
    assert served.waited_seconds < 1800


# More urgent jobs than the dispatcher looks at in one round, each with a chunk.
FLOOD = text("""
    WITH flood AS (
        INSERT INTO vectormill.jobs (id, state, model, spec, priority, num_items, num_chunks, num_open_chunks)
        SELECT gen_random_uuid(), 'queued', model, spec, 1, 1, 1, 1
          FROM vectormill.jobs CROSS JOIN generate_series(1, :num_jobs) WHERE id = :like_job
        RETURNING id
    )
    INSERT INTO vectormill.chunks (job_id, seq, state, first_item, num_items, estimated_tokens)
    SELECT id, 0, 'pending', 0, 1, 64 FROM flood
""")


def test_no_number_of_urgent_jobs_hides_one_that_has_waited_for_long(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = submit(engine, make_items(1), priority=9)
    execute(engine, "UPDATE vectormill.jobs SET updated_at = now() - interval '1 day'")
    execute(engine, FLOOD, num_jobs=MAX_DEMANDS + 1, like_job=waited.id)
    register_worker(engine)
    queues, sentinel = cast(QueueReader, FakeQueues()), cast(RedisLossDetector, QuietSentinel())
    monkeypatch.setattr("scheduler.dispatcher.publish", lambda app, dispatches: None)
    assert Dispatcher(engine, Celery(), sentinel, queues, ageing_seconds=600).dispatch() == 4
    assert chunk_states(engine)[0] == "queued"


def test_a_dead_worker_takes_its_leases_out_of_the_room_together_with_its_slots(engine: Engine) -> None:
    dead, survivor = (register_worker(engine, 2, name, uuid4()) for name in ("dead", "survivor"))
    submit(engine, make_items(12))
    held = [claim_next(engine, owner=owner) for owner in (dead, dead, survivor)]
    assert ask(engine, list_rooms) == [
        WorkerCapacity(SPEC.model, 4, 3, 0, 4 * LARGEST_CHUNK_TOKENS, 3 * TOKENS)
    ]
    execute(
        engine, "UPDATE vectormill.workers SET heartbeat_at = now() - interval '16 s' WHERE name = 'dead'"
    )
    assert ask(engine, list_rooms) == [WorkerCapacity(SPEC.model, 2, 1, 0, 2 * LARGEST_CHUNK_TOKENS, TOKENS)]
    assert ask(engine, rescue_expired_chunks) == 0  # nobody takes them before their time
    for each in held:
        complete(engine, each)


def test_a_worker_that_was_started_again_has_all_its_room(engine: Engine) -> None:
    launcher = uuid4()
    former = register_worker(engine, 2, "w", uuid4(), launcher)
    submit(engine, make_items(8))
    claim_next(engine, owner=former)
    register_worker(engine, 2, "w", uuid4(), launcher)
    assert ask(engine, list_rooms) == [WorkerCapacity(SPEC.model, 2, 0, 0, 2 * LARGEST_CHUNK_TOKENS, 0)]


def ask_for(engine: Engine, num_tokens: int) -> None:
    """A worker of many slots that wants so many tokens in flight."""
    with engine.begin() as connection:
        report = {"max_tokens_in_flight": num_tokens}
        assert beat_worker(connection, "new", uuid4(), SPEC.model, 16, report)


def dispatch_rounds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each of two rounds dispatches."""
    monkeypatch.setattr("scheduler.dispatcher.publish", lambda app, dispatches: None)
    queues, sentinel = cast(QueueReader, FakeQueues()), cast(RedisLossDetector, QuietSentinel())
    dispatcher = Dispatcher(engine, Celery(), sentinel, queues, ageing_seconds=600)
    return [dispatcher.dispatch(), dispatcher.dispatch()]


def test_a_worker_is_given_the_tokens_that_it_asks_for_and_not_more(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for(engine, 5 * TOKENS)
    submit(engine, make_items(64))
    assert dispatch_rounds(engine, monkeypatch) == [5, 0]


def test_four_full_batches_of_short_texts_are_in_flight(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32,768 tokens in a batch, and texts of 16: where chunks were of 512 items, six slots had one batch and a half."""
    ask_for(engine, choose_tokens_in_flight(32_768, 1, pads=False))
    with JobWriter(engine, NewJob(SPEC), Settings()) as writer:
        for number in range(60_000):
            writer.add(Item(str(number), b"x" * 56))
        writer.finish()
    with engine.begin() as connection:  # the job has run for a while, and has come to its large chunks
        connection.execute(text("UPDATE vectormill.chunks SET state = 'done' WHERE estimated_tokens < 32768"))
    dispatch_rounds(engine, monkeypatch)
    (room,) = ask(engine, list_rooms)
    assert room.outstanding_tokens >= 4 * 32_768
    assert room.outstanding < room.slots


def test_a_worker_that_asks_for_no_tokens_is_given_as_many_chunks_as_it_has_slots(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_for(engine, 4 * TOKENS)
    register_worker(engine, slots=6)
    submit(engine, make_items(200))
    (room,) = ask(engine, list_rooms)
    assert (room.slots, room.max_tokens) == (22, 4 * TOKENS + 6 * LARGEST_CHUNK_TOKENS)
    assert dispatch_rounds(engine, monkeypatch) == [22, 0]


def test_a_job_of_priority_0_is_counted_apart_from_bulk(engine: Engine) -> None:
    owner = register_worker(engine, slots=6)
    submit(engine, make_items(8), priority=0)
    claim_next(engine, owner)
    (room,) = ask(engine, list_rooms)
    assert (room.slots, room.outstanding, room.interactive) == (6, 0, 1)


def test_a_scheduler_without_redis_says_so_beside_its_sign_of_life(engine: Engine) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    dispatcher = Dispatcher(
        engine, Celery(), RedisLossDetector(nowhere), QueueReader(nowhere), ageing_seconds=600
    )
    assert not dispatcher.recall_lost_messages()
    signs = []
    for is_away in (dispatcher.is_redis_away, False):
        ask(engine, beat_scheduler, is_redis_away=is_away)
        signs.append(ask(engine, list_signs_of_life))
    assert signs == [{SCHEDULER, REDIS_AWAY}, {SCHEDULER}]


def test_a_bell_that_could_not_be_rung_is_rung_at_the_next_look_at_redis(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[Dispatch] = []

    def publish(app: Celery, dispatches: list[Dispatch]) -> None:
        if not rung:
            rung.extend(dispatches)
            raise OSError("Redis was away for a moment")
        rung.extend(dispatches)
        queues.waiting.update(map(task_id_of, dispatches))

    queues = FakeQueues()
    monkeypatch.setattr("scheduler.dispatcher.publish", publish)
    dispatcher = Dispatcher(
        engine,
        Celery(),
        cast(RedisLossDetector, QuietSentinel()),
        cast(QueueReader, queues),
        ageing_seconds=600,
    )
    register_worker(engine)
    submit(engine, make_items(4))
    assert dispatcher.dispatch() == 1
    assert chunk_states(engine) == ["queued"]
    assert dispatcher.recall_lost_messages()
    assert chunk_states(engine) == ["pending"]
    assert dispatcher.dispatch() == 1
    assert [dispatch.dispatch_seq for dispatch in rung] == [1, 2]
    assert dispatcher.recall_lost_messages()
    assert chunk_states(engine) == ["queued"]  # nothing was lost since


def test_the_backlog_is_what_the_chunks_states_say(engine: Engine) -> None:
    submit(engine, make_items(12))
    submit(engine, make_items(4), spec=replace(SPEC, model="other"))
    claim_next(engine)
    with engine.begin() as connection:
        (demand,) = list_demands(connection, [SPEC.model], 10)
        mark_queued(connection, [(demand.job_id, 1)])
        backlog = {(each.model, each.state): each.num_chunks for each in count_backlog(connection)}
    assert backlog == {
        ("fake", "pending"): 1,
        ("fake", "queued"): 1,
        ("fake", "leased"): 1,
        ("other", "queued"): 1,
        ("other", "pending"): 0,
    }


def test_the_dispatcher_is_woken_by_a_submission_and_by_a_retry(engine: Engine, database_url: str) -> None:
    with connect(database_url) as listener:
        listener.execute("LISTEN vectormill_jobs")
        job = submit(engine, make_items(4))
        complete(engine, claim_next(engine), {0: ItemFailure("encoding_failed", "so it is")})
        ask(engine, retry_job, job.id)
        assert len(list(listener.notifies(timeout=60, stop_after=2))) == 2
