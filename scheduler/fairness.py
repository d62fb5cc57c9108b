"""Which jobs get the free slots: priority with ageing, then turns. Pure; knows nothing of databases or queues."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from vectormill.domain.jobs.demand import Demand, Room
from vectormill.domain.jobs.job import INTERACTIVE_PRIORITY


@dataclass(frozen=True, slots=True)
class Share:
    """So many chunks of one job are to be dispatched now."""

    job_id: UUID
    num_chunks: int


# Of one model, queued and leased. A search is one chunk, so this is a burst of searches; but a client may give a job of
# a million texts the priority 0, and Redis must not hold all of it.
MAX_INTERACTIVE_CHUNKS = 64


def effective_priority(demand: Demand, ageing_seconds: float) -> int:
    """The job's priority, lifted by one class for every `ageing_seconds` it has waited, but never to interactive."""
    if demand.priority == INTERACTIVE_PRIORITY:
        return INTERACTIVE_PRIORITY
    return max(INTERACTIVE_PRIORITY + 1, demand.priority - int(demand.waited_seconds // ageing_seconds))


def plan_shares(
    demands: Sequence[Demand], rooms: Sequence[Room], served: Mapping[UUID, int], ageing_seconds: float
) -> list[Share]:
    """Shares the room of each model among the jobs that demand it.

    Within the most urgent class every job gets a chunk in turn, the one served least so far first; a class is looked at
    only when all of the more urgent ones got theirs. Whether a job has as many chunks as its share is the database's to
    know, so the room that is left over when it has fewer goes to the next call. Interactive jobs take nobody's room.
    """
    shares: dict[UUID, int] = defaultdict(int)
    for room in rooms:
        waiting = [demand for demand in demands if demand.model == room.model]
        interactive = [demand for demand in waiting if demand.priority == INTERACTIVE_PRIORITY]
        bulk = [demand for demand in waiting if demand.priority != INTERACTIVE_PRIORITY]
        in_turns = (
            (interactive, MAX_INTERACTIVE_CHUNKS - room.interactive),
            (_most_urgent(bulk, ageing_seconds), room.slots - room.outstanding),
        )
        for jobs, num_chunks in in_turns:
            turns = sorted(jobs, key=lambda demand: (served.get(demand.job_id, 0), demand.seq))
            for turn in range(num_chunks if turns else 0):
                shares[turns[turn % len(turns)].job_id] += 1
    return [Share(job_id, num_chunks) for job_id, num_chunks in shares.items()]


def _most_urgent(demands: Sequence[Demand], ageing_seconds: float) -> list[Demand]:
    priorities = [effective_priority(demand, ageing_seconds) for demand in demands]
    return [
        demand for demand, priority in zip(demands, priorities, strict=True) if priority == min(priorities)
    ]
