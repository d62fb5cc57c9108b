"""A real API server for tests: uvicorn in a thread on a free port, and a stand-in for the workers."""

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.routing import _IncludedRouter
from sqlalchemy import Engine, text

from api.app import ApiServer, create_app
from api.door.hosts import parse_trusted_proxies
from api.limits.gates import Gates
from api.limits.patience import PatientConfig
from tests.database import ask, execute, load_payload
from tests.protocol import claim, complete, dispatch_all
from tests.services import connected_engine, migrated_database
from tests.waiting import repeating
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import find_side_failure
from vectormill.operation import CONFIRMATION
from vectormill.settings import Settings

# Clients read these fields: a release may add fields to a job but must remove none.
JOB_FIELDS = {
    "id", "state", "waiting_because", "model", "collection", "priority", "num_items", "num_done", "num_failed",
    "num_chunks", "num_retried_chunks", "num_tokens", "truncated_items", "num_passages", "num_reused", "num_repeated",
    "created_at", "started_at", "finished_at", "paused_at", "items_per_second", "tokens_per_second", "eta_seconds",
    "padding_waste", "stages", "bound_by", "stage_seconds", "options", "metadata", "twin_of",
}  # fmt: skip
ITEMS: list[dict[str, Any]] = [
    {"key": "a", "text": "one"},
    {"key": "b", "text": "two", "metadata": {"page": 2}},
]
JSON = {"Content-Type": "application/json"}
NDJSON = {"Content-Type": "application/x-ndjson"}
# The stand-in worker makes vectors of eight dimensions.
SMALL = {"dimensions": 8}


def analyse_routes_once() -> None:
    """Cache FastAPI's analysis of each route for all applications of this process.

    FastAPI repeats the analysis for each of the tests' 600 applications, 0.13 s of processor time each. All
    of them include the same routers in the same way, and none overrides a dependency.
    """
    analyse, known = _IncludedRouter._build_effective_context, dict[int, Any]()

    def analyse_once(router: Any, route: Any) -> Any:
        if id(route) not in known:
            known[id(route)] = analyse(router, route)
        return known[id(route)]

    setattr(_IncludedRouter, "_build_effective_context", analyse_once)  # noqa: B010  # the types allow no assignment


analyse_routes_once()


@contextmanager
def serving(app: FastAPI, patience_seconds: int | None = 5) -> Iterator[str]:
    """Serve the application with a real server in a thread; yield its URL.

    At the end the server waits up to `patience_seconds` for open requests, or forever with None.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connections queue here until the server is up
        config = PatientConfig(
            app,
            head_seconds=app.state.resources.settings.body_idle_seconds,
            max_connections=app.state.resources.settings.max_connections,
            asks_users=True,
            forwarded_allow_ips=parse_trusted_proxies(app.state.resources.settings.trusted_proxies),
            log_config=None,
            timeout_graceful_shutdown=patience_seconds,
        )
        server = ApiServer(config, app.state.stop_request)
        thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.handle_exit(signal.SIGTERM, None)
            thread.join()


@contextmanager
def api_client(engine: Engine, **settings: Any) -> Iterator[httpx.Client]:
    """Yield a client of a real API on this engine.

    The client loads no TLS certificates, which would take 20 ms of processor time.
    """
    with counted_client(engine, **settings) as (client, _):
        yield client


@contextmanager
def counted_client(engine: Engine, **settings: Any) -> Iterator[tuple[httpx.Client, Gates]]:
    """Yield a client of a real API, and what that API counts."""
    app = create_app(Settings(**settings), engine)
    with (
        serving(app) as url,
        httpx.Client(base_url=url, timeout=30, trust_env=False, verify=False) as client,
    ):
        yield client, app.state.resources.gates


@contextmanager
def refusing_api(postgres_url: str, **settings: Any) -> Iterator[tuple[httpx.Client, Engine]]:
    """Yield the client and the engine of an API on a new database, for requests that must all be refused.

    Fail at the end if there is a job in the database.
    """
    with (
        migrated_database(postgres_url) as url,
        connected_engine(url) as engine,
        api_client(engine, **settings) as client,
    ):
        yield client, engine
        assert count_jobs(engine) == 0


def encode_waiting(
    engine: Engine, max_text_chars: int = 1_000_000, on_claim: Callable[[Claim], object] = lambda _: None
) -> int:
    """Claim and commit every waiting chunk, as workers would; return the number of dispatched chunks."""
    dispatches = dispatch_all(engine)
    for dispatch in dispatches:
        claimed = claim(engine, dispatch.chunk_id)
        if claimed is None:  # the job was removed or cancelled meanwhile
            continue
        on_claim(claimed)
        items = ask(engine, load_payload, dispatch.chunk_id)
        reasons = {
            position: find_side_failure(item.text, max_text_chars)
            for position, item in enumerate(items)
            if claimed.only_items is None or position in claimed.only_items
        }
        complete(engine, claimed, {position: reason for position, reason in reasons.items() if reason})
    return len(dispatches)


@contextmanager
def client_of_docs(engine: Engine, **settings: Any) -> Iterator[httpx.Client]:
    """Yield a client of a real API on this engine, with a collection `docs` of 20 rows."""
    with api_client(engine, **settings) as client:
        submit(client, many(20), collection="docs")
        encode_waiting(engine)
        yield client


def encoding_meanwhile(
    engine: Engine, on_claim: Callable[[Claim], object] = lambda _: None
) -> AbstractContextManager[None]:
    """Encode waiting chunks in a thread while the block runs; `on_claim` is called with each claim first."""
    return repeating(lambda: encode_waiting(engine, on_claim=on_claim))


def lines(items: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def many(count: int) -> list[dict[str, Any]]:
    return [{"key": f"k{number}", "text": f"text {number}"} for number in range(count)]


def submit(client: httpx.Client, items: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    # json.dumps, unlike httpx, escapes a lone surrogate.
    content = json.dumps({"items": items, "options": SMALL, **body})
    answer = client.post("/v1/jobs", content=content, headers=JSON)
    assert answer.status_code == 202, answer.text
    job: dict[str, Any] = answer.json()
    return job


def delete(client: httpx.Client, path: str, **parameters: Any) -> httpx.Response:
    """Delete what the path names, which the request names once more."""
    name = path.removesuffix("/source").rpartition("/")[2]
    return client.delete(path, params=parameters, headers={CONFIRMATION: name})


# A pruner would remove the remains of an interrupted upload, so they do not count.
COUNT_JOBS = text("SELECT count(*) FROM vectormill.jobs WHERE state <> 'deleting'")


def count_jobs(engine: Engine) -> int:
    return int(execute(engine, COUNT_JOBS).scalar_one())


def assert_problem(answer: httpx.Response, status: int, code: str, *said: str) -> dict[str, Any]:
    problem: dict[str, Any] = answer.json()
    assert answer.status_code == problem["status"] == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["type"] == f"https://vectormill.dev/problems/{code}"
    for part in said:
        assert part in problem["detail"]
    return problem
