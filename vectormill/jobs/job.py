"""Job: what a client submits. Its states, where a client's wish leads from each, and what is known of it.

Workers and the scheduler change states too, by what becomes of chunks: see docs/STATES.md.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import WrongJobState
from vectormill.domain.states import States
from vectormill.jobs.bottleneck import Bottleneck, find_bottleneck, share_stages

UPLOADING: Final = "uploading"
QUEUED: Final = "queued"
RUNNING: Final = "running"
PAUSED: Final = "paused"
CANCELLING: Final = "cancelling"
COMPLETED: Final = "completed"
COMPLETED_WITH_ERRORS: Final = "completed_with_errors"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
# Nobody meets it: such a job is not found any more, and its rows are being removed.
DELETING: Final = "deleting"


@dataclass(frozen=True, slots=True)
class JobState:
    """A state, and what holds of a job in it. Statements are composed of the sets below."""

    name: str
    is_final: bool = False
    is_received: bool = True  # all its items are there
    is_dispatched: bool = False  # its chunks are given to workers
    is_wanted: bool = True  # nobody has cancelled it
    moves: bool = True  # it comes to its end without a client's wish
    is_shown: bool = True


_ROWS: Final = (
    JobState(UPLOADING, is_received=False),
    JobState(QUEUED, is_dispatched=True),
    JobState(RUNNING, is_dispatched=True),
    JobState(PAUSED, moves=False),
    JobState(CANCELLING, is_wanted=False),
    JobState(COMPLETED, is_final=True),
    JobState(COMPLETED_WITH_ERRORS, is_final=True),
    JobState(FAILED, is_final=True),
    JobState(CANCELLED, is_final=True, is_wanted=False),
    JobState(DELETING, is_shown=False),
)
_SHOWN: Final = tuple(state for state in _ROWS if state.is_shown)

ALL_JOB_STATES: Final = States(state.name for state in _ROWS)
JOB_STATES: Final = States(state.name for state in _SHOWN)
TERMINAL_JOB_STATES: Final = States(state.name for state in _SHOWN if state.is_final)
FINISHED_JOB_STATES: Final = States(state.name for state in _SHOWN if state.is_final and state.is_wanted)
UNWANTED_JOB_STATES: Final = States(state.name for state in _SHOWN if not state.is_wanted)
OPEN_JOB_STATES: Final = States(state.name for state in _SHOWN if not state.is_final)
# Among the open ones:
RECEIVED_JOB_STATES: Final = States(
    state.name for state in _SHOWN if not state.is_final and state.is_received
)
DISPATCHED_JOB_STATES: Final = States(state.name for state in _SHOWN if state.is_dispatched)
# A client may pause or cancel them.
STEERABLE_JOB_STATES: Final = States(
    state.name for state in _SHOWN if not state.is_final and state.is_received and state.is_wanted
)
MOVING_JOB_STATES: Final = States(state.name for state in _SHOWN if not state.is_final and state.moves)
# The scheduler has something to do for them.
TENDED_JOB_STATES: Final = States(
    state.name for state in _SHOWN if not state.is_final and state.moves and state.is_received
)

MOST_URGENT_PRIORITY: Final = 0
LEAST_URGENT_PRIORITY: Final = 9
DEFAULT_PRIORITY: Final = 5
# Jobs of the most urgent class are interactive: they ride with bulk batches and never wait for a full one.
INTERACTIVE_PRIORITY: Final = MOST_URGENT_PRIORITY


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be made, checked against the model, before any item is read.

    `lifetime_seconds` is for the samples of a check: whatever the job's state, it is removed when that is over.
    Infinite, it is for that of a put: it is removed some minutes after its end.

    A run's job has an `id` that the run has noted, a `seq` that was drawn when the run began to read, so that what
    clients write meanwhile is newer, and the generation it writes: the live one or the one that is being built, and
    no other.
    """

    spec: EncodingSpec
    collection: str | None = None
    priority: int = DEFAULT_PRIORITY
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    lifetime_seconds: float | None = None
    id: UUID | None = None
    seq: int | None = None
    generation_id: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it stands in the database at one moment.

    `twin_of` is the job whose items this one encodes once more, for a generation that was being built beside the live
    one when they came.
    """

    id: UUID
    seq: int
    state: str
    spec: EncodingSpec
    collection: str | None
    priority: int
    metadata: dict[str, Any]
    num_items: int
    num_done: int
    num_failed: int
    num_chunks: int
    num_open_chunks: int
    num_retried_chunks: int
    num_tokens: int
    num_computed_tokens: int
    num_truncated: int
    num_passages: int
    num_reused: int
    stage_seconds: dict[str, float]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    paused_at: datetime | None
    idle_seconds: float
    now: datetime
    twin_of: UUID | None = None

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_JOB_STATES

    @property
    def elapsed_seconds(self) -> float:
        """Return the seconds from the first dispatch to the end, or until now, without pauses; 0 before the first
        dispatch.

        The pause in which a job ended counts: its last chunks were encoded in it.
        """
        if self.started_at is None:
            return 0.0
        until = self.finished_at or self.paused_at or self.now
        return max((until - self.started_at).total_seconds() - self.idle_seconds, 1e-6)

    @property
    def items_per_second(self) -> float:
        return (self.num_done + self.num_failed) / self.elapsed_seconds if self.started_at else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def eta_seconds(self) -> float | None:
        """Return the seconds until the end at the mean rate so far; None while nothing is known or it is paused, 0 at
        the end.
        """
        if self.is_terminal:
            return 0.0
        if self.state == PAUSED:
            return None
        rate = self.items_per_second
        return (self.num_items - self.num_done - self.num_failed) / rate if rate > 0 else None

    @property
    def stage_shares(self) -> dict[str, float]:
        """Return the busy seconds of each stage per second in which a worker held a chunk of the job."""
        return share_stages(self.stage_seconds, self.elapsed_seconds)

    @property
    def bottleneck(self) -> Bottleneck | None:
        """Return the stage that bounded the job, or bounds it so far; None before its first chunk is done."""
        return find_bottleneck(self.stage_seconds, self.elapsed_seconds)

    @property
    def padding_waste(self) -> float:
        """Return the share of the computed tokens that were padding, 0 to 1."""
        return 1 - self.num_tokens / self.num_computed_tokens if self.num_computed_tokens else 0.0


def state_after_pause(state: str) -> str:
    """Return the state after a pause; pausing twice is the same as once. Raise WrongJobState."""
    if state in STEERABLE_JOB_STATES:
        return PAUSED
    if state == UPLOADING:
        raise WrongJobState("The job is still being received; pause it when its upload has ended.")
    raise WrongJobState(f"The job is {state}; only a job that is waiting or running can be paused.")


def state_after_resume(state: str, *, has_started: bool) -> str:
    """Return the state after a resumption; a job that is not paused goes on anyway, so it stays as it is. Raise
    WrongJobState.
    """
    if state in DISPATCHED_JOB_STATES:
        return state
    if state == PAUSED:
        return RUNNING if has_started else QUEUED
    raise WrongJobState(f"The job is {state}; only a paused job can be resumed.")


def state_after_cancel(state: str) -> str:
    """Return `cancelling`; without a chunk at a worker the job is `cancelled` at once. Raise WrongJobState."""
    if state in (CANCELLING, CANCELLED):
        return state
    if state in STEERABLE_JOB_STATES:
        return CANCELLING
    raise WrongJobState(
        f"The job is {state}; only a job that is waiting, running or paused can be cancelled."
    )


def state_after_delete(state: str) -> str:
    """Return `deleting` for what has ended alone, so that nobody loses work by one wrong id. Raise WrongJobState."""
    if state in TERMINAL_JOB_STATES:
        return DELETING
    if state == UPLOADING:
        raise WrongJobState("The job is still being received; it can be deleted when it has ended.")
    if state == CANCELLING:
        raise WrongJobState("The job is cancelling; delete it when the chunks that workers hold have ended.")
    raise WrongJobState(f"The job is {state}; cancel it first, then delete it.")


def state_after_retry(state: str, num_failed: int) -> str:
    """Return the state after a retry; a paused job stays paused, and its failed items wait with the others. Raise
    WrongJobState.
    """
    if state in (COMPLETED_WITH_ERRORS, FAILED):
        return QUEUED
    if state == PAUSED:
        if num_failed:
            return PAUSED
        raise WrongJobState("The job is paused and no item of it has failed; `resume` lets it go on.")
    raise WrongJobState(
        f"The job is {state}; only a job that ended with failed items, or is paused, can be retried."
    )
