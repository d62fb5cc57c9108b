from collections.abc import Callable

import pytest

from vectormill.domain.errors import WrongJobState
from vectormill.jobs.job import (
    JOB_STATES,
    state_after_cancel,
    state_after_delete,
    state_after_pause,
    state_after_resume,
    state_after_retry,
)

Transition = Callable[[str], str]

# What each wish makes of each state; a state that is missing refuses it.
TRANSITIONS: dict[str, tuple[Transition, dict[str, str]]] = {
    "pause": (state_after_pause, {"queued": "paused", "running": "paused", "paused": "paused"}),
    "resume": (
        lambda state: state_after_resume(state, has_started=True),
        {"queued": "queued", "running": "running", "paused": "running"},
    ),
    "resume before the first dispatch": (
        lambda state: state_after_resume(state, has_started=False),
        {"queued": "queued", "running": "running", "paused": "queued"},
    ),
    "cancel": (
        state_after_cancel,
        {
            "queued": "cancelling",
            "running": "cancelling",
            "paused": "cancelling",
            "cancelling": "cancelling",
            "cancelled": "cancelled",
        },
    ),
    "delete": (
        state_after_delete,
        dict.fromkeys(("completed", "completed_with_errors", "failed", "cancelled"), "deleting"),
    ),
    "retry": (
        lambda state: state_after_retry(state, 1),
        {"completed_with_errors": "queued", "failed": "queued", "paused": "paused"},
    ),
    "retry of nothing": (
        lambda state: state_after_retry(state, 0),
        # An ended job in these states always has failed items.
        {"completed_with_errors": "queued", "failed": "queued"},
    ),
}


@pytest.mark.parametrize("wish", TRANSITIONS)
@pytest.mark.parametrize("state", JOB_STATES)
def test_every_wish_leads_every_state_to_another_or_is_refused_with_the_state_named(
    wish: str, state: str
) -> None:
    decide, table = TRANSITIONS[wish]
    if state in table:
        assert decide(state) == table[state]
    else:
        is_received = state == "uploading" and wish in ("pause", "delete")
        said = "still being received" if is_received else f"The job is {state}"
        with pytest.raises(WrongJobState, match=said):
            decide(state)
