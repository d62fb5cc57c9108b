"""Metrics: what Prometheus reads from the API: its own requests, and the backlog as Postgres knows it."""

import logging
import time
from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.metrics.collection_metrics import MAX_COLLECTIONS, describe_collections
from api.metrics.duty_metrics import describe_duties
from api.metrics.query_metrics import QueryMetrics
from api.metrics.queue_metrics import describe_queues
from api.metrics.schedule_metrics import describe_schedules
from api.metrics.webhook_metrics import describe_webhooks
from api.metrics.worker_metrics import describe_workers
from vectormill.collections.descriptions import list_collection_rows
from vectormill.db.short_locks import limit_time
from vectormill.jobs.backlog import list_waiting
from vectormill.schedules.schedules import list_schedules
from vectormill.webhooks.webhooks import count_deliveries
from vectormill.workers.workers import count_backlog, count_open_jobs, list_signs_of_life, list_workers

# A scrape that Postgres cannot answer in this time answers without the backlog.
SCRAPE_SECONDS: Final = 2.0
# Series of a scrape; more schedules than that are not shown.
MAX_SCHEDULES: Final = 1000
# From a status poll to an upload of ten million items.
REQUEST_SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)

logger = logging.getLogger(__name__)


class ApiMetrics:
    """One application's metrics, in a registry of their own: two applications in one process do not collide."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "vectormill_http_requests_total",
            "Requests; `route` is the template, never an id.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "vectormill_http_request_seconds",
            "Time from the first byte of a request to the last of its answer.",
            ["method", "route"],
            buckets=REQUEST_SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.submitted_jobs = Counter(
            "vectormill_submitted_jobs_total", "Jobs accepted by this process.", registry=self.registry
        )
        self.submitted_items = Counter(
            "vectormill_submitted_items_total",
            "Items of the jobs accepted by this process.",
            registry=self.registry,
        )
        self.queries = QueryMetrics(self.registry)
        self.registry.register(BacklogCollector(engine))


class BacklogCollector:
    """Reads chunks and workers from Postgres at the moment of the scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        is_up = GaugeMetricFamily(
            "vectormill_database_up",
            "1 when Postgres answered this scrape; without it there is no backlog to show.",
        )
        jobs = GaugeMetricFamily(
            "vectormill_jobs",
            "Jobs that are not ended; state paused shows those that somebody forgot.",
            labels=["model", "state"],
        )
        chunks = GaugeMetricFamily(
            "vectormill_chunks",
            "Chunks that are not ended, those of paused jobs with them.",
            labels=["model", "state"],
        )
        try:
            with self._engine.begin() as connection:
                limit_time(connection, SCRAPE_SECONDS)
                backlog, live_workers = count_backlog(connection), list_workers(connection)
                open_jobs, queues = count_open_jobs(connection), list_waiting(connection)
                signs = list_signs_of_life(connection)
                schedules = list_schedules(connection, limit=MAX_SCHEDULES)
                collections = list_collection_rows(connection, after=None, limit=MAX_COLLECTIONS)
                webhooks = count_deliveries(connection)
        except SQLAlchemyError as error:
            logger.warning("The scrape has no backlog, for Postgres did not answer: %s", error)
            is_up.add_metric([], 0)
            return [is_up]
        is_up.add_metric([], 1)
        for entry in backlog:
            chunks.add_metric([entry.model, entry.state], entry.num_chunks)
        for group in open_jobs:
            jobs.add_metric([group.model, group.state], group.num_jobs)
        return [
            is_up,
            jobs,
            chunks,
            *describe_duties(signs),
            *describe_queues(queues),
            *describe_workers(live_workers),
            *describe_schedules(schedules),
            *describe_collections(collections),
            *describe_webhooks(webhooks),
        ]


class RequestMetrics:
    """ASGI middleware that counts every request. It adds nothing to a body's way, so streams stay streams."""

    def __init__(self, app: ASGIApp, metrics: ApiMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500  # what the server answers when the application raises

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        start = time.perf_counter()
        try:
            await self._app(scope, receive, note_status)
        finally:
            # The template, never the path: ids in labels would make a series per job.
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.requests.labels(scope["method"], route, str(status)).inc()
            self._metrics.request_seconds.labels(scope["method"], route).observe(time.perf_counter() - start)
