"""Helpers for tests of request batches: lines, the official client, and an indexer's work done at once."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from sqlalchemy import Engine

from indexer.loops import keep_next
from tests.api_server import encode_waiting
from tests.database import execute
from vectormill.models.registry import Registry
from vectormill.settings import Settings

MODEL = "all-MiniLM-L6-v2"
# The stand-in worker makes vectors of eight dimensions.
DIMENSIONS = 8


def line(custom_id: object, given: Any, /, url: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "input": given, "dimensions": DIMENSIONS} | body
    return {"custom_id": str(custom_id), "method": "POST", "url": url, "body": asked}


def write(*lines: Any) -> bytes:
    """Return lines as the bytes of a file: bytes are taken as they are, other objects as JSON."""
    return b"".join(
        (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n" for each in lines
    )


@contextmanager
def official_client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    """Yield OpenAI's client, unchanged but for base_url and key.

    It loads no TLS certificates, which would take processor time.
    """
    with openai.OpenAI(
        base_url=f"{http.base_url}/v1",
        api_key="none",
        http_client=openai.DefaultHttpxClient(trust_env=False, verify=False),
    ) as client:
        yield client


def keep_all(engine: Engine, owner: str = "test", **settings: Any) -> int:
    """Do the batch work of indexers until none is left; return the number of steps."""
    chosen, num_steps = Settings(**settings), 0
    while keep_next(engine, chosen, Registry(chosen.models), owner, threading.Event()):
        num_steps += 1
    return num_steps


def finish(engine: Engine) -> None:
    """Do all work of indexers and workers until no batch and no chunk waits."""
    keep_all(engine)
    while encode_waiting(engine):
        keep_all(engine)
    keep_all(engine)


def create(client: openai.OpenAI, content: bytes, **wanted: Any) -> openai.types.Batch:
    """Upload a file and create a batch of it."""
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    asked: dict[str, Any] = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
    return client.batches.create(input_file_id=file.id, **asked | wanted)


def load_file(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a batch's file, and check that its size is as reported."""
    assert file_id is not None
    content = client.files.content(file_id).content
    assert len(content) == client.files.retrieve(file_id).bytes
    assert client.files.content(file_id).content == content
    return [json.loads(each) for each in content.splitlines()]


def end_leases(engine: Engine) -> None:
    """End the leases of all batches, as if their owners had been killed long ago."""
    execute(engine, "UPDATE vectormill.request_batches SET lease_until = now(), available_at = now()")
