"""Request batches and their files: their states, and what is known of them. Knows no bytes and no SQL.

A request batch is a file of requests that is answered by a file of answers. OpenAI calls it a batch; here a batch is
what goes through a model at once, so in code it is never called that alone.
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
# Such a file is not found any more, and its parts are being removed.
DELETING: Final = "deleting"

REQUEST_FILE_STATES: Final = States((UPLOADING, PROCESSED, DELETING))

# The purposes of files that a client uploads, and of those that a batch makes.
BATCH: Final = "batch"
BATCH_OUTPUT: Final = "batch_output"
PURPOSES: Final = (BATCH, BATCH_OUTPUT)

_FILE_ID: Final = re.compile(r"file-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A file as it stands in the database at one moment.

    `batch_id` is the batch from whose job the content is made whenever it is read; None where the content is stored.
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
        """Return the id as clients have it."""
        return name_file(self.id)


def name_file(file_id: UUID) -> str:
    return f"file-{file_id.hex}"


def parse_file_name(name: str) -> UUID:
    """Parse a file's id as clients have it. Raise RequestFileNotFound for any other text, since no file has it."""
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
# A repeated request is answered with a batch in one of these states.
REPEATABLE_BATCH_STATES: Final = States((VALIDATING, IN_PROGRESS, FINALIZING))
# An indexer has something to do, whatever state the job is in.
TENDED_BATCH_STATES: Final = States((VALIDATING, FINALIZING))
ENDED_BATCH_STATES: Final = States((COMPLETED, FAILED, EXPIRED, CANCELLED))
BATCH_STATES: Final = States((*OPEN_BATCH_STATES, *ENDED_BATCH_STATES))

EMBEDDINGS: Final = "/v1/embeddings"
RERANK: Final = "/v1/rerank"
ENDPOINTS: Final = (EMBEDDINGS, RERANK)

# A client whose answer was lost tries again within so long; later, the same request is another batch.
REPEATED_SECONDS: Final = 600.0

WINDOW: Final = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_WINDOW_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400}
MOST_WINDOW_SECONDS: Final = 30 * 86400
_BATCH_ID: Final = re.compile(r"batch_([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class BatchFault:
    """The reason for which a line, or the whole batch, was refused. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "line": self.line, "param": self.param}


@dataclass(frozen=True, slots=True)
class NewRequestBatch:
    """A request batch to be made; `output_lifetime_seconds` counts from the files' creation."""

    endpoint: str
    input_file_id: UUID
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_lifetime_seconds: float | None = None
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """A batch as it stands in the database at one moment.

    Lines are counted, and items of its job: a line may bring several. `num_completed` and `num_failed` are known when
    it has ended. `job_*` are those of its job, None while there is none.
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
        """Return the id as clients have it."""
        return f"batch_{self.id.hex}"

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED_BATCH_STATES

    def count_lines(self) -> tuple[int, int]:
        """Return the numbers of lines that have an answer and that failed, estimated from items while the job runs."""
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
    """Parse a batch's id as clients have it. Raise RequestBatchNotFound for any other text, since no batch has it."""
    found = _BATCH_ID.fullmatch(name)
    if found is None:
        raise RequestBatchNotFound
    return UUID(found[1])


def parse_window(window: str) -> float:
    """Return the seconds of a completion window, such as 24h. Raises InvalidOption."""
    found = WINDOW.fullmatch(window)
    seconds = int(found[1]) * _WINDOW_SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MOST_WINDOW_SECONDS:
        raise InvalidOption(
            "completion_window must be a number of minutes, hours or days, as in '90m', '24h' or '7d'; 30 days at most."
        )
    return float(seconds)


def state_after_cancel(state: str) -> str:
    """Return the state after a cancellation; a second one changes nothing. Raises WrongBatchState."""
    if state in (CANCELLING, CANCELLED):
        return state
    if state in (VALIDATING, IN_PROGRESS):
        return CANCELLING
    raise WrongBatchState(
        f"The batch is {state}; only one that is validating or in progress can be cancelled."
    )
