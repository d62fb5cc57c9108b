"""Ledger: what jobs, deletions and imports are to leave behind once faults stop, as a plain model.

Knows nothing of Postgres. What became of an item of a job is told by the job itself as long as it exists, and held
here once it is removed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from uuid import UUID

from vectormill.jobs.item import Item


class Outcome(Enum):
    """The fate of an item of an ended job: an item of a cancelled job may have its vector or not."""

    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Submission:
    """A job as its client knows it. `source` is the file that it was given by reference, whose rows are its items.

    `outcomes` are those of its items once the job is removed, and None until then.
    """

    job_id: UUID
    place: int
    items: Sequence[Item]
    collection: str | None
    source: Path | None
    output_url: str | None
    is_changed: bool = False  # the source is another one now, so that the items' names may be their positions
    outcomes: list[Outcome] | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """Something that was written under a key of the collection: an item of a job, an imported row, or a deletion."""

    place: int
    text: bytes | None
    submission: Submission | None = None
    position: int = 0

    @property
    def outcome(self) -> Outcome:
        """Return what became of the write; call it when all jobs have ended and their outcomes are noted."""
        if self.submission is None:
            return Outcome.DONE
        assert self.submission.outcomes is not None
        return self.submission.outcomes[self.position]


@dataclass(slots=True)
class Ledger:
    """All submissions, and all writes to the collection by key."""

    submissions: dict[UUID, Submission] = field(default_factory=dict)
    writes: dict[str, list[Write]] = field(default_factory=dict)

    def submit(self, submission: Submission) -> None:
        self.submissions[submission.job_id] = submission
        if submission.collection is not None:
            for position, item in enumerate(submission.items):
                self.write(item.key, Write(submission.place, item.text, submission, position))

    def write(self, key: str, write: Write) -> None:
        self.writes.setdefault(key, []).append(write)

    def find(self, key: str, text: bytes) -> Write:
        """Return the write of this text, of which there is one at most."""
        return next(write for write in self.writes[key] if write.text == text)

    def has_deleted(self, submission: Submission, position: int | None = None) -> bool:
        """Return whether a text of the submission may be gone from its chunk, because its key was deleted.

        With a position only the item there counts.
        """
        if submission.collection is None:
            return False
        items = submission.items if position is None else submission.items[position : position + 1]
        writes = (write for item in items for write in self.writes[item.key])
        return any(write.text is None and write.place > submission.place for write in writes)

    def list_allowed(self, key: str) -> set[bytes | None]:
        """Return the texts that the row of this key may have; None stands for no row.

        The newest write wins that came about. One that failed may have overwritten an older row before it was found to
        be faulty, so that there is none now.
        """
        allowed: set[bytes | None] = set()
        for write in sorted(self.writes.get(key, []), key=lambda write: -write.place):
            allowed.add(None if write.outcome is Outcome.FAILED else write.text)
            if write.outcome is Outcome.DONE:
                return allowed
        return allowed | {None}
