"""Run: one piece of long work on a collection by an indexer, with its kinds, states, phases and counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import WrongRunState
from vectormill.domain.options import Help
from vectormill.domain.states import ACTIVE, BAD, GOOD, MIXED, WAITING, State, States
from vectormill.jobs.job import DEFAULT_PRIORITY, LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY

REINDEX: Final = "reindex"  # brings the live generation, or a new one, up to date with the source
INDEX: Final = "index"  # builds, rebuilds or drops indexes
CHECK: Final = "check"  # encodes a sample again, and compares the index with exact search

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
class RunState(State):
    """A state of runs. The sets of states in SQL statements are derived from these properties."""

    is_final: bool = False
    is_begun: bool = True  # an indexer has claimed the run at some time
    is_claimed: bool = False  # an indexer has the run now
    is_wanted: bool = True  # no client has cancelled the run
    is_good: bool = False  # the collection is up to date with its source
    after_cancel: str | None = None  # the state after a client's cancellation; None if it is refused


_ROWS: Final = (
    RunState(UPLOADING, WAITING, is_begun=False, after_cancel=CANCELLED),
    RunState(QUEUED, WAITING, is_begun=False, after_cancel=CANCELLED),
    RunState(RUNNING, ACTIVE, is_claimed=True, after_cancel=CANCELLING),
    RunState(HELD, WAITING, after_cancel=CANCELLED),
    RunState(CANCELLING, WAITING, is_claimed=True, is_wanted=False, after_cancel=CANCELLING),
    RunState(COMPLETED, GOOD, is_final=True, is_good=True),
    RunState(COMPLETED_WITH_ERRORS, MIXED, is_final=True, is_good=True),
    RunState(FAILED, BAD, is_final=True),
    RunState(CANCELLED, is_final=True, is_wanted=False, after_cancel=CANCELLED),
    RunState(SKIPPED, WAITING, is_final=True, is_begun=False),
)

RUN_STATE_BY_NAME: Final = {state.name: state for state in _ROWS}
RUN_STATES: Final = States(state.name for state in _ROWS)
TERMINAL_RUN_STATES: Final = States(state.name for state in _ROWS if state.is_final)
GOOD_RUN_STATES: Final = States(state.name for state in _ROWS if state.is_good)
FINISHED_RUN_STATES: Final = States(
    state.name for state in _ROWS if state.is_final and state.is_begun and state.is_wanted
)
# Unsuccessful runs that were not cancelled: a schedule or the index maintainer retries.
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

# The SQL condition of a run that read the source of its collection to the end. A run with the option `carry_from`
# copied newer rows after a rollback instead.
IS_SYNC: Final = f"kind = '{REINDEX}' AND NOT options ? 'carry_from' AND state IN {GOOD_RUN_STATES}"

READING: Final = "reading"
COMPARING: Final = "comparing"
ENCODING: Final = "encoding"
DELETING: Final = "deleting"
INDEXING: Final = "indexing"
CHECKING: Final = "checking"
SWAPPING: Final = "swapping"

# The member of the report of a reading that has the mark of its changes.
CHANGES: Final = "changed"

# The phases in their order; a phase that has nothing to do returns at once.
RUN_PHASES: Final = (READING, COMPARING, ENCODING, DELETING, INDEXING, CHECKING, SWAPPING)

PHASES_BY_KIND: Final[Mapping[str, tuple[str, ...]]] = {
    REINDEX: RUN_PHASES,
    INDEX: (INDEXING,),
    CHECK: (CHECKING,),
}

# The share of the rows by which a source may have changed further since the reading that was confirmed.
CONFIRMED_MARGIN: Final = 0.05


# The limits and samples of a run that names none.
DEFAULT_MAX_CHANGE_SHARE: Final = 0.3
LEAST_RECALL: Final = 0.95
# 16-bit results agree at least this well in another batch or on another device.
LEAST_COSINE: Final = 0.999
CANARY_SAMPLE: Final = 64
MOST_FAILED_SHARE: Final = 0.01
DEFAULT_SAMPLE: Final = 200
MOST_SAMPLED: Final = 10_000


def limit(text: str, unset: float, *, metavar: str = "SHARE", least: int = 0, most: int = 1) -> Help:
    """Return the help of a number with its default, by which a run is judged."""
    return Help(
        text,
        f"By default {unset:g}.",
        default=f"`{unset:g}`",
        unset=f"{unset:g}",
        metavar=metavar,
        least=least,
        most=most,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReindexOptions:
    """The options of a re-index besides those of its encoding. They are passed to its phases by the same names."""

    max_change_share: Annotated[
        float | None,
        limit(
            "Hold the run if it would encode again or delete more than this share of the rows.",
            DEFAULT_MAX_CHANGE_SHARE,
        ),
    ] = None
    confirm: Annotated[bool, Help("Allow any share of the collection to change.")] = False
    full: Annotated[
        bool, Help("Read all rows of a source that names a column of changes, and find vanished ones.")
    ] = False
    priority: Annotated[
        int,
        Help(
            "The priority of the run's job: 0 is the most urgent, 9 the least.",
            metavar="N",
            least=MOST_URGENT_PRIORITY,
            most=LEAST_URGENT_PRIORITY,
        ),
    ] = DEFAULT_PRIORITY
    least_recall: Annotated[
        float | None,
        limit(
            "Let a new generation fail if its index finds less than this share of the nearest rows.",
            LEAST_RECALL,
        ),
    ] = None
    least_cosine: Annotated[
        float | None,
        limit(
            "Let it fail if a text that is encoded again is less similar to its vector than this.",
            LEAST_COSINE,
            metavar="COSINE",
            least=-1,
        ),
    ] = None
    canary_sample: Annotated[
        int | None,
        limit(
            "How many texts of a new generation to encode again.",
            CANARY_SAMPLE,
            metavar="N",
            most=MOST_SAMPLED,
        ),
    ] = None
    most_failed_share: Annotated[
        float | None,
        limit(
            "Let it fail if more than this share of its rows have errors that are not of their texts.",
            MOST_FAILED_SHARE,
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(ReindexOptions):
    """The options of a run of any kind."""

    sample: Annotated[
        int | None,
        limit("For a check: how many texts to encode again.", DEFAULT_SAMPLE, metavar="N", most=MOST_SAMPLED),
    ] = None


@dataclass(frozen=True, slots=True)
class RunCounts:
    """Numbers of rows of the source, by how they differ from the generation; each row is in one of them.

    `num_moved` counts renamed rows, copies, and passages at another place, which took over the vector of an equal
    text. `num_deleted` counts rows that the source no longer has under any key. `num_failed` counts those of the new
    and changed rows that could not be encoded.
    """

    num_seen: int = 0
    num_unchanged: int = 0
    num_metadata_only: int = 0
    num_new: int = 0
    num_changed: int = 0
    num_moved: int = 0
    num_deleted: int = 0
    num_failed: int = 0


def describe_counts(counts: Mapping[str, int]) -> str:
    """Format the fields of RunCounts, such as `1,200 seen · 3 new · 1 failed`, without zeros."""
    return " · ".join(
        f"{number:,} {name.removeprefix('num_').replace('_', ' ')}"
        for name, number in counts.items()
        if number
    )


@dataclass(frozen=True, slots=True)
class Run:
    """A run as read from the database.

    `spec` is the requested spec, None for that of the live generation. `report` has the findings of each
    phase.
    """

    id: UUID
    seq: int | None
    collection_id: int
    collection: str
    kind: str
    state: str
    phase: str | None  # of a run that has not ended
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
    """Return the phase that follows in a run of this kind; None after the last one."""
    phases = PHASES_BY_KIND[kind]
    position = phases.index(phase) + 1
    return phases[position] if position < len(phases) else None


def state_at_end(counts: RunCounts) -> str:
    """Return the final state of a run that went through all its phases."""
    return COMPLETED_WITH_ERRORS if counts.num_failed else COMPLETED


def state_after_cancel(state: str) -> str:
    """Return the new state of a run that a client cancels. Raise WrongRunState if it has ended otherwise.

    A running run becomes `cancelling` until its indexer ends it; one that waits or is held becomes
    `cancelled`.
    """
    (after,) = (row.after_cancel for row in _ROWS if row.name == state)
    if after is None:
        raise WrongRunState(
            f"The run is {state}; only a run that is waiting, running or held can be cancelled."
        )
    return after


def state_after_confirm(state: str) -> str:
    """Return the new state of a held run that a client confirms. Raise WrongRunState for any other run."""
    if state == HELD:
        return QUEUED
    raise WrongRunState(f"The run is {state}; only a held run can be confirmed.")


def is_as_confirmed(num_rows: int, num_changed: int, num_vanished: int, confirmed: Mapping[str, int]) -> bool:
    """Return True if a new reading finds no larger changes than were confirmed.

    Changed and vanished rows are compared separately, as shares of all rows plus CONFIRMED_MARGIN.
    """
    num_then = max(1, confirmed["num_rows"])
    return all(
        number <= (confirmed[name] / num_then + CONFIRMED_MARGIN) * num_rows
        for name, number in (("num_changed", num_changed), ("num_vanished", num_vanished))
    )


def refuse_change(num_rows: int, num_changed: int, num_vanished: int, max_share: float) -> str | None:
    """Return why a run must be held, None if it may continue.

    A run is held if it would encode again or delete a larger share of `num_rows` than `max_share`. A
    collection without rows has nothing to lose.
    """
    if num_rows == 0 or num_changed + num_vanished <= max_share * num_rows:
        return None
    share = (num_changed + num_vanished) / num_rows
    return (
        f"The source differs from {share:.0%} of the collection's {num_rows:,} rows: {num_changed:,} have a different "
        f"text and {num_vanished:,} are no longer in the source; at most {max_share:.0%} may change without "
        "confirmation (max_change_share). Nothing was changed. If this is intended, confirm the run; otherwise cancel "
        "it and check the source."
    )
