"""Publishing dispatched chunks. A message carries ids, never texts; losing it costs seconds, never work."""

from collections.abc import Iterable

from celery import Celery
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from vectormill.broker.app import ENCODE_CHUNK, queue_of
from vectormill.domain.chunk import Dispatch
from vectormill.domain.job import INTERACTIVE_PRIORITY

BROKER_ERRORS = (KombuError, RedisError, OSError)

_FIRST, _LAST = 0, 9  # Redis priority steps; 0 is popped first


def publish(app: Celery, dispatches: Iterable[Dispatch]) -> None:
    """Rings the bell for every dispatch. Raises one of BROKER_ERRORS when Redis is away; the reaper repeats them."""
    with app.producer_or_acquire() as producer:
        for dispatch in dispatches:
            app.send_task(
                ENCODE_CHUNK,
                kwargs=dispatch.message(),
                task_id=f"{dispatch.job_id.hex[:8]}-{dispatch.seq:05d}-{dispatch.dispatch_seq}",
                queue=queue_of(dispatch.model),
                priority=_FIRST if dispatch.priority == INTERACTIVE_PRIORITY else _LAST,
                kwargsrepr=f"job={dispatch.job_id} chunk={dispatch.seq} items={dispatch.num_items}",
                producer=producer,
            )
