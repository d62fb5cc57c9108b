"""Read the queues in Redis: messages that no worker has taken yet. Only kombu writes there."""

import json
from collections.abc import Iterable

from kombu.transport.redis import Channel
from redis import Redis

from vectormill.broker.app import BULK_STEP, INTERACTIVE_STEP, queue_of
from vectormill.jobs.job import INTERACTIVE_PRIORITY

# The limit of one list. The dispatcher keeps a few chunks a worker there, so this bounds an accident.
_MAX_READ = 10_000


def step_of(priority: int) -> int:
    """Return the step of Redis's lists that chunks of a job's priority ride on."""
    return INTERACTIVE_STEP if priority == INTERACTIVE_PRIORITY else BULK_STEP


def list_of(model: str, priority: int) -> str:
    """Return the key of the list in Redis: kombu keeps one a step, and adds the step to the queue's name above 0."""
    step = step_of(priority)
    return f"{queue_of(model)}{Channel.sep}{step}" if step else queue_of(model)


class QueueReader:
    """Asks Redis what waits in lists. Every method raises redis.exceptions.RedisError while Redis is away."""

    def __init__(self, redis_url: str) -> None:
        self._redis = Redis.from_url(redis_url, socket_timeout=2, socket_connect_timeout=2)

    def count_messages(self, lists: Iterable[str]) -> int:
        """Return how many messages wait in these lists together."""
        with self._redis.pipeline(transaction=False) as pipeline:
            for name in lists:
                pipeline.llen(name)
            return sum(pipeline.execute())

    def list_task_ids(self, lists: Iterable[str]) -> set[str]:
        """Return the task ids of the messages that wait in these lists; those that workers have taken are not among
        them.
        """
        with self._redis.pipeline(transaction=False) as pipeline:
            for name in lists:
                pipeline.lrange(name, 0, _MAX_READ - 1)
            found = pipeline.execute()
        return {_task_id(message) for messages in found for message in messages}

    def close(self) -> None:
        self._redis.close()


def _task_id(message: bytes) -> str:
    """Empty for what is not a message of ours: whoever reaches Redis can write there."""
    try:
        return str(json.loads(message)["headers"]["id"])
    except (ValueError, KeyError, TypeError):
        return ""
