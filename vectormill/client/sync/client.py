# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Client: Vectormill's HTTP interface as a Python object with coroutines. Knows no route itself."""

from vectormill.client.sync.collections.collections import CollectionCalls
from vectormill.client.sync.collections.exports import CollectionExportCalls
from vectormill.client.sync.collections.generations import GenerationCalls
from vectormill.client.sync.collections.indexes import IndexCalls
from vectormill.client.sync.collections.items import ItemCalls
from vectormill.client.sync.collections.runs import RunCalls
from vectormill.client.sync.collections.schedules import ScheduleCalls
from vectormill.client.sync.collections.searches import SearchCalls
from vectormill.client.sync.collections.sources import SourceCalls
from vectormill.client.sync.jobs.exports import JobExportCalls
from vectormill.client.sync.jobs.jobs import JobCalls
from vectormill.client.sync.service import ServiceCalls
from vectormill.client.sync.texts import TextCalls
from vectormill.client.sync.webhooks import WebhookCalls


class Client(
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
