"""The composition root of the HTTP interface: the one place where engines, pools and guards are created."""

import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, Final

import msgspec
import pyarrow
import uvicorn
from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.openapi.utils import get_openapi
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from api.console.guard import ConsoleGuard, is_for_people
from api.console.routes import CONSOLE_ROUTERS, make_console
from api.dependencies import Resources
from api.door.admission import AdmissionControl
from api.door.hosts import parse_allowed_hosts, parse_trusted_proxies
from api.door.keys import KeyGuard
from api.door.machine import MachineUsers
from api.door.observer import RequestObserver
from api.door.scopes import OPERATIONS, find_scope
from api.intake.puts import Puts
from api.limits.gates import Gates
from api.limits.patience import PatientConfig
from api.metrics import ApiMetrics
from api.openai import routes as openai_routes
from api.problems import MEDIA_TYPE, PROBLEM_EXAMPLE, ProblemBody, register_handlers
from api.queries import QueryExchange
from api.routes import (
    batches,
    collections,
    health,
    items,
    jobs,
    models,
    results,
    runs,
    schedules,
    searches,
    sources,
    webhooks,
)
from api.searches import SEARCH_CONNECTIONS, SearchPool
from api.serving import REFERENCE, find_types
from api.watch import Watch
from vectormill.batches.endpoints import INPUT_SCHEMA
from vectormill.broker.doorbell import connect
from vectormill.db.session import make_engine
from vectormill.jobs.jobs import is_model_in_use
from vectormill.keys.api_keys import Keyring, require_key_beyond_loopback
from vectormill.keys.own_key import OPEN_TO_ALL
from vectormill.models.registry import open_registry
from vectormill.processes.garbage import collect_seldom
from vectormill.search.operations import ONE_OR_MANY, ONE_QUERY
from vectormill.settings import Settings

GRACEFUL_SHUTDOWN_SECONDS: Final = 10
# Connections that stay open, and more that are opened under load. With those of the search pool, an
# API process has at most ten. Requests beyond that wait for a connection.
POOL_SIZE: Final = 4
POOL_OVERFLOW: Final = 3
# How old the state of a job may be that a client follows.
FOLLOW_SECONDS: Final = 0.5
KEY_SCHEME: Final = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key created by `vectormill keys create NAME`. Required once one exists; before "
    "that, the user who runs an API on the loopback needs none.",
}
DESCRIPTION: Final = (
    "Text in, vectors out, in bulk. Every error is a problem details object (RFC 9457) with a stable `type`."
)
PROBLEM_ANSWERS: Final[dict[int | str, dict[str, Any]]] = {
    status: {
        "description": "Problem details (RFC 9457).",
        "content": {MEDIA_TYPE: {"schema": {"$ref": REFERENCE.format(name="ProblemBody")}}},
    }
    for status in ("4XX", "5XX", 422)
}

logger = logging.getLogger(__name__)


def create_app(settings: Settings, engine: Engine | None = None) -> FastAPI:
    """Create the application. Raise ConfigurationError.

    If an engine is passed in, the caller must dispose of it.
    """
    own_engine = None
    if engine is None:
        engine = own_engine = make_engine(
            settings.need("database_url"),
            application_name="vectormill-api",
            pool_size=POOL_SIZE,
            max_overflow=POOL_OVERFLOW,
        )
    stop_request = threading.Event()  # set when the server has to stop; endless streams check it and end
    resources = make_resources(settings, engine, stop_request.is_set)
    resources.registry.warm()  # while the routes are made

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await resources.puts.close()
        await resources.queries.close()
        if resources.redis is not None:
            await run_in_threadpool(resources.redis.close)
        await run_in_threadpool(resources.searches.close)
        await run_in_threadpool(lookout.close)
        if own_engine is not None:
            await run_in_threadpool(own_engine.dispose)

    app = FastAPI(
        title="Vectormill",
        description=DESCRIPTION,
        version=find_version(),
        lifespan=lifespan,
        responses=PROBLEM_ANSWERS,
        docs_url=None,  # FastAPI's pages load scripts from the internet
        redoc_url=None,
        # A client that removes `..` from the path of an item would be led to what contains the item.
        redirect_slashes=False,
    )
    app.state.resources = resources
    app.state.lookout = lookout = health.ReadinessCheck(resources)
    app.state.stop_request = stop_request
    for router in (
        openai_routes.router,  # routers are tried in this order, so the most frequent requests come first
        searches.router,
        jobs.router,
        results.router,
        openai_routes.rerank_router,
        openai_routes.other_router,
        collections.router,
        items.router,
        schedules.router,
        sources.router,
        runs.router,
        batches.router,
        models.router,
        webhooks.router,
        health.router,
        collections.index_router,
        batches.file_router,
        sources.quote_router,
        *CONSOLE_ROUTERS,
    ):
        app.include_router(router)
    register_handlers(app)
    add_middlewares(app, settings, resources)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]  # FastAPI's documented way to extend it
    # All routes are built now, so that the first request does not wait for it. Two applications of one process must
    # not do so at the same time, as tests could: they share the routers, and pydantic fails.
    for route in app.routes:
        route.matches({"type": "http", "method": "GET", "path": "", "root_path": "", "headers": []})
    return app


def add_middlewares(app: FastAPI, settings: Settings, resources: Resources) -> None:
    """Add the request observer as the outermost middleware, and admission control inside it."""
    keyring = Keyring(resources.engine, settings.max_requests + settings.max_logins)
    machine = MachineUsers(settings)
    app.state.machine = machine
    app.state.console, app.state.keyring = make_console(app.version), keyring
    app.add_middleware(
        AdmissionControl,
        settings=settings,
        gates=resources.gates,
        hosts=parse_allowed_hosts(settings.api_host, settings.allowed_hosts),
        keys=KeyGuard(keyring, machine, settings),
        pages=functools.partial(
            ConsoleGuard,
            console=app.state.console,
            keyring=keyring,
            machine=machine,
            hsts_seconds=settings.hsts_seconds,
        ),
        is_for_people=is_for_people,
    )
    app.add_middleware(RequestObserver, metrics=resources.metrics)


def make_resources(settings: Settings, engine: Engine, is_stopping: Callable[[], bool]) -> Resources:
    metrics = ApiMetrics(engine)
    registry = open_registry(settings, is_in_use=functools.partial(is_model_in_use, engine))
    queries = QueryExchange(settings, engine, registry, metrics.queries, is_stopping)
    # It keeps all connections that it has opened: opening one costs Postgres as much as several searches.
    search_engine = make_engine(
        engine.url.render_as_string(hide_password=False),
        application_name="vectormill-api searches",
        pool_size=SEARCH_CONNECTIONS,
        max_overflow=0,
    )
    return Resources(
        settings=settings,
        engine=engine,
        searches=SearchPool(search_engine, settings, registry, queries),
        registry=registry,
        redis=connect(settings.redis_url) if settings.redis_url else None,
        queries=queries,
        metrics=metrics,
        gates=Gates.of(settings),
        watch=Watch(FOLLOW_SECONDS),
        puts=Puts(engine, settings, is_stopping),
        is_stopping=is_stopping,
    )


def find_version() -> str:
    try:
        return version("vectormill")
    except PackageNotFoundError:  # running from a checkout that is not installed
        return "0"


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, with the msgspec types and the scopes of keys, which FastAPI does not know.

    It is built once.
    """
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, components = msgspec.json.schema_components(
            [ProblemBody, *find_types(OPERATIONS)],
            ref_template=REFERENCE,
        )
        components["EmbeddingsRequest"]["properties"]["input"] = INPUT_SCHEMA
        components["SearchRequest"] |= ONE_OR_MANY
        components["SearchQuery"] |= ONE_QUERY
        components["ProblemBody"]["example"] = PROBLEM_EXAMPLE
        schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
        schema["components"]["securitySchemes"] = {"key": KEY_SCHEME}
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                scope = find_scope(method.upper(), path)
                operation["security"] = [] if scope is None else [{"key": [scope]}]
        app.openapi_schema = schema
    return app.openapi_schema


class ApiServer(uvicorn.Server):
    """A server that ends endless streams as soon as it has to stop, instead of at the graceful time-out."""

    def __init__(self, config: uvicorn.Config, stop_request: threading.Event) -> None:
        super().__init__(config)
        self._stop_request = stop_request

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop_request.set()
        super().handle_exit(sig, frame)


def refuse_to_open_without_key(settings: Settings) -> None:
    """Raise ConfigurationError if other machines could use the API without a key.

    If Postgres is unavailable the API still starts, but admits nobody until it can read the keys.
    """
    try:
        require_key_beyond_loopback(settings.need("database_url"), settings.api_host)
    except SQLAlchemyError as error:
        logger.warning("Cannot determine yet whether an API key exists: %s", error)


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; requests in progress then have ten seconds to end."""
    # pyarrow's own allocator takes 10 MiB more for its first Parquet file than the C library's does.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    refuse_to_open_without_key(settings)
    if settings.open_loopback:
        logger.warning("VECTORMILL_OPEN_LOOPBACK is set: %s.", OPEN_TO_ALL)
    app = create_app(settings)
    collect_seldom()
    config = PatientConfig(
        app,
        head_seconds=settings.body_idle_seconds,
        max_connections=settings.max_connections,
        asks_users=app.state.machine.is_local,
        forwarded_allow_ips=parse_trusted_proxies(settings.trusted_proxies),
        host=settings.api_host,
        port=settings.api_port,
        log_config=None,
        access_log=False,  # /metrics counts requests, and a log line for each status poll would bury the other lines
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
    )
    ApiServer(config, app.state.stop_request).run()
