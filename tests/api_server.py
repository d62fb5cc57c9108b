"""A real API server for tests: uvicorn in a thread on a free port, and a stand-in for the workers behind it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from sqlalchemy import Engine

from api.app import create_app
from tests.protocol import claim, complete, dispatch_all
from vectormill.db.payloads import load_payload
from vectormill.domain.item import find_text_failure
from vectormill.settings import Settings


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The application behind a real server; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connections wait here until the server is up
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=5))
        thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def api_client(engine: Engine, **settings: Any) -> Iterator[httpx.Client]:
    """A client of a real API on this engine."""
    with (
        serving(create_app(Settings(**settings), engine)) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


def encode_waiting(engine: Engine, max_text_chars: int = 1_000_000) -> int:
    """What workers do, done at once: every chunk that waits is claimed and committed. The number of chunks."""
    dispatches = dispatch_all(engine)
    for dispatch in dispatches:
        claimed = claim(engine, dispatch.chunk_id)
        if claimed is None:  # its job was removed or cancelled meanwhile
            continue
        with engine.connect() as connection:
            items = load_payload(connection, dispatch.chunk_id)
        reasons = {
            position: find_text_failure(item.text, max_text_chars)
            for position, item in enumerate(items)
            if claimed.only_items is None or position in claimed.only_items
        }
        complete(engine, claimed, {position: reason for position, reason in reasons.items() if reason})
    return len(dispatches)


@contextmanager
def encoding_meanwhile(engine: Engine) -> Iterator[None]:
    """Encodes whatever comes while the block runs."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(0.01):
            encode_waiting(engine)

    thread = threading.Thread(target=work, name="stand-in worker")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
