"""A Redis that was flushed is noticed at the first look, not only when messages have been missing for two."""

from contextlib import closing

from redis import Redis
from sqlalchemy import Engine, text

from scheduler.dispatcher import Dispatcher
from tests.database import execute
from tests.protocol import SPEC, make_items, register_worker, submit
from vectormill.broker.app import make_app
from vectormill.broker.queues import QueueReader, RedisLossDetector, list_of
from vectormill.jobs.job import DEFAULT_PRIORITY

DISPATCH_SEQ = text("SELECT dispatch_seq FROM vectormill.chunks")


def test_after_a_flush_the_first_look_dispatches_again(engine: Engine, redis_url: str) -> None:
    register_worker(engine)
    with (
        closing(Redis.from_url(redis_url)) as redis,
        closing(RedisLossDetector(redis_url)) as sentinel,
        closing(QueueReader(redis_url)) as queues,
    ):
        redis.flushall()
        dispatcher = Dispatcher(engine, make_app(redis_url), sentinel, queues, ageing_seconds=600)
        assert dispatcher.recall_lost_messages()
        submit(engine, make_items(1))
        assert dispatcher.dispatch() == 1
        redis.flushall()
        assert dispatcher.recall_lost_messages()
        assert dispatcher.dispatch() == 1
        assert redis.llen(list_of(SPEC.model, DEFAULT_PRIORITY)) == 1
    assert execute(engine, DISPATCH_SEQ).scalar_one() == 2
