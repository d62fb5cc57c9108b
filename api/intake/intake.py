"""Intake: admission control of submissions, by the size of one job and by the number of all pending items."""

from typing import Final

from sqlalchemy import Connection, Engine

from api.problems import Limit, Problem, refuse_size
from vectormill.domain.errors import LimitReached
from vectormill.jobs.backlog import count_pending_items
from vectormill.settings import Settings

# At best, thousands of pending items are encoded per second.
RETRY_AFTER_SECONDS: Final = 30


class Intake:
    """The admission control of one submission: it counts bytes and items, and refuses them beyond the limits.

    A repeated submission (Idempotency-Key) adds no items, so `admit` is not called for it.
    """

    def __init__(self, settings: Settings) -> None:
        self._most_items = Limit.of(settings, "max_job_items")
        self._most_bytes = Limit.of(settings, "max_job_bytes")
        self._most_pending = Limit.of(settings, "max_pending_items")
        self._num_pending: int | None = None  # None until `admit` is called
        self._num_items = 0
        self._num_bytes = 0

    def admit(self, connection: Connection) -> None:
        """Count all pending items. Raise Problem if these and the submission's items exceed the limit."""
        self._num_pending = count_pending_items(connection)
        self._refuse_overflow()

    def take_bytes(self, count: int) -> None:
        """Count bytes of the body, decompressed. Raise Problem if they exceed the limit of one job."""
        self._num_bytes += count
        if self._num_bytes > self._most_bytes.value:
            raise too_large(self._most_bytes, "bytes")

    def take_items(self, count: int) -> None:
        """Count items of the job. Raise Problem if they exceed the limit of items per job, or of all pending items."""
        self._num_items += count
        if self._num_items > self._most_items.value:
            raise too_large(self._most_items, "items")
        self._refuse_overflow()

    def look_again(self, engine: Engine) -> None:
        """Check the limit of pending items again, since others may have submitted jobs during the upload.

        Raise Problem if it is exceeded. Do nothing for a repeated submission, which was not admitted.
        """
        if self._num_pending is not None:
            self.look(engine)

    def look(self, engine: Engine) -> None:
        """Call `admit` with a new connection. Raise Problem if the limit is exceeded."""
        with engine.connect() as connection:
            self.admit(connection)

    def _refuse_overflow(self) -> None:
        if self._num_pending is None or self._num_pending + self._num_items <= self._most_pending.value:
            return
        raise Problem(
            429,
            LimitReached.code,
            f"{self._num_pending:,} items are waiting to be encoded, and at most "
            f"{self._most_pending.value:,} may wait in total ({self._most_pending.setting}); submit this "
            "job when fewer are waiting.",
            limit=self._most_pending,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


def too_large(limit: Limit, things: str) -> Problem:
    return refuse_size(
        limit, f"The job has more than {limit.value:,} {things} ({limit.setting}); split it into several."
    )
