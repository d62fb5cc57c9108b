"""One API with a real worker for queries, shared by the tests of existing third-party clients."""

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
from tests.queries import SIGNER, SPACE
from tests.services import connected_engine, migrated_database
from tests.waiting import wait_for
from vectormill.broker.queries import QueryConsumer, queue_key
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.engine.engine import Engine as EncodingEngine
from worker.queries import QueryListener
from worker.settings import WorkerSettings


@dataclass(frozen=True)
class FrontDoor:
    """The URL of an API, a plain HTTP client for it, and its database."""

    url: str
    http: httpx.Client
    engine: Engine


@contextmanager
def open_front_door(postgres_url: str, redis_url: str, cache: Path, **settings: Any) -> Iterator[FrontDoor]:
    """Start an API and a worker that encodes queries with the packaged model; yield how to reach the API.

    No worker encodes jobs.
    """
    worker_settings = WorkerSettings(backend="torch", precision="fp32", threads=1)
    model = EncodingEngine(Registry({}).card(DEFAULT_MODEL, weights=True), DEVICE, worker_settings, cache)
    model.start()
    try:
        listener = QueryListener(QueryConsumer(redis_url, [SPACE], "front-door", SIGNER), model, "front-door")
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
