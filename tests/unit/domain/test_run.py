"""Transitions of a run, each state with each wish, and the guard."""

import pytest

from vectormill.domain.errors import WrongRunState
from vectormill.runs.run import (
    RUN_STATES,
    RunCounts,
    refuse_change,
    state_after_cancel,
    state_after_confirm,
    state_at_end,
)

AFTER_CANCEL = {
    "uploading": "cancelled",
    "queued": "cancelled",
    "held": "cancelled",
    "running": "cancelling",
    "cancelling": "cancelling",
    "cancelled": "cancelled",
}


@pytest.mark.parametrize("state", RUN_STATES)
def test_what_has_not_ended_can_be_cancelled(state: str) -> None:
    if state in AFTER_CANCEL:
        assert state_after_cancel(state) == AFTER_CANCEL[state]
    else:
        with pytest.raises(WrongRunState, match=f"is {state}"):
            state_after_cancel(state)


@pytest.mark.parametrize("state", RUN_STATES)
def test_only_a_held_run_is_confirmed(state: str) -> None:
    if state == "held":
        assert state_after_confirm(state) == "queued"
    else:
        with pytest.raises(WrongRunState, match=f"is {state}"):
            state_after_confirm(state)


def test_a_run_with_items_that_failed_ends_with_errors() -> None:
    assert state_at_end(RunCounts(num_seen=3)) == "completed"
    assert state_at_end(RunCounts(num_seen=3, num_failed=1)) == "completed_with_errors"


@pytest.mark.parametrize(
    ("num_rows", "num_changed", "num_vanished", "share", "is_held"),
    [
        (0, 0, 0, 0.3, False),  # nothing is there to lose
        (0, 5, 0, 0.3, False),
        (10, 3, 0, 0.3, False),  # as many as may
        (10, 3, 1, 0.3, True),
        (10, 0, 10, 0.99, True),
        (10, 0, 10, 1.0, False),
        (10, 1, 0, 0.0, True),
        (10, 0, 0, 0.0, False),
    ],
)
def test_a_share_of_a_collection_may_change_unasked(
    num_rows: int, num_changed: int, num_vanished: int, share: float, is_held: bool
) -> None:
    said = refuse_change(num_rows, num_changed, num_vanished, share)
    assert (said is not None) == is_held
    if said is not None:
        assert f"{num_vanished:,} are no longer in the source" in said
