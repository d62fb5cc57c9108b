"""Encode every waiting chunk as a worker does, with a real engine and without Celery."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import Engine

from tests.protocol import dispatch_all
from vectormill.settings import Settings
from worker.chunk.chunk_encoder import ChunkEncoder
from worker.chunk.commit import PostgresSink
from worker.chunk.leases import LeaseKeeper
from worker.chunk.ledger import Timesheet
from worker.engine.engine import Engine as EncodingEngine
from worker.identity import WorkerIdentity


def encode_all(database: Engine, model: EncodingEngine, model_name: str) -> list[str]:
    """Encode every waiting chunk; return the outcome of each."""
    identity = WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), model_name, slots=4)
    keeper = LeaseKeeper(database, identity, dict, heartbeat_seconds=5, lease_seconds=30)
    sink, timesheet = PostgresSink(database, threading.Event()), Timesheet(lambda: 0.0)
    encoder = ChunkEncoder(database, model, keeper, sink, timesheet, identity, Settings())
    keeper.start()
    try:
        return [encoder.encode_chunk(each.chunk_id)["outcome"] for each in dispatch_all(database)]
    finally:
        keeper.stop()


@contextmanager
def working(database: Engine, model: EncodingEngine, model_name: str) -> Iterator[None]:
    """Run a worker in a thread for as long as the block runs."""
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.wait(0.05):
            encode_all(database, model, model_name)

    thread = threading.Thread(target=serve, name="worker")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
