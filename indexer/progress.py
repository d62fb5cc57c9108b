"""Progress: how far a claimed run is, as it is told in every transaction that writes for it."""

from dataclasses import replace
from uuid import UUID

from sqlalchemy import Connection

from vectormill.runs.run import Run, RunCounts
from vectormill.runs.run_claims import save_run
from vectormill.work.work import Lease


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
        """Record the counts, which become those of this object when the caller has committed. Raises LeaseLost."""
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
