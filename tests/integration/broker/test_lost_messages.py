"""Messages that Redis lost, all or one, and dispatchers that died before they rang: dispatched again within seconds."""

from unittest.mock import MagicMock

import pytest
from celery import Celery
from redis import Redis
from sqlalchemy import Engine, text

from scheduler.dispatcher import Dispatcher
from tests.protocol import SPEC, claim, dispatch_all, make_items, register_worker, submit
from vectormill.broker.app import make_app
from vectormill.broker.queues import BROKER_ERRORS, QueueReader, RedisLossDetector, list_of, publish
from vectormill.jobs.chunks import claim_chunk

BULK = list_of(SPEC.model, priority=5)
INTERACTIVE = list_of(SPEC.model, priority=0)


@pytest.fixture
def dispatcher(engine: Engine, redis: Redis, redis_url: str) -> Dispatcher:
    """At work for a while: it has looked at Redis before."""
    register_worker(engine)
    dispatcher = make_dispatcher(engine, redis_url)
    assert dispatcher.recall_lost_messages()
    return dispatcher


def make_dispatcher(engine: Engine, redis_url: str) -> Dispatcher:
    return Dispatcher(
        engine, make_app(redis_url), RedisLossDetector(redis_url), QueueReader(redis_url), ageing_seconds=600
    )


def dispatch_seqs(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        seqs = text("SELECT dispatch_seq FROM vectormill.chunks ORDER BY seq")
        return list(connection.execute(seqs).scalars())


def look(dispatcher: Dispatcher) -> None:
    """What the scheduler does in every second."""
    assert dispatcher.recall_lost_messages()
    dispatcher.dispatch()


def test_a_channel_that_kombu_has_closed_is_an_error_of_redis_and_the_next_message_has_another(
    engine: Engine, redis: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the scheduler, for neither kombu nor Redis had a name for it."""
    submit(engine, make_items(4))
    dispatches = dispatch_all(engine)
    app = make_app(redis_url)
    with app.producer_or_acquire() as producer:
        channel = producer.channel
        producer.publish({}, routing_key="x")
        channel.close()
        with pytest.raises(AttributeError) as closed:
            producer.publish({}, routing_key="x")
    with monkeypatch.context() as patch:
        patch.setattr(app, "send_task", MagicMock(side_effect=closed.value))
        with pytest.raises(BROKER_ERRORS, match="The channel to Redis was closed"):
            publish(app, dispatches)
    assert redis.llen(BULK) == 0
    publish(app, dispatches)
    assert redis.llen(BULK) == len(dispatches)


@pytest.mark.parametrize("priority", [0, 5])
@pytest.mark.parametrize("way", ["deleted", "renamed"])
def test_a_list_that_is_gone_from_redis_is_filled_again_at_the_second_look(
    engine: Engine, redis: Redis, dispatcher: Dispatcher, priority: int, way: str
) -> None:
    name = list_of(SPEC.model, priority)
    submit(engine, make_items(8), priority=priority)
    assert dispatcher.dispatch() == 2
    assert redis.llen(name) == 2
    if way == "deleted":
        redis.delete(name)
    else:
        redis.rename(name, "elsewhere")
    look(dispatcher)  # a worker may just have taken them
    look(dispatcher)
    assert redis.llen(name) == 2
    assert dispatch_seqs(engine) == [2, 2]


def test_one_message_that_was_lost_among_others_is_the_one_that_is_sent_again(
    engine: Engine, redis: Redis, dispatcher: Dispatcher
) -> None:
    submit(engine, make_items(12))
    assert dispatcher.dispatch() == 3
    redis.lset(BULK, 1, "gone")
    assert redis.lrem(BULK, 1, "gone") == 1
    look(dispatcher)
    look(dispatcher)
    assert redis.llen(BULK) == 3
    assert dispatch_seqs(engine) == [1, 2, 1]


def test_what_somebody_else_wrote_into_a_list_is_passed_over(
    engine: Engine, redis: Redis, dispatcher: Dispatcher
) -> None:
    submit(engine, make_items(8))
    dispatcher.dispatch()
    redis.lset(BULK, 0, "not JSON")
    redis.lpush(BULK, "7", '{"headers": []}')
    look(dispatcher)
    look(dispatcher)
    assert sorted(dispatch_seqs(engine)) == [1, 2]


def test_what_waits_in_redis_or_was_claimed_is_left_alone_however_often_one_looks(
    engine: Engine, redis: Redis, dispatcher: Dispatcher
) -> None:
    submit(engine, make_items(8))
    submit(engine, make_items(4), priority=0)
    assert dispatcher.dispatch() == 3
    redis.rpop(BULK)
    assert claim(engine, chunk_id=1) is not None
    for _ in range(4):
        look(dispatcher)
    assert dispatch_seqs(engine) == [1, 1, 1]
    assert (redis.llen(BULK), redis.llen(INTERACTIVE)) == (1, 1)


def test_a_chunk_that_is_claimed_between_two_looks_is_not_sent_again(
    engine: Engine, redis: Redis, dispatcher: Dispatcher
) -> None:
    submit(engine, make_items(4))
    dispatcher.dispatch()
    redis.rpop(BULK)  # a worker has taken it, and is on its way to Postgres
    look(dispatcher)
    assert claim(engine, chunk_id=1) is not None
    look(dispatcher)
    assert dispatch_seqs(engine) == [1]


def test_a_chunk_that_is_being_claimed_is_not_waited_for(
    engine: Engine, redis: Redis, dispatcher: Dispatcher
) -> None:
    submit(engine, make_items(4))
    dispatcher.dispatch()
    redis.rpop(BULK)
    look(dispatcher)
    with engine.begin() as connection:
        assert claim_chunk(connection, 1, "a slow worker", SPEC.model, 30) is not None
        look(dispatcher)
    assert dispatch_seqs(engine) == [1]


def test_a_new_dispatcher_rings_at_once_for_what_one_that_died_had_only_marked(
    engine: Engine, redis: Redis, redis_url: str, dispatcher: Dispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(app: Celery, dispatches: object) -> None:
        raise SystemExit

    submit(engine, make_items(12))
    with monkeypatch.context() as fault:
        fault.setattr("scheduler.dispatcher.publish", die)
        with pytest.raises(SystemExit):
            dispatcher.dispatch()
    assert redis.llen(BULK) == 0
    successor = make_dispatcher(engine, redis_url)
    successor.begin_term()
    look(successor)
    assert redis.llen(BULK) == 3
    assert dispatch_seqs(engine) == [2, 2, 2]


def test_a_new_dispatcher_leaves_alone_what_the_former_one_rang_for(
    engine: Engine, redis: Redis, redis_url: str, dispatcher: Dispatcher
) -> None:
    submit(engine, make_items(12))
    dispatcher.dispatch()
    for _ in range(3):  # elections in quick succession
        successor = make_dispatcher(engine, redis_url)
        successor.begin_term()
        look(successor)
    assert redis.llen(BULK) == 3
    assert dispatch_seqs(engine) == [1, 1, 1]
