"""Intake: how much one submission may bring, and whether there is room for it among all that waits."""

from typing import Final

from sqlalchemy import Connection, Engine

from api.problems import Limit, Problem
from vectormill.domain.errors import LimitReached, SubmissionTooLarge
from vectormill.jobs.jobs import count_pending_items
from vectormill.settings import Settings

# Pending items become fewer by thousands a second, at the best.
RETRY_AFTER_SECONDS: Final = 30


class Intake:
    """Counts what a submission brings, and refuses what is too much. A repetition adds nothing, and is not admitted."""

    def __init__(self, settings: Settings) -> None:
        self._most_items = Limit.of(settings, "max_job_items")
        self._most_bytes = Limit.of(settings, "max_job_bytes")
        self._most_pending = Limit.of(settings, "max_pending_items")
        self._num_pending: int | None = None  # until it is admitted
        self._num_items = 0
        self._num_bytes = 0

    def admit(self, connection: Connection) -> None:
        """Count what waits. Raise Problem when that leaves no room for what was taken so far."""
        self._num_pending = count_pending_items(connection)
        self._refuse_overflow()

    def take_bytes(self, count: int) -> None:
        """Count bytes of the body, decompressed, against the limit. Raise Problem when there are too many."""
        self._num_bytes += count
        if self._num_bytes > self._most_bytes.value:
            raise too_large(self._most_bytes, "bytes")

    def take_items(self, count: int) -> None:
        """Count items of the job. Raise Problem when they are too many for one job, or find no room."""
        self._num_items += count
        if self._num_items > self._most_items.value:
            raise too_large(self._most_items, "items")
        self._refuse_overflow()

    def look_again(self, engine: Engine) -> None:
        """Admit the job once more, since others have submitted since its upload began. Raise Problem when they took the
        room.
        """
        if self._num_pending is not None:
            self.look(engine)

    def look(self, engine: Engine) -> None:
        """Admit with a connection of its own. Raise Problem."""
        with engine.connect() as connection:
            self.admit(connection)

    def _refuse_overflow(self) -> None:
        if self._num_pending is None or self._num_pending + self._num_items <= self._most_pending.value:
            return
        raise Problem(
            429,
            LimitReached.code,
            f"{self._num_pending:,} items wait to be encoded, and {self._most_pending.value:,} may in all "
            f"({self._most_pending.setting}); submit this job when there are fewer.",
            limit=self._most_pending,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


def too_large(limit: Limit, things: str) -> Problem:
    return Problem(
        413,
        SubmissionTooLarge.code,
        f"The job has more than {limit.value:,} {things} ({limit.setting}); split it into several.",
        limit=limit,
    )
