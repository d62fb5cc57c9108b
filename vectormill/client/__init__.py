"""Client: Vectormill's HTTP interface as a Python object. Contains routes, not their implementation.

Answers are the API's JSON objects, unchanged, as dictionaries whose fields are typed. Items are sent and
vectors are received as streams, in constant memory.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit([{"key": "a", "text": "A text."}], collection="docs")
        client.wait(job["id"])
        for vector in client.vectors(job["id"]):
            print(vector["key"], vector["embedding"][:3])

`AsyncClient` has the same methods as coroutines.
"""

from vectormill.client.aio.client import AsyncClient
from vectormill.client.answers import Matches
from vectormill.client.frames import Matrix
from vectormill.client.requests import DEFAULT_URL, is_loopback
from vectormill.client.sync.client import Client
from vectormill.client.sync.exports import Results
from vectormill.client.sync.jobs import EXPORT_FORMATS

__all__ = [
    "DEFAULT_URL",
    "EXPORT_FORMATS",
    "AsyncClient",
    "Client",
    "Matches",
    "Matrix",
    "Results",
    "is_loopback",
]
