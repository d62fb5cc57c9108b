"""Encode every waiting chunk as a worker does, with a real engine and without Celery."""

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

from sqlalchemy import Engine

from tests.protocol import dispatch_all
from tests.waiting import repeating
from vectormill.files.roots import ANYWHERE
from vectormill.settings import Settings
from worker.chunk.chunk_encoder import ChunkEncoder
from worker.chunk.commit import PostgresSink
from worker.chunk.counts import Timesheet
from worker.chunk.leases import LeaseKeeper
from worker.identity import WorkerIdentity


def encode_all(database: Engine, model: Any, model_name: str) -> list[str]:
    """Encode every waiting chunk with an engine; return the outcome of each."""
    identity = WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), model_name, slots=4)
    return [result["outcome"] for result in encode_as(identity, database, model)]


def encode_as(
    identity: WorkerIdentity, database: Engine, model: Any, **options: Any
) -> list[Mapping[str, Any]]:
    """Encode every waiting chunk as this worker; return what Flower would show of each."""
    keeper = LeaseKeeper(database, identity, dict, heartbeat_seconds=5, lease_seconds=30)
    sink, timesheet = PostgresSink(database, threading.Event(), output_roots=ANYWHERE), Timesheet(lambda: 0.0)
    encoder = ChunkEncoder(database, model, keeper, sink, timesheet, identity, Settings(), **options)
    keeper.start()
    try:
        return [encoder.encode_chunk(each.chunk_id) for each in dispatch_all(database)]
    finally:
        keeper.stop()


def working(database: Engine, model: Any, model_name: str) -> AbstractContextManager[None]:
    """Run a worker in a thread for as long as the block runs."""
    return repeating(lambda: encode_all(database, model, model_name), 0.05)
