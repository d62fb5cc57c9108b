"""The rounds of a request, as the engine takes them, for tests that compute the results themselves."""

from collections.abc import Mapping

from vectormill.jobs.item import ItemFailure
from vectormill.ragged import Ragged
from worker.tasks.task import Answered, Asked, Finished, Rounds, advance


def ask(rounds: Rounds, answered: Answered | None = None) -> Asked:
    """Return what the request asks for next. Fail if it has ended."""
    asked = advance(rounds, answered)
    assert not isinstance(asked, Finished), "the request has ended"
    return asked


def finish(
    rounds: Rounds, results: Ragged | None = None, failures: Mapping[int, ItemFailure] | None = None
) -> Finished:
    """Return the results of a request whose last round these are answers to. Fail if it asks for more."""
    finished = advance(rounds, None if results is None else (results, failures or {}))
    assert isinstance(finished, Finished), "the request asks for more"
    return finished
