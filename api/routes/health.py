"""Health: whether this process lives, whether it can serve, and what it counts."""

import logging

import redis
from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy.exc import SQLAlchemyError

from api.dependencies import Resources, ResourcesDependency
from api.problems import RETRY_AFTER_SECONDS
from api.schemas import Liveness, Readiness, ScheduleHealth
from vectormill.db.runs.schedules import count_schedules
from vectormill.db.workers import INDEXER, SCHEDULER, count_workers, list_signs_of_life

router = APIRouter(tags=["health"])

logger = logging.getLogger(__name__)


@router.get("/livez")
async def get_livez() -> Liveness:
    """Answers as long as the process does."""
    return Liveness(status="ok")


@router.get("/readyz", response_model=Readiness, responses={503: {"model": Readiness}})
def get_readyz(resources: ResourcesDependency) -> JSONResponse:
    """Ready while Postgres is: without Redis jobs are taken as always, and are encoded when it is back."""
    readiness = check_readiness(resources)
    is_ready = readiness.postgres
    return JSONResponse(
        readiness.model_dump(),
        status_code=200 if is_ready else 503,
        headers={} if is_ready else {"Retry-After": str(RETRY_AFTER_SECONDS)},
    )


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
def get_metrics(resources: ResourcesDependency) -> Response:
    """Prometheus text."""
    return Response(generate_latest(resources.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def check_readiness(resources: Resources) -> Readiness:
    has_redis = is_redis_there(resources.doorbell)
    try:
        with resources.engine.connect() as connection:
            num_workers = sum(count_workers(connection).values())
            signs = list_signs_of_life(connection)
            counts = count_schedules(connection)
    except SQLAlchemyError as error:
        logger.warning("Not ready, for Postgres did not answer: %s", error)
        return Readiness(
            status="unavailable",
            postgres=False,
            redis=has_redis,
            workers=0,
            scheduler=False,
            indexer=False,
            schedules=None,
        )
    return Readiness(
        status="ok" if has_redis else "degraded",
        postgres=True,
        redis=has_redis,
        workers=num_workers,
        scheduler=SCHEDULER in signs,
        indexer=INDEXER in signs,
        schedules=ScheduleHealth(
            schedules=counts.num_schedules,
            paused=counts.num_paused,
            failing=counts.num_failing,
            overdue=counts.num_overdue,
        ),
    )


def is_redis_there(doorbell: redis.Redis | None) -> bool:
    if doorbell is None:
        return False
    try:
        return bool(doorbell.ping())
    except (redis.RedisError, OSError) as error:
        logger.warning("Redis did not answer: %s", error)
        return False
