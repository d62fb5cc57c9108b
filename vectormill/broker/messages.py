"""Publishing dispatched chunks. A message carries ids, never texts; losing it costs seconds, never work."""

from collections.abc import Iterable

from celery import Celery
from kombu import Producer
from kombu.exceptions import KombuError, OperationalError
from redis.exceptions import RedisError

from vectormill.broker.app import ENCODE_CHUNK, queue_of
from vectormill.broker.queues import step_of
from vectormill.jobs.chunks.chunk import Dispatch

BROKER_ERRORS = (KombuError, RedisError, OSError)


def task_id_of(dispatch: Dispatch) -> str:
    """Return names the message; another dispatch of the same chunk has another."""
    return f"{dispatch.job_id.hex[:8]}-{dispatch.seq:05d}-{dispatch.dispatch_seq}"


def publish(app: Celery, dispatches: Iterable[Dispatch]) -> None:
    """Ring the bell for every dispatch. Raises one of BROKER_ERRORS when Redis is away; the reaper repeats them."""
    try:
        with app.producer_or_acquire() as producer:
            for dispatch in dispatches:
                _send(app, dispatch, producer)
    except AttributeError as error:
        # After an error of Redis kombu 5.7 may try again on a channel that it has closed, which has no connection any
        # more: "'NoneType' object has no attribute 'client'". The pool has thrown it away with this exception.
        raise OperationalError(f"The channel to Redis was closed: {error}") from error


def _send(app: Celery, dispatch: Dispatch, producer: Producer) -> None:
    app.send_task(
        ENCODE_CHUNK,
        kwargs=dispatch.message(),
        task_id=task_id_of(dispatch),
        queue=queue_of(dispatch.model),
        priority=step_of(dispatch.priority),
        kwargsrepr=f"job={dispatch.job_id} chunk={dispatch.seq} items={dispatch.num_items}",
        producer=producer,
    )
