"""An API with a real worker of queries behind it, for the clients that people already have: one for all their tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.models import DEVICE
from tests.queries import SPACE
from tests.services import connected_engine, migrated_database
from tests.waiting import wait_for
from vectormill.broker.queries import QueryConsumer, queue_key
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.engine.engine import Engine as EncodingEngine
from worker.queries import QueryListener
from worker.settings import WorkerSettings


@dataclass(frozen=True)
class FrontDoor:
    """Its URL, and a plain client of it."""

    url: str
    http: httpx.Client
    engine: Engine


@contextmanager
def open_front_door(postgres_url: str, redis_url: str, cache: Path, **settings: Any) -> Iterator[FrontDoor]:
    """The packaged model encodes queries, in a process of its own as ever; no jobs."""
    worker_settings = WorkerSettings(backend="torch", precision="fp32", threads=1)
    model = EncodingEngine(Registry({}).card(DEFAULT_MODEL, weights=True), DEVICE, worker_settings, cache)
    model.start()
    try:
        listener = QueryListener(QueryConsumer(redis_url, SPACE, "front-door"), model, "front-door")
        listener.start()
        try:
            with Redis.from_url(redis_url) as redis:
                wait_for(lambda: redis.exists(f"{queue_key(SPACE)}:listeners"), because="the worker listens")
            with (
                migrated_database(postgres_url) as database_url,
                connected_engine(database_url) as engine,
                api_client(engine, redis_url=redis_url, **settings) as http,
            ):
                yield FrontDoor(str(http.base_url).rstrip("/"), http, engine)
        finally:
            listener.stop()
    finally:
        model.stop()
