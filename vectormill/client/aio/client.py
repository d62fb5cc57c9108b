"""AsyncClient: Vectormill's HTTP interface as a Python object with coroutines. Knows no route itself."""

from vectormill.client.aio.collections.collections import CollectionCalls
from vectormill.client.aio.collections.exports import CollectionExportCalls
from vectormill.client.aio.collections.generations import GenerationCalls
from vectormill.client.aio.collections.indexes import IndexCalls
from vectormill.client.aio.collections.items import ItemCalls
from vectormill.client.aio.collections.runs import RunCalls
from vectormill.client.aio.collections.schedules import ScheduleCalls
from vectormill.client.aio.collections.searches import SearchCalls
from vectormill.client.aio.collections.sources import SourceCalls
from vectormill.client.aio.jobs.exports import JobExportCalls
from vectormill.client.aio.jobs.jobs import JobCalls
from vectormill.client.aio.service import ServiceCalls
from vectormill.client.aio.texts import TextCalls
from vectormill.client.aio.webhooks import WebhookCalls


class AsyncClient(
    CollectionCalls,
    CollectionExportCalls,
    GenerationCalls,
    IndexCalls,
    ItemCalls,
    JobCalls,
    JobExportCalls,
    RunCalls,
    ScheduleCalls,
    SearchCalls,
    ServiceCalls,
    SourceCalls,
    TextCalls,
    WebhookCalls,
):
    """Speaks to one Vectormill API.

    `api_key` is what `vectormill keys create` printed; else that of VECTORMILL_API_KEY is sent, if there is one.
    `timeout` is in seconds and bounds each wait for the server, not a whole transfer. Every method raises ApiError when
    the API refuses, ApiFailure when it breaks and ApiUnreachable when no answer comes.

    A request that can be repeated without harm is repeated when the API is full (429) or away (502 to 504), or a
    connection that worked before is lost: each pause is about twice as long as the one before and never shorter than
    the API asks for in Retry-After, and all pauses of a call are `retry_seconds` at the most. `pause` is what waiting
    is done with.
    """
