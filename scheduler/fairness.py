"""Which jobs get the free slots: priority with ageing, then turns. Pure; knows nothing of databases or queues."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from vectormill.db.dispatch import Demand
from vectormill.domain.job import INTERACTIVE_PRIORITY


@dataclass(frozen=True, slots=True)
class Share:
    """So many chunks of one job are to be dispatched now."""

    job_id: UUID
    num_chunks: int


# An interactive job has a chunk or two; this many at once keeps a burst of them from flooding Redis.
MAX_INTERACTIVE_CHUNKS = 64


def effective_priority(demand: Demand, ageing_seconds: float) -> int:
    """The job's priority, lifted by one class for every `ageing_seconds` it has waited, but never to interactive."""
    if demand.priority == INTERACTIVE_PRIORITY:
        return INTERACTIVE_PRIORITY
    return max(INTERACTIVE_PRIORITY + 1, demand.priority - int(demand.waited_seconds // ageing_seconds))


def plan_shares(
    demands: Sequence[Demand], rooms: Mapping[str, int], served: Mapping[UUID, int], ageing_seconds: float
) -> list[Share]:
    """Shares the room of each model among the jobs that demand it.

    Within the most urgent class every job gets a chunk in turn, the one served least so far first; a class is looked at
    only when all of the more urgent ones got theirs. Whether a job has as many chunks as its share is the database's to
    know, so the room that is left over when it has fewer goes to the next call. Interactive jobs need no room.
    """
    shares: dict[UUID, int] = defaultdict(int)
    for demand in demands:
        if demand.priority == INTERACTIVE_PRIORITY and demand.model in rooms:
            shares[demand.job_id] = MAX_INTERACTIVE_CHUNKS
    for model, room in rooms.items():
        waiting = [d for d in demands if d.model == model and d.priority != INTERACTIVE_PRIORITY]
        if not waiting or room <= 0:
            continue
        most_urgent = min(effective_priority(demand, ageing_seconds) for demand in waiting)
        in_class = [demand for demand in waiting if effective_priority(demand, ageing_seconds) == most_urgent]
        turns = sorted(in_class, key=lambda demand: (served.get(demand.job_id, 0), demand.seq))
        for turn in range(room):
            shares[turns[turn % len(turns)].job_id] += 1
    return [Share(job_id, num_chunks) for job_id, num_chunks in shares.items()]
