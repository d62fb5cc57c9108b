"""Job: what a client submits, its states, the transitions that a client can request, and its progress.

Workers and the scheduler also change states, when chunks end: see docs/STATES.md.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from vectormill.domain.encoding import DEFAULT_MODEL, EncodingSpec, RequestedArguments
from vectormill.domain.errors import WrongJobState
from vectormill.domain.options import Help, find_given
from vectormill.domain.states import ACTIVE, BAD, GOOD, MIXED, WAITING, State, States
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
# Clients never see this state: such a job can no longer be found, and its rows are being removed.
DELETING: Final = "deleting"


# The actions that a client can request.
PAUSE: Final = "pause"
RESUME: Final = "resume"
CANCEL: Final = "cancel"
DELETE: Final = "delete"
RETRY: Final = "retry"


@dataclass(frozen=True, slots=True)
class JobState(State):
    """A job state and its properties, from which the sets of states below are derived.

    `leads_to` has the state after each request of a client; a request that is missing is refused. `title` is what the
    console calls the state, if not by its name.
    """

    is_final: bool = False
    is_received: bool = True  # all items have arrived
    is_dispatched: bool = False  # chunks are dispatched to workers
    is_wanted: bool = True  # not cancelled by a client
    moves: bool = True  # ends without a request by a client
    is_shown: bool = True
    leads_to: Mapping[str, str] = field(default_factory=dict)
    title: str = ""

    @property
    def is_brief(self) -> bool:
        """Return whether a job soon leaves this state by itself, so that few are in it."""
        return self.moves and not self.is_dispatched and not self.is_final


_ROWS: Final = (
    JobState(UPLOADING, WAITING, is_received=False),
    JobState(
        QUEUED, WAITING, is_dispatched=True, leads_to={PAUSE: PAUSED, RESUME: QUEUED, CANCEL: CANCELLING}
    ),
    JobState(
        RUNNING, ACTIVE, is_dispatched=True, leads_to={PAUSE: PAUSED, RESUME: RUNNING, CANCEL: CANCELLING}
    ),
    JobState(
        PAUSED,
        WAITING,
        moves=False,
        leads_to={PAUSE: PAUSED, RESUME: RUNNING, CANCEL: CANCELLING, RETRY: PAUSED},
    ),
    JobState(CANCELLING, WAITING, is_wanted=False, leads_to={CANCEL: CANCELLING}),
    JobState(COMPLETED, GOOD, is_final=True, leads_to={DELETE: DELETING}),
    JobState(
        COMPLETED_WITH_ERRORS,
        MIXED,
        is_final=True,
        leads_to={DELETE: DELETING, RETRY: QUEUED},
        title="With errors",
    ),
    JobState(FAILED, BAD, is_final=True, leads_to={DELETE: DELETING, RETRY: QUEUED}),
    JobState(CANCELLED, is_final=True, is_wanted=False, leads_to={CANCEL: CANCELLED, DELETE: DELETING}),
    JobState(DELETING, is_shown=False),
)
_SHOWN: Final = tuple(state for state in _ROWS if state.is_shown)
JOB_STATE_BY_NAME: Final = {state.name: state for state in _SHOWN}

JOB_STATES: Final = States(state.name for state in _SHOWN)
TERMINAL_JOB_STATES: Final = States(state.name for state in _SHOWN if state.is_final)
FINISHED_JOB_STATES: Final = States(state.name for state in _SHOWN if state.is_final and state.is_wanted)
UNWANTED_JOB_STATES: Final = States(state.name for state in _SHOWN if not state.is_wanted)
OPEN_JOB_STATES: Final = States(state.name for state in _SHOWN if not state.is_final)
# A subset of the open states.
RECEIVED_JOB_STATES: Final = States(
    state.name for state in _SHOWN if not state.is_final and state.is_received
)
DISPATCHED_JOB_STATES: Final = States(state.name for state in _SHOWN if state.is_dispatched)
# The states in which a client may pause or cancel a job.
STEERABLE_JOB_STATES: Final = States(
    state.name for state in _SHOWN if not state.is_final and state.is_received and state.is_wanted
)
MOVING_JOB_STATES: Final = States(state.name for state in _SHOWN if not state.is_final and state.moves)
# The states in which the scheduler has work to do for a job.
TENDED_JOB_STATES: Final = States(
    state.name for state in _SHOWN if not state.is_final and state.moves and state.is_received
)

MOST_URGENT_PRIORITY: Final = 0
LEAST_URGENT_PRIORITY: Final = 9
DEFAULT_PRIORITY: Final = 5
# A rate is not told by what ended within less time after a commit.
LEAST_PACE_SECONDS: Final = 5.0
# Jobs of the most urgent class are interactive: their texts join batches of bulk jobs and never wait for a
# full batch.
INTERACTIVE_PRIORITY: Final = MOST_URGENT_PRIORITY


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options of a job besides those of its encoding."""

    collection: Annotated[
        str | None,
        Help(
            "Keep the results under this name, for search and SQL.",
            "A SQL view of this name shows them.",
            default="none",
            metavar="NAME",
            example="docs",
        ),
    ] = None
    to: Annotated[
        str | None,
        Help(
            "Write the results as Parquet into this empty folder of an object store, or into a table, "
            "iceberg://catalog/namespace.table, instead of Postgres.",
            "A folder gets parts and a `_manifest.json`; to a table they are added.",
            default="none",
            metavar="URL",
            example="s3://bucket/vectors",
        ),
    ] = None
    priority: Annotated[
        int,
        Help(
            "0 is the most urgent, 9 the least.",
            metavar="N",
            least=MOST_URGENT_PRIORITY,
            most=LEAST_URGENT_PRIORITY,
        ),
    ] = DEFAULT_PRIORITY
    wait_for_worker: Annotated[
        bool,
        Help(
            "Accept the job even if every live worker of its model has failed to load it.", is_compared=False
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedJob(JobOptions):
    """The options as a client names them, which says the model, too."""

    model: Annotated[
        str,
        Help(
            "A registered model; see `vectormill models`.",
            "The API lists them by `GET /v1/models`.",
            metavar="NAME",
        ),
    ] = DEFAULT_MODEL


class JobArguments(RequestedArguments, total=False):
    """RequestedJob and RequestedOptions as keyword arguments, for editors and type checkers only.

    Generated by `python -m tests.architecture.derived`.
    """

    # <options>
    collection: str | None
    to: str | None
    priority: int | None
    wait_for_worker: bool | None
    model: str | None
    # <end>


# The options that were compared by their places before options were compared by name.
COMPARED_BY_PLACE: Final = ("collection", "priority", "to")


@dataclass(frozen=True, slots=True)
class NewJob(JobOptions):
    """A job to be created, checked against its model before any item is read.

    With a `lifetime_seconds` the job is removed when that time is over, whatever its state; this is used for
    samples of a check. An infinite value marks the job of a put, which is removed some minutes after its end.

    The job of a run has an `id` that the run has recorded, and a `seq` that was drawn when the run began to
    read, so that whatever clients write meanwhile counts as newer. Its `generation_id` names the only
    generation that it writes, live or building. The job of an input that was left to an indexer `is_accepted`: its
    row is there.
    """

    spec: EncodingSpec
    _: KW_ONLY
    metadata: dict[str, Any] | None = None
    idempotency_key: str | None = None
    lifetime_seconds: float | None = None
    id: UUID | None = None
    seq: int | None = None
    generation_id: int | None = None
    is_accepted: bool = False

    def content(self) -> list[Any]:
        """Return what a repeated request must have in common with the first one, besides the items.

        An option that has its default is left out, so that a key from before there was the option stays valid.
        """
        fixed = [self.spec.content(), self.collection, self.priority, self.metadata or {}]
        fixed += [] if self.to is None else [self.to]
        named = {
            name: value
            for name, value in find_given(self, compared=True).items()
            if name not in COMPARED_BY_PLACE
        }
        return [*fixed, named] if named else fixed


# In the metadata of a job, the name of the file with its texts; commands that submit a file and the console add it.
FILE: Final = "file"


@dataclass(frozen=True, slots=True)
class Job:
    """A snapshot of a job in the database.

    `twin_of` is the job whose items this one encodes again, for a generation that was being built alongside
    the live one when the items were submitted. `output_url` is the folder of an object store with the results, and
    `output_state` one of OUTPUT_STATES. `output_table` is the table of Iceberg that gets them, if there is one, and
    `output_error` says why the last step failed. `input_state` is one of INPUT_STATES if an indexer reads the objects
    of the job, with the rows found so far, those whose keys were compared, and the last error. `pace` has the seconds
    without pauses and the ended items at the earlier of two marks, and at the later one.
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
    pace: list[float] | None
    now: datetime
    num_repeated: int = 0
    twin_of: UUID | None = None
    output_url: str | None = None
    output_state: str | None = None
    output_table: str | None = None
    output_error: str | None = None
    input_state: str | None = None
    input_items: int | None = None
    input_compared: int | None = None
    input_error: str | None = None

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_JOB_STATES

    @property
    def is_left_to_indexer(self) -> bool:
        """Return whether an indexer has yet to read the objects with the items of the job."""
        return self.state == UPLOADING and self.input_state is not None

    @property
    def elapsed_seconds(self) -> float:
        """Return the seconds from the first dispatch to the end, or until now, without pauses.

        Return 0 before the first dispatch. If the job ended while it was paused, that pause counts, because
        the last chunks were encoded in it.
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
        """Return the estimated seconds until the end, at the rate of the last minutes.

        Return 0 after the end, and None while the job is paused or no item is finished. Until some seconds after the
        first commit, the rate is the mean so far.
        """
        if self.is_terminal:
            return 0.0
        if self.state == PAUSED:
            return None
        rate, num_ended = self.items_per_second, self.num_done + self.num_failed
        if self.pace is not None:
            begun, num_before, *_ = self.pace
            seconds = self.elapsed_seconds - begun
            if seconds >= LEAST_PACE_SECONDS and num_ended > num_before:
                rate = (num_ended - num_before) / seconds
        return (self.num_items - num_ended) / rate if rate > 0 else None

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


def _state_after(request: str, state: str, allowed: str) -> str:
    """Return the state after a client's request. Raise WrongJobState, with what is `allowed`, if it is refused."""
    after = JOB_STATE_BY_NAME[state].leads_to.get(request)
    if after is None:
        raise WrongJobState(f"The job is {state}; {allowed}.")
    return after


def state_after_pause(state: str) -> str:
    """Return the state after a pause. Raise WrongJobState if the job cannot be paused.

    A paused job stays paused.
    """
    if state == UPLOADING:
        raise WrongJobState("The job is still uploading; pause it once the upload has finished.")
    return _state_after(PAUSE, state, "only a job that is waiting or running can be paused")


def state_after_resume(state: str, *, has_started: bool) -> str:
    """Return the state after a resume; a job that is not paused keeps its state.

    Raise WrongJobState if the job has ended, is being cancelled or is still being received.
    """
    after = _state_after(RESUME, state, "only a paused job can be resumed")
    return after if has_started or state != PAUSED else QUEUED


def state_after_cancel(state: str) -> str:
    """Return the state after a cancellation. Raise WrongJobState if the job cannot be cancelled.

    The state is `cancelling`, unless the job is already `cancelled`. If no worker holds a chunk of the job, the
    caller makes it `cancelled` at once.
    """
    return _state_after(CANCEL, state, "only a job that is waiting, running or paused can be cancelled")


def state_after_delete(state: str) -> str:
    """Return the state after a deletion, `deleting`. Raise WrongJobState unless the job has ended.

    Other jobs are refused so that nobody loses work by one wrong id.
    """
    if state == UPLOADING:
        raise WrongJobState("The job is still uploading; it can be deleted when it has ended.")
    if state == CANCELLING:
        raise WrongJobState("The job is cancelling; delete it when workers have finished its current chunks.")
    return _state_after(DELETE, state, "cancel it first, then delete it")


def state_after_retry(state: str, num_failed: int) -> str:
    """Return the state after a retry.

    Raise WrongJobState unless the job ended with failed items, or is paused and has some. A paused job stays
    paused, and its failed items wait together with the others.
    """
    if state == PAUSED and not num_failed:
        raise WrongJobState(
            "The job is paused and none of its items have failed; use `resume` to continue it."
        )
    allowed = "only a job that ended with failed items, or is paused, can be retried"
    after = _state_after(RETRY, state, allowed)
    if not num_failed:
        raise WrongJobState(f"The job is {state}; {allowed}.")
    return after
