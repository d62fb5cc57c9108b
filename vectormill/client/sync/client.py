# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Client: Vectormill's HTTP interface as a Python object with coroutines."""

from vectormill.client.sync.collections import CollectionCalls
from vectormill.client.sync.jobs import JobCalls
from vectormill.client.sync.searches import SearchCalls
from vectormill.client.sync.sources import RunCalls, ScheduleCalls, SourceCalls
from vectormill.client.sync.webhooks import WebhookCalls
from vectormill.models import operations as models
from vectormill.models.bodies import ModelBody
from vectormill.workers import operations as workers
from vectormill.workers.bodies import Readiness, WorkerBody


class Client(CollectionCalls, JobCalls, RunCalls, ScheduleCalls, SearchCalls, SourceCalls, WebhookCalls):
    """Speaks to one Vectormill API.

    `api_key` is what `vectormill keys create` printed; else that of VECTORMILL_API_KEY is sent, if there is one.
    `timeout` is in seconds and bounds each wait for the server, not a whole transfer. Every method raises ApiError when
    the API refuses, ApiFailure when it breaks and ApiUnreachable when no answer comes.

    A request that can be repeated without harm is repeated when the API is full (429) or away (502 to 504), or a
    connection that worked before is lost: each pause is about twice as long as the one before and never shorter than
    the API asks for in Retry-After, and all pauses of a call are `retry_seconds` at the most. `pause` is what waiting
    is done with.
    """

    def models(self) -> list[ModelBody]:
        """Return every registered model, and how many workers serve it."""
        return (self.ask(models.LIST))["data"]

    def workers(self) -> list[WorkerBody]:
        """Return every live worker, with what it reports of its devices, its plan and its speed."""
        return (self.ask(workers.LIST))["data"]

    def readiness(self) -> Readiness:
        """Return which parts of the service are reachable. Raise ApiFailure where it cannot work at all."""
        return self.ask(workers.SHOW_READINESS)
