"""Request batches and their files: types, states and ids. Independent of SQL and of file contents.

A request batch is a file of requests that is answered by a file of answers. OpenAI calls it a batch;
elsewhere in this project, a batch is the set of sequences in one forward pass.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from vectormill.domain.errors import InvalidOption, RequestBatchNotFound, RequestFileNotFound, WrongBatchState
from vectormill.domain.states import States

UPLOADING: Final = "uploading"
PROCESSED: Final = "processed"
# Clients do not find a file in this state, and its parts are being removed.
DELETING: Final = "deleting"

# BATCH is the purpose of files that a client uploads, BATCH_OUTPUT of files that a batch makes.
BATCH: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"
PURPOSES: Final = (BATCH, BATCH_OUTPUT)

_FILE_ID: Final = re.compile(r"file-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A file as it was in the database at one moment.

    `batch_id` is set if the content is made, whenever it is read, from the results of that batch's job; it is
    None if the content is stored.
    """

    id: UUID
    seq: int
    purpose: str
    filename: str
    num_bytes: int
    created_at: datetime
    expires_at: datetime | None
    batch_id: UUID | None = None

    @property
    def name(self) -> str:
        """Return the file's id in the form that clients see: file- and 32 hex digits."""
        return name_file(self.id)


def name_file(file_id: UUID) -> str:
    return f"file-{file_id.hex}"


def parse_file_name(name: str) -> UUID:
    """Parse a file's id in the form that clients see. Raise RequestFileNotFound if it is not of that form."""
    found = _FILE_ID.fullmatch(name)
    if found is None:
        raise RequestFileNotFound
    return UUID(found[1])


VALIDATING: Final = "validating"
IN_PROGRESS: Final = "in_progress"
FINALIZING: Final = "finalizing"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
EXPIRED: Final = "expired"
CANCELLING: Final = "cancelling"
CANCELLED: Final = "cancelled"

OPEN_BATCH_STATES: Final = States((VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING))
# A repeated request returns the earlier batch if that is in one of these states.
REPEATABLE_BATCH_STATES: Final = States((VALIDATING, IN_PROGRESS, FINALIZING))
# In these states a batch needs an indexer whatever the state of its job.
TENDED_BATCH_STATES: Final = States((VALIDATING, FINALIZING))
ENDED_BATCH_STATES: Final = States((COMPLETED, FAILED, EXPIRED, CANCELLED))
BATCH_STATES: Final = States((*OPEN_BATCH_STATES, *ENDED_BATCH_STATES))

EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = "/v1/rerank"
ENDPOINTS: Final = (EMBEDDINGS, RERANK)

# A client that received no answer retries within this time; later, an equal request creates another batch.
REPEATED_SECONDS: Final = 600.0

WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_WINDOW_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400}
MOST_WINDOW_SECONDS: Final = 30 * 86400
_BATCH_ID: Final = re.compile(r"batch_([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class BatchFault:
    """The reason why a line or the whole batch was refused.

    `line` counts from 1; it is None for the whole batch.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class NewRequestBatch:
    """A request batch to be created; `output_lifetime_seconds` counts from the creation of its files."""

    endpoint: str
    input_file_id: UUID
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_lifetime_seconds: float | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """A request batch as it was in the database at one moment.

    `num_lines`, `num_refused`, `num_completed` and `num_failed` count lines; the latter two are known once
    the batch has ended. `job_items`, `job_done` and `job_failed` count the job's items, of which a line may
    have several. `job_*` are None while there is no job.
    """

    id: UUID
    seq: int
    state: str
    endpoint: str
    input_file_id: UUID
    completion_window: str
    metadata: dict[str, str] | None
    output_lifetime_seconds: float | None
    model: str | None
    job_id: UUID | None
    num_lines: int
    num_refused: int
    num_completed: int
    num_failed: int
    num_tokens: int
    errors: list[dict[str, Any]]
    output_file_id: UUID | None
    error_file_id: UUID | None
    is_overdue: bool
    created_at: datetime
    expires_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None
    fence: int
    attempt: int
    job_state: str | None = None
    job_items: int | None = None
    job_done: int | None = None
    job_failed: int | None = None
    job_tokens: int | None = None

    @property
    def name(self) -> str:
        """Return the batch's id in the form that clients see: batch_ and 32 hex digits."""
        return f"batch_{self.id.hex}"

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED_BATCH_STATES

    def count_lines(self) -> tuple[int, int]:
        """Return the numbers of answered and of failed lines, estimated from items while the job runs."""
        if self.is_ended:
            return self.num_completed, self.num_failed
        if not self.job_items:
            return 0, self.num_refused
        lines = self.num_lines - self.num_refused
        done, failed = (
            lines * (number or 0) // self.job_items for number in (self.job_done, self.job_failed)
        )
        return done, self.num_refused + failed


def parse_batch_name(name: str) -> UUID:
    """Parse a batch's id in the form that clients see.

    Raise RequestBatchNotFound if it is not of that form.
    """
    found = _BATCH_ID.fullmatch(name)
    if found is None:
        raise RequestBatchNotFound
    return UUID(found[1])


def parse_window(window: str) -> float:
    """Return the seconds of a completion window such as 24h. Raise InvalidOption if it is invalid."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * _WINDOW_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MOST_WINDOW_SECONDS:
        raise InvalidOption(
            "completion_window must be a number of minutes, hours or days, such as '90m', '24h' or '7d', and at most "
            "30 days."
        )
    return float(seconds)


def state_after_cancel(state: str) -> str:
    """Return a batch's state after it is cancelled; a second cancellation changes nothing.

    Raise WrongBatchState if a batch in this state cannot be cancelled.
    """
    if state in (CANCELLING, CANCELLED):
        return state
    if state in (VALIDATING, IN_PROGRESS):
        return CANCELLING
    raise WrongBatchState(
        f"The batch is {state}; only a batch that is validating or in progress can be cancelled."
    )
