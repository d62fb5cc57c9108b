"""Transition: the state that a client's wish leads to, or the sentence that refuses it. Knows no database.

Workers and the scheduler change states too, by what becomes of chunks: see docs/STATES.md.
"""

from vectormill.domain.errors import WrongJobState
from vectormill.jobs.job import (
    CANCELLED,
    CANCELLING,
    COMPLETED_WITH_ERRORS,
    DELETING,
    DISPATCHED_JOB_STATES,
    FAILED,
    PAUSED,
    QUEUED,
    RUNNING,
    STEERABLE_JOB_STATES,
    TERMINAL_JOB_STATES,
    UPLOADING,
)


def state_after_pause(state: str) -> str:
    """Pausing twice is the same as once. Raises WrongJobState."""
    if state in STEERABLE_JOB_STATES:
        return PAUSED
    if state == UPLOADING:
        raise WrongJobState("The job is still being received; pause it when its upload has ended.")
    raise WrongJobState(f"The job is {state}; only a job that is waiting or running can be paused.")


def state_after_resume(state: str, *, has_started: bool) -> str:
    """A job that is not paused goes on anyway, so it stays as it is. Raises WrongJobState."""
    if state in DISPATCHED_JOB_STATES:
        return state
    if state == PAUSED:
        return RUNNING if has_started else QUEUED
    raise WrongJobState(f"The job is {state}; only a paused job can be resumed.")


def state_after_cancel(state: str) -> str:
    """`cancelling`; without a chunk at a worker the job is `cancelled` at once. Raises WrongJobState."""
    if state in (CANCELLING, CANCELLED):
        return state
    if state in STEERABLE_JOB_STATES:
        return CANCELLING
    raise WrongJobState(
        f"The job is {state}; only a job that is waiting, running or paused can be cancelled."
    )


def state_after_delete(state: str) -> str:
    """Only what has ended is deleted, so that nobody loses work by one wrong id. Raises WrongJobState."""
    if state in TERMINAL_JOB_STATES:
        return DELETING
    if state == UPLOADING:
        raise WrongJobState("The job is still being received; it can be deleted when it has ended.")
    if state == CANCELLING:
        raise WrongJobState("The job is cancelling; delete it when the chunks that workers hold have ended.")
    raise WrongJobState(f"The job is {state}; cancel it first, then delete it.")


def state_after_retry(state: str, num_failed: int) -> str:
    """A paused job stays paused: its failed items so far wait with the others. Raises WrongJobState."""
    if state in (COMPLETED_WITH_ERRORS, FAILED):
        return QUEUED
    if state == PAUSED:
        if num_failed:
            return PAUSED
        raise WrongJobState("The job is paused and no item of it has failed; `resume` lets it go on.")
    raise WrongJobState(
        f"The job is {state}; only a job that ended with failed items, or is paused, can be retried."
    )
