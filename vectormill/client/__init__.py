"""Client: Vectormill's HTTP interface as a Python object. Knows the routes, not how they are served.

Answers are the API's JSON objects, unchanged, as dictionaries. Items go out and vectors come in as
streams, in constant memory.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit([{"key": "a", "text": "A text."}], collection="docs")
        client.wait(job["id"])
        for vector in client.vectors(job["id"]):
            print(vector["key"], vector["embedding"][:3])
"""

from vectormill.client.nouns.collections import CollectionCalls
from vectormill.client.nouns.generations import GenerationCalls
from vectormill.client.nouns.indexes import IndexCalls
from vectormill.client.nouns.items import ItemCalls
from vectormill.client.nouns.jobs import EXPORT_FORMATS, JobCalls
from vectormill.client.nouns.runs import RunCalls
from vectormill.client.nouns.schedules import ScheduleCalls
from vectormill.client.nouns.searches import Matches, SearchCalls
from vectormill.client.nouns.service import ServiceCalls
from vectormill.client.nouns.sources import SourceCalls
from vectormill.client.transport import DEFAULT_URL, is_loopback

__all__ = ["DEFAULT_URL", "EXPORT_FORMATS", "Client", "Matches", "is_loopback"]


class Client(
    CollectionCalls,
    GenerationCalls,
    IndexCalls,
    ItemCalls,
    JobCalls,
    RunCalls,
    ScheduleCalls,
    SearchCalls,
    ServiceCalls,
    SourceCalls,
):
    """Speaks to one Vectormill API.

    `api_key` is what `vectormill keys create` printed; else that of VECTORMILL_API_KEY is sent, if there is one.
    `timeout` is in seconds and bounds each wait for the server, not a whole transfer. `pause` is what
    waiting is done with. Every method raises ApiError when the API refuses, ApiFailure when it breaks and
    ApiUnreachable when no answer comes. A request that can be repeated without harm is repeated for about
    six seconds when the API is full (429) or away (502 to 504), or a connection that worked before is lost.
    """
