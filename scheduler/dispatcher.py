"""Dispatch only a few chunks at a time, so that priority, fairness, pause and cancel act at once.

Chunks are marked in Postgres before their messages are published, so a message never names a row that does
not exist. Marked chunks are compared with the messages in Redis, so a lost message costs seconds. Nothing
here is needed for correctness: a second dispatcher would only publish twice.
"""

import heapq
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from celery import Celery
from redis.exceptions import RedisError, ResponseError
from sqlalchemy import Engine

from vectormill.broker.queues import (
    BROKER_ERRORS,
    QueueReader,
    RedisLossDetector,
    list_of,
    publish,
    task_id_of,
)
from vectormill.jobs.chunk import Dispatch
from vectormill.jobs.dispatch import (
    Demand,
    WorkerCapacity,
    list_aged_jobs,
    list_demands,
    list_queued,
    list_rooms,
    mark_queued,
    recall_dispatches,
)
from vectormill.jobs.job import INTERACTIVE_PRIORITY
from vectormill.tracing import span

logger = logging.getLogger(__name__)

# The jobs of one model that a round considers: the most urgent and oldest, and also those that have waited
# longest, which a stream of urgent ones would otherwise hide for ever. The latter are looked up only every
# _AGED_SECONDS, because they change within minutes.
MAX_DEMANDS = 500
MAX_AGED = 100
_AGED_SECONDS = 10.0


class Dispatcher:
    """The dispatcher of one scheduler, not thread-safe. `dispatch` carries out one round."""

    def __init__(
        self,
        engine: Engine,
        app: Celery,
        sentinel: RedisLossDetector,
        queues: QueueReader,
        ageing_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._app = app
        self._sentinel = sentinel
        self._queues = queues
        self._ageing_seconds = ageing_seconds
        self._clock = clock
        self._aged: list[UUID] = []
        self._aged_due = 0.0
        # The estimated tokens dispatched of each job, for taking turns. Losing them with the process is
        # harmless.
        self._served: dict[UUID, int] = defaultdict(int)
        self.is_redis_away = False
        self._is_redis_full = False  # Redis answers, and refused the last message
        self._has_unrung = False  # a marked dispatch may not have been published
        self._absent: set[str] = set()  # task ids that the last check did not find in Redis

    @property
    def is_redis_full(self) -> bool:
        return self._is_redis_full and not self.is_redis_away

    def begin_term(self) -> None:
        """Make the next check recall every dispatch whose message is missing.

        The previous dispatcher may have died between COMMIT and publishing.
        """
        self._has_unrung = True

    def recall_lost_messages(self) -> bool:
        """Find dispatches whose message is lost, and make their chunks pending again.

        Return False if Redis is away.
        """
        try:
            is_lost = self._sentinel.has_lost_content()
            absent = self._find_absent()
        except RedisError as error:
            if not self.is_redis_away:
                logger.warning("Cannot reach Redis; jobs wait in Postgres until it is back: %s", error)
            self.is_redis_away = True
            return False
        # A message that is absent once may be on its way from Redis to a worker's claim; one that is absent
        # twice in a second is lost. Mistakes are harmless, because the second message of a chunk claims
        # nothing.
        if is_lost or self._has_unrung:
            self._absent = set(absent)
        lost = [dispatch for task_id, dispatch in absent.items() if task_id in self._absent]
        self._absent = set(absent)
        self._has_unrung = False
        if lost:
            with self._engine.begin() as connection:
                recalled = recall_dispatches(connection, lost)
            if recalled:
                logger.warning(
                    "%d dispatched chunks were neither claimed nor waiting in Redis; they are dispatched again.",
                    recalled,
                )
        if self.is_redis_away:
            logger.info("Redis is back.")
        self.is_redis_away = False
        return True

    def _find_absent(self) -> dict[str, Dispatch]:
        """Return by task id the dispatches that nobody has claimed and that do not wait in Redis."""
        with self._engine.connect() as connection:
            queued = {task_id_of(dispatch): dispatch for dispatch in list_queued(connection)}
        if not queued:
            return {}
        lists = {list_of(dispatch.model, dispatch.priority) for dispatch in queued.values()}
        waiting = self._queues.list_task_ids(lists)
        return {task_id: dispatch for task_id, dispatch in queued.items() if task_id not in waiting}

    def dispatch(self) -> int:
        """Dispatch as many chunks as the workers have capacity for, and return their number."""
        if self.is_redis_away:
            return 0
        began = time.time()
        dispatches = self._mark()
        if dispatches:
            try:
                with span("dispatch", kind="producer", began=began, chunks=len(dispatches)):
                    publish(self._app, dispatches)
                self._is_redis_full = False
            except BROKER_ERRORS as error:
                if not self._is_redis_full:  # log once, and not in every round until Redis has memory again
                    logger.warning(
                        "Cannot publish messages for %d chunks; retrying: %s", len(dispatches), error
                    )
                self._is_redis_full = _is_refused(error)
                self._has_unrung = True
        return len(dispatches)

    def _mark(self) -> list[Dispatch]:
        with self._engine.begin() as connection:
            rooms = list_rooms(connection)
            models = [room.model for room in rooms]
            if self._clock() >= self._aged_due:
                self._aged = list_aged_jobs(connection, models, self._ageing_seconds, MAX_AGED)
                self._aged_due = self._clock() + _AGED_SECONDS
            demands = list_demands(connection, models, MAX_DEMANDS, self._aged)
            self._welcome([demand.job_id for demand in demands])
            shares = plan_shares(demands, rooms, self._served, self._ageing_seconds)
            if not shares:
                return []
            dispatches = mark_queued(connection, [(share.job_id, share.num_chunks) for share in shares])
        for dispatch in dispatches:
            self._served[dispatch.job_id] += dispatch.num_tokens
        return dispatches

    def _welcome(self, job_ids: list[UUID]) -> None:
        """Give new jobs the count of the job served least, so that they do not catch up on all earlier turns."""
        known = [self._served[job_id] for job_id in job_ids if job_id in self._served]
        level = min(known, default=0)
        self._served = defaultdict(int, {job_id: self._served.get(job_id, level) for job_id in job_ids})


def _is_refused(error: BaseException | None) -> bool:
    """Return whether Redis answered with an error, which kombu has wrapped, instead of being unreachable."""
    while error is not None:
        if isinstance(error, ResponseError):
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True, slots=True)
class Share:
    """The number of chunks of one job that are to be dispatched now."""

    job_id: UUID
    num_chunks: int


# The limit on queued and leased interactive chunks of one model. A search is one chunk, so this allows a
# burst of searches. But a client may give priority 0 to a job of a million texts, and Redis must not hold all
# of it.
MAX_INTERACTIVE_CHUNKS = 64


def effective_priority(demand: Demand, ageing_seconds: float) -> int:
    """Return the job's priority, one class more urgent for every `ageing_seconds` that it has waited.

    Ageing never makes a job interactive.
    """
    if demand.priority == INTERACTIVE_PRIORITY:
        return INTERACTIVE_PRIORITY
    return max(INTERACTIVE_PRIORITY + 1, demand.priority - int(demand.waited_seconds // ageing_seconds))


def plan_shares(
    demands: Sequence[Demand],
    rooms: Sequence[WorkerCapacity],
    served: Mapping[UUID, int],
    ageing_seconds: float,
) -> list[Share]:
    """Divide the free capacity of each model's workers among the jobs that have chunks to dispatch.

    Only jobs of the most urgent class get chunks. Among them the next chunk always comes from the job that
    was served the fewest tokens so far, so that jobs of long and of short texts get equal device time. If a
    job has fewer chunks than its share, the rest of the capacity is used by the next call. Interactive jobs
    have a limit of their own.
    """
    shares: dict[UUID, int] = defaultdict(int)
    for room in rooms:
        waiting = [demand for demand in demands if demand.model == room.model]
        interactive = [demand for demand in waiting if demand.priority == INTERACTIVE_PRIORITY]
        bulk = [demand for demand in waiting if demand.priority != INTERACTIVE_PRIORITY]
        in_turns = (
            (interactive, MAX_INTERACTIVE_CHUNKS - room.interactive, sys.maxsize),
            (
                _most_urgent(bulk, ageing_seconds),
                room.slots - room.outstanding,
                room.max_tokens - room.outstanding_tokens,
            ),
        )
        for jobs, num_chunks, num_tokens in in_turns:
            for job_id in _take_turns(jobs, num_chunks, num_tokens, served):
                shares[job_id] += 1
    return [Share(job_id, num_chunks) for job_id, num_chunks in shares.items()]


def _take_turns(
    jobs: Sequence[Demand], num_chunks: int, num_tokens: int, served: Mapping[UUID, int]
) -> Iterator[UUID]:
    """Yield the job of each next chunk while capacity is left; the last chunk may exceed what is left."""
    turns = [(served.get(demand.job_id, 0), demand.seq, 1, demand) for demand in jobs]
    heapq.heapify(turns)
    while turns and num_chunks > 0 and num_tokens > 0:
        tokens, seq, turn, demand = turns[0]
        yield demand.job_id
        num_chunks -= 1
        num_tokens -= demand.chunk_tokens
        if turn < demand.num_open_chunks:
            heapq.heapreplace(turns, (tokens + demand.chunk_tokens, seq, turn + 1, demand))
        else:
            heapq.heappop(turns)


def _most_urgent(demands: Sequence[Demand], ageing_seconds: float) -> list[Demand]:
    priorities = [effective_priority(demand, ageing_seconds) for demand in demands]
    return [
        demand for demand, priority in zip(demands, priorities, strict=True) if priority == min(priorities)
    ]
