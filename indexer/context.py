"""The context of a claimed run: dependencies that its phases share, its counts, and its target generation."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import find_written, keeps_texts
from vectormill.domain.encoding import EncodingSpec
from vectormill.models.registry import Registry
from vectormill.runs.differences import RunTables
from vectormill.runs.run import Run
from vectormill.runs.runs import SAVE_RUN
from vectormill.settings import Settings
from vectormill.work.work import Lease

# Sleeps for a number of seconds, or less if the indexer is to stop.
Wait = Callable[[float], object]


@dataclass(frozen=True, slots=True)
class RunContext:
    """Objects that the phases of a claimed run share.

    Call `check` between transactions, at least every few seconds. It renews nothing, and raises LeaseLost if
    another indexer may have the run, RunCancelled if a client has cancelled it, or Stopping. `report` stores
    the findings of a phase under its name, for the status of the run. `hold` locks the run until its
    transaction ends, and raises LeaseLost or RunCancelled by the database's current state.
    """

    run: Run
    engine: Engine
    settings: Settings
    registry: Registry
    check: Callable[[], None]
    report: Callable[[str, Mapping[str, Any]], None]
    hold: Callable[[Connection], None]


class ClaimProgress:
    """The phase and counts of one claim of a run, for use by one thread.

    Call `save` in each transaction: it locks the run, so that an indexer that has lost its lease writes nothing. A
    transaction that fails ends the phase, which begins again with the counts in the database.
    """

    def __init__(self, lease: Lease, run: Run) -> None:
        self.lease = lease
        self.phase = run.phase or ""
        self.counts = run.counts

    def save(
        self,
        connection: Connection,
        /,
        *,
        phase: str | None = None,
        seq: int | None = None,
        job_id: UUID | None = None,
        generation_id: int | None = None,
        **added: int,
    ) -> None:
        """Add to the counts, and record these and the ids in the caller's transaction; None leaves an id as it is.

        Raise LeaseLost.
        """
        sums = {name: getattr(self.counts, name) + number for name, number in added.items()}
        self.counts = replace(self.counts, **sums)
        values = {"seq": seq, "job_id": job_id, "generation_id": generation_id, **asdict(self.counts)}
        self.lease.keep(connection, SAVE_RUN, phase=phase or self.phase, **values)


@dataclass(frozen=True, slots=True)
class Target:
    """The generation that a run writes. `spec` is the run's own if it has one, in the same vector space."""

    generation: Generation
    spec: EncodingSpec
    keep_text: bool
    stage: RunTables

    @property
    def is_live(self) -> bool:
        return self.generation.state == LIVE


def find_target(connection: Connection, run: Run) -> Target:
    """Return the target that the run began to write. Raise Conflict if its generation was retired or removed.

    The generation stays live, or in building, until the transaction ends.
    """
    assert run.generation_id is not None, "the run has chosen when it began to read"
    return make_target(connection, run, find_written(connection, run.generation_id))


def make_target(connection: Connection, run: Run, generation: Generation) -> Target:
    keep_text = keeps_texts(connection, run.collection_id)
    return Target(generation, run.spec or generation.spec, keep_text, RunTables(run.id, generation))
