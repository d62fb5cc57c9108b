# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Client: Vectormill's HTTP interface as a Python object with coroutines."""

from vectormill.client.sync.collections import CollectionCalls
from vectormill.client.sync.jobs import JobCalls
from vectormill.client.sync.searches import SearchCalls
from vectormill.client.sync.sources import RunCalls, ScheduleCalls, SourceCalls
from vectormill.client.sync.webhooks import WebhookCalls
from vectormill.models import operations as models
from vectormill.models.operations import ModelBody
from vectormill.workers import operations as workers
from vectormill.workers.operations import Readiness, WorkerBody


class Client(CollectionCalls, JobCalls, RunCalls, ScheduleCalls, SearchCalls, SourceCalls, WebhookCalls):
    """A client of one Vectormill API.

    `api_key` is what `vectormill keys create` printed; by default VECTORMILL_API_KEY is sent if it is set.
    `timeout` is in seconds and bounds each single wait for the server, not a whole transfer. Every method
    raises ApiError when the API refuses, ApiFailure when the API fails and ApiUnreachable when no answer
    comes.

    A request that is safe to repeat is retried when the API is overloaded (429) or unavailable (502 to 504),
    or when a connection that worked before is lost. Each pause is about twice as long as the one before and
    at least as long as Retry-After; all pauses of a call together last at most `retry_seconds`. `pause` is
    the function that sleeps.
    """

    def models(self) -> list[ModelBody]:
        """Return every registered model, with the number of workers that serve it."""
        return (self.ask(models.LIST))["data"]

    def workers(self) -> list[WorkerBody]:
        """Return every live worker, with its devices, plan and speed."""
        return (self.ask(workers.LIST))["data"]

    def readiness(self) -> Readiness:
        """Return which parts of the service are reachable.

        Raise ApiFailure if the API cannot serve requests at all.
        """
        return self.ask(workers.SHOW_READINESS)
