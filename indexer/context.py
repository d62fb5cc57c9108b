"""The context of a claimed run: what its phases share, the counts that it has come to, and the generation it writes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine

from vectormill.collections.collection import LIVE, Generation
from vectormill.collections.collections import find_generation, keeps_texts
from vectormill.collections.generations import find_written
from vectormill.domain.encoding import EncodingSpec
from vectormill.models.registry import Registry
from vectormill.runs.differences import RunTables
from vectormill.runs.run import Run, RunCounts
from vectormill.runs.runs import save_run
from vectormill.settings import Settings
from vectormill.work.work import Lease


@dataclass(frozen=True, slots=True)
class RunContext:
    """Objects that the phases of a claimed run share.

    `check` is to be called between transactions, every few seconds at the least: it renews nothing itself, and raises
    LeaseLost when another indexer may hold the run, RunCancelled when a client wants it to end. `report` keeps what a
    phase found, under the phase's name, where status shows it. `hold` locks the run until its transaction ends, and
    raises as `check` does, from what the database says at that moment.
    """

    run: Run
    engine: Engine
    settings: Settings
    registry: Registry
    check: Callable[[], None]
    report: Callable[[str, Mapping[str, Any]], None]
    hold: Callable[[Connection], None]


class ClaimProgress:
    """The counts of one claim. What a transaction adds counts from its COMMIT on, so a batch that failed counts never.

    Used by one thread. `save` is the first thing in each transaction, since it locks the run: whoever lost the lease
    writes nothing.
    """

    def __init__(self, lease: Lease, run: Run) -> None:
        self.lease = lease
        self.phase = run.phase or ""
        self.counts = run.counts

    def save(
        self,
        connection: Connection,
        counts: RunCounts | None = None,
        *,
        phase: str | None = None,
        seq: int | None = None,
        job_id: UUID | None = None,
        generation_id: int | None = None,
    ) -> None:
        """Record the counts, which become those of this object when the caller has committed. Raise LeaseLost."""
        save_run(
            connection,
            self.lease,
            phase or self.phase,
            self.counts if counts is None else counts,
            seq=seq,
            job_id=job_id,
            generation_id=generation_id,
        )

    def add(self, **numbers: int) -> RunCounts:
        """Return the counts with these on top; nothing is recorded yet."""
        return replace(
            self.counts, **{name: getattr(self.counts, name) + number for name, number in numbers.items()}
        )


@dataclass(frozen=True, slots=True)
class Target:
    """The generation that a run writes. `spec` is what the run asked for, in the vector space of the generation."""

    generation: Generation
    spec: EncodingSpec
    keep_text: bool
    stage: RunTables

    @property
    def is_live(self) -> bool:
        return self.generation.state == LIVE


def find_target(connection: Connection, run: Run) -> Target:
    """Return the target that the run began to write; its generation stays written until the transaction ends.
    Raise Conflict.
    """
    assert run.generation_id is not None, "the run has chosen when it began to read"
    return make_target(connection, run, find_written(connection, run.generation_id))


def make_target(connection: Connection, run: Run, generation: Generation) -> Target:
    keep_text = keeps_texts(connection, run.collection_id)
    return Target(generation, run.spec or generation.spec, keep_text, RunTables(run.id, generation))


def live_stage(connection: Connection, run: Run) -> RunTables:
    """Return the run's stage beside the live generation, whichever it writes."""
    return RunTables(run.id, find_generation(connection, run.collection))
