"""Run: one piece of long work on a collection, carried out by an indexer. Its kinds, states, phases and counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import WrongRunState
from vectormill.domain.states import States

REINDEX: Final = "reindex"  # follows the source, in the live generation or in a new one
INDEX: Final = "index"  # builds, rebuilds or drops indexes
CHECK: Final = "check"  # compares a sample with what the model gives, and the index with an exact search

RUN_KINDS: Final = (REINDEX, INDEX, CHECK)

UPLOADING: Final = "uploading"
QUEUED: Final = "queued"
RUNNING: Final = "running"
HELD: Final = "held"
CANCELLING: Final = "cancelling"
COMPLETED: Final = "completed"
COMPLETED_WITH_ERRORS: Final = "completed_with_errors"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"
SKIPPED: Final = "skipped"


@dataclass(frozen=True, slots=True)
class RunState:
    """A state of runs. Statements are composed of the sets below, which are made from these properties."""

    name: str
    is_final: bool = False
    is_begun: bool = True  # an indexer has had it
    is_claimed: bool = False  # an indexer has it
    is_wanted: bool = True  # nobody has cancelled it
    is_good: bool = False  # the collection is in step with its source


_ROWS: Final = (
    RunState(UPLOADING, is_begun=False),
    RunState(QUEUED, is_begun=False),
    RunState(RUNNING, is_claimed=True),
    RunState(HELD),
    RunState(CANCELLING, is_claimed=True, is_wanted=False),
    RunState(COMPLETED, is_final=True, is_good=True),
    RunState(COMPLETED_WITH_ERRORS, is_final=True, is_good=True),
    RunState(FAILED, is_final=True),
    RunState(CANCELLED, is_final=True, is_wanted=False),
    RunState(SKIPPED, is_final=True, is_begun=False),
)

RUN_STATES: Final = States(state.name for state in _ROWS)
TERMINAL_RUN_STATES: Final = States(state.name for state in _ROWS if state.is_final)
GOOD_RUN_STATES: Final = States(state.name for state in _ROWS if state.is_good)
FINISHED_RUN_STATES: Final = States(
    state.name for state in _ROWS if state.is_final and state.is_begun and state.is_wanted
)
# A schedule, and the tending of an index, try these kinds again.
MISSED_RUN_STATES: Final = States(
    state.name for state in _ROWS if state.is_final and state.is_wanted and not state.is_good
)
BROKEN_RUN_STATES: Final = States(
    state.name for state in _ROWS if state.is_final and state.is_begun and not state.is_good
)
OPEN_RUN_STATES: Final = States(state.name for state in _ROWS if not state.is_final)
CLAIMED_RUN_STATES: Final = States(state.name for state in _ROWS if state.is_claimed)
UNCLAIMED_RUN_STATES: Final = States(
    state.name for state in _ROWS if not state.is_final and not state.is_claimed
)
STEERABLE_RUN_STATES: Final = States(state.name for state in _ROWS if not state.is_final and state.is_wanted)

READING: Final = "reading"
COMPARING: Final = "comparing"
ENCODING: Final = "encoding"
DELETING: Final = "deleting"
INDEXING: Final = "indexing"
CHECKING: Final = "checking"
SWAPPING: Final = "swapping"

# In the order in which a run goes through them; one that has nothing to do in a phase passes it.
RUN_PHASES: Final = (READING, COMPARING, ENCODING, DELETING, INDEXING, CHECKING, SWAPPING)

PHASES_BY_KIND: Final[Mapping[str, tuple[str, ...]]] = {
    REINDEX: RUN_PHASES,
    INDEX: (INDEXING,),
    CHECK: (CHECKING,),
}

# The share of the rows that may be encoded again or deleted by a run that nobody has confirmed.
DEFAULT_MAX_CHANGE_SHARE: Final = 0.3
# By so much of the rows a source may have moved on since the reading that was confirmed.
CONFIRMED_MARGIN: Final = 0.05


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Count rows of the source by how they differ from the generation.

    `num_moved` are new keys, or passages at another place, whose vector was taken over from an equal text;
    `num_deleted` rows that the source no longer has; `num_failed` those that could not be encoded.
    """

    num_seen: int = 0
    num_unchanged: int = 0
    num_metadata_only: int = 0
    num_new: int = 0
    num_changed: int = 0
    num_moved: int = 0
    num_deleted: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it stands in the database at one moment.

    `spec` is that asked for, None for the live generation's; `report` what a phase found, by phase.
    """

    id: UUID
    seq: int | None
    collection_id: int
    collection: str
    kind: str
    state: str
    phase: str | None
    generation_id: int | None
    job_id: UUID | None
    spec: EncodingSpec | None
    options: Mapping[str, Any]
    counts: RunCounts
    report: Mapping[str, Any]
    error: str | None
    schedule_id: int | None
    due_at: datetime | None
    attempt: int
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    now: datetime

    @property
    def is_terminal(self) -> bool:
        return self.state in TERMINAL_RUN_STATES


def phase_after(kind: str, phase: str) -> str | None:
    """Return the next phase of a run of this kind; None after its last one."""
    phases = PHASES_BY_KIND[kind]
    position = phases.index(phase) + 1
    return phases[position] if position < len(phases) else None


def state_at_end(counts: RunCounts) -> str:
    """Return the final state of a run that went through all its phases."""
    return COMPLETED_WITH_ERRORS if counts.num_failed else COMPLETED


def state_after_cancel(state: str) -> str:
    """Return `cancelling` while an indexer holds the run, which ends it; else `cancelled`. Raise WrongRunState."""
    if state in (CANCELLING, CANCELLED):
        return state
    if state == RUNNING:
        return CANCELLING
    if state in (UPLOADING, QUEUED, HELD):
        return CANCELLED
    raise WrongRunState(f"The run is {state}; only one that waits, runs or is held can be cancelled.")


def state_after_confirm(state: str) -> str:
    """Return the state in which a held run waits for an indexer again. Raise WrongRunState."""
    if state == HELD:
        return QUEUED
    raise WrongRunState(f"The run is {state}; only a held run can be confirmed.")


def is_as_confirmed(num_rows: int, num_changed: int, num_vanished: int, confirmed: Mapping[str, int]) -> bool:
    """Tell whether a fresh reading finds no more than was confirmed: of each kind its share, and a little more."""
    num_then = max(1, confirmed["num_rows"])
    return all(
        number <= (confirmed[name] / num_then + CONFIRMED_MARGIN) * num_rows
        for name, number in (("num_changed", num_changed), ("num_vanished", num_vanished))
    )


def refuse_change(num_rows: int, num_changed: int, num_vanished: int, max_share: float) -> str | None:
    """Say why a run is held: it would encode again or delete a larger share of `num_rows` than `max_share`.

    None when it may go on; a collection without rows has nothing to lose.
    """
    if num_rows == 0 or num_changed + num_vanished <= max_share * num_rows:
        return None
    share = (num_changed + num_vanished) / num_rows
    return (
        f"The source differs from {share:.0%} of the collection's {num_rows:,} rows: {num_changed:,} have another text "
        f"and {num_vanished:,} are in the source no more; at most {max_share:.0%} may change unasked "
        "(max_change_share). Nothing was changed. If that is right, confirm the run; else cancel it, and look at the "
        "source."
    )
