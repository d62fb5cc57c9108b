"""Health: the liveness, the readiness and the metrics of this process."""

import asyncio
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import redis
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from api.dependencies import Resources, ResourcesDependency
from api.problems import RETRY_AFTER_SECONDS
from api.serving import respond, serve
from vectormill.schedules.schedules import count_schedules
from vectormill.workers import operations
from vectormill.workers.operations import Liveness, Readiness, Root, ScheduleHealth
from vectormill.workers.workers import (
    INDEXER,
    SCHEDULER,
    count_failing_workers,
    count_workers,
    list_signs_of_life,
)

router = APIRouter(tags=["health"])

FRESH_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


@router.head("/", include_in_schema=False, response_model=None)
@serve(router, operations.SHOW_ROOT)
async def get_root() -> Root:
    """Return where to find what; a browser without an API key is led to the console instead."""
    return Root(
        name="Vectormill",
        console="/console",
        reference="/docs",
        openapi="/openapi.json",
        readiness="/readyz",
    )


@serve(router, operations.SHOW_LIVENESS)
async def get_livez() -> Liveness:
    """Respond as long as the process is alive."""
    return Liveness(status="ok")


class ReadinessCheck:
    """A readiness check that runs at most once a second, however many requests come, on a separate thread.

    Requests for it need no key, so they must not slow down those that have one.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lookout")
        self._lock = asyncio.Lock()
        self._looked_at = -math.inf
        self._seen: Readiness | None = None

    async def look(self) -> Readiness:
        """Return the readiness as of at most FRESH_SECONDS ago.

        Requests that come during a check share its result.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._seen is None or loop.time() - self._looked_at >= FRESH_SECONDS:
                seen = await loop.run_in_executor(self._thread, check_readiness, self._resources)
                self._seen, self._looked_at = seen, loop.time()
            return self._seen

    def close(self) -> None:
        self._thread.shutdown()


@serve(router, operations.SHOW_HEALTH)
@serve(router, operations.SHOW_READINESS)
async def get_readyz(request: Request) -> Response:
    """Report whether the service is ready, as it is while Postgres is.

    Without Redis, jobs are accepted as always, and encoded once it is back.
    """
    readiness: Readiness = await request.app.state.lookout.look()
    if readiness["postgres"]:
        return respond(operations.SHOW_READINESS, readiness)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return respond(operations.SHOW_READINESS, readiness, status=503, headers=headers)


@serve(router, operations.SHOW_METRICS)
def get_metrics(resources: ResourcesDependency) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(generate_latest(resources.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def check_readiness(resources: Resources) -> Readiness:
    has_redis = is_redis_there(resources.redis)
    try:
        with resources.engine.connect() as connection:
            num_workers = sum(count_workers(connection).values())
            num_failing = count_failing_workers(connection)
            signs = list_signs_of_life(connection)
            counts = count_schedules(connection)
    except SQLAlchemyError as error:
        logger.warning("Not ready, because Postgres did not answer: %s", error)
        return Readiness(
            status="unavailable",
            postgres=False,
            redis=has_redis,
            workers=0,
            failing_workers=0,
            scheduler=False,
            indexer=False,
            schedules=None,
        )
    return Readiness(
        status="ok" if has_redis else "degraded",
        postgres=True,
        redis=has_redis,
        workers=num_workers,
        failing_workers=num_failing,
        scheduler=SCHEDULER in signs,
        indexer=INDEXER in signs,
        schedules=ScheduleHealth(
            schedules=counts.num_schedules,
            paused=counts.num_paused,
            failing=counts.num_failing,
            overdue=counts.num_overdue,
        ),
    )


def is_redis_there(client: redis.Redis | None) -> bool:
    if client is None:
        return False
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError) as error:
        logger.warning("Redis did not answer: %s", error)
        return False
