"""The queues of chunks in Redis: publish messages, list those that wait, and detect their loss."""

import json
import secrets
from collections.abc import Iterable

from celery import Celery
from kombu.exceptions import KombuError, OperationalError
from kombu.transport.redis import Channel
from redis import Redis
from redis.exceptions import RedisError

from vectormill.broker.app import BULK_STEP, ENCODE_CHUNK, INTERACTIVE_STEP, queue_of
from vectormill.jobs.chunk import Dispatch
from vectormill.jobs.job import INTERACTIVE_PRIORITY

# The most messages read from one list. The dispatcher keeps only a few chunks for each worker there, so this
# matters only after an accident.
_MAX_READ = 10_000


def step_of(priority: int) -> int:
    """Return the priority step of Redis's lists for chunks of a job with this priority."""
    return INTERACTIVE_STEP if priority == INTERACTIVE_PRIORITY else BULK_STEP


def list_of(model: str, priority: int) -> str:
    """Return the key of a list in Redis.

    kombu has one list for each priority step, and appends a step above 0 to the queue's name.
    """
    step = step_of(priority)
    return f"{queue_of(model)}{Channel.sep}{step}" if step else queue_of(model)


class QueueReader:
    """A reader of the messages in Redis's lists.

    Every method raises redis.exceptions.RedisError while Redis is away.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=2, socket_connect_timeout=2)

    def count_messages(self, lists: Iterable[str]) -> int:
        """Return how many messages wait in these lists together."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for name in lists:
                pipeline.llen(name)
            return sum(pipeline.execute())

    def list_task_ids(self, lists: Iterable[str]) -> set[str]:
        """Return the task ids of the messages that no worker has taken from these lists."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for name in lists:
                pipeline.lrange(name, 0, _MAX_READ - 1)
            found = pipeline.execute()
        return {_task_id(message) for messages in found for message in messages}

    def close(self) -> None:
        self._redis.close()


def _task_id(message: bytes) -> str:
    """Return the task id of a message; empty for a foreign message.

    Anyone who reaches Redis can write there.
    """
    try:
        return str(json.loads(message)["headers"]["id"])
    except (ValueError, KeyError, TypeError):
        return ""


BROKER_ERRORS = (KombuError, RedisError, OSError)


def task_id_of(dispatch: Dispatch) -> str:
    """Return the task id of a dispatch's message; each dispatch of a chunk has another."""
    return f"{dispatch.job_id.hex[:8]}-{dispatch.seq:05d}-{dispatch.dispatch_seq}"


def publish(app: Celery, dispatches: Iterable[Dispatch]) -> None:
    """Publish a message for every dispatch.

    Raise one of BROKER_ERRORS if Redis is away; lost dispatches are repeated later.
    """
    try:
        with app.producer_or_acquire() as producer, producer.batch():
            for dispatch in dispatches:
                app.send_task(
                    ENCODE_CHUNK,
                    kwargs=dispatch.message(),
                    task_id=task_id_of(dispatch),
                    queue=queue_of(dispatch.model),
                    priority=step_of(dispatch.priority),
                    kwargsrepr=f"job={dispatch.job_id} chunk={dispatch.seq} items={dispatch.num_items}",
                    producer=producer,
                )
    except AttributeError as error:
        # After an error of Redis kombu 5.7 may retry on a channel that it has closed and that has no
        # connection any more: "'NoneType' object has no attribute 'client'". This exception has removed the
        # channel from the pool.
        raise OperationalError(f"The channel to Redis was closed: {error}") from error


SENTINEL_KEY = "vectormill:sentinel"


class RedisLossDetector:
    """A detector of data loss in Redis: remembers a random key there and the server's run_id.

    If either differs from its last value, messages were lost.
    """

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=2, socket_connect_timeout=2)
        self._value: bytes | str | None = None
        self._run_id: str | None = None

    def has_lost_content(self) -> bool:
        """Return True if Redis lost its data since the last call, or contains no earlier key at the first.

        Raise redis.exceptions.RedisError while Redis is away.
        """
        value: bytes | str | None = self._redis.get(SENTINEL_KEY)
        run_id = self._redis.info("server")["run_id"]
        is_first = self._value is None
        is_lost = value is None or (not is_first and (value != self._value or run_id != self._run_id))
        if value is None:
            value = secrets.token_hex(8).encode()
            self._redis.set(SENTINEL_KEY, value)
        self._value, self._run_id = value, run_id
        return is_lost

    def close(self) -> None:
        self._redis.close()
