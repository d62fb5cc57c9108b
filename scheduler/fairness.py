"""Fairness: which jobs get the free capacity, by ageing priority and then in turns. Pure; knows no database or
queue.
"""

import heapq
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from vectormill.jobs.chunks.dispatch import Demand, WorkerRoom
from vectormill.jobs.job import INTERACTIVE_PRIORITY


@dataclass(frozen=True, slots=True)
class Share:
    """The number of chunks of one job that are to be dispatched now."""

    job_id: UUID
    num_chunks: int


# The interactive chunks of one model, queued and leased. A search is one chunk, so this is a burst of searches; but a
# client may give a job of a million texts the priority 0, and Redis must not hold all of it.
MAX_INTERACTIVE_CHUNKS = 64


def effective_priority(demand: Demand, ageing_seconds: float) -> int:
    """Return the job's priority, lifted by one class for every `ageing_seconds` it has waited, but never to
    interactive.
    """
    if demand.priority == INTERACTIVE_PRIORITY:
        return INTERACTIVE_PRIORITY
    return max(INTERACTIVE_PRIORITY + 1, demand.priority - int(demand.waited_seconds // ageing_seconds))


def plan_shares(
    demands: Sequence[Demand], rooms: Sequence[WorkerRoom], served: Mapping[UUID, int], ageing_seconds: float
) -> list[Share]:
    """Share the room of each model among the jobs that demand it.

    Within the most urgent class the next chunk is always of the job that was served the fewest tokens so far, so that
    jobs of long and of short texts have a device for equal times; a class is looked at only when all of the more urgent
    ones got theirs. Whether a job has as many chunks as its share is the database's to know, so the room that is left
    over when it has fewer goes to the next call. Interactive jobs take nobody's room.
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
    """Yield the job of each next chunk while there is capacity; the last chunk may be larger than what is left."""
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
