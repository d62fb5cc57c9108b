"""Resources that the routes need, created once by the composition root, and dependencies that parse paths."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated
from uuid import UUID

import redis
from fastapi import Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine, TextClause

from api.intake.puts import Puts
from api.limits.gates import Gates
from api.metrics import ApiMetrics
from api.queries import QueryExchange
from api.search_pool import LiveGenerations, SearchPool
from api.watch import Watch
from vectormill.collections.collection import COLLECTION_NAME
from vectormill.db.short_ids import find_by_prefix
from vectormill.domain.errors import CollectionNotFound, JobNotFound, NotFound
from vectormill.jobs.jobs import LIST_JOBS_BY_ID
from vectormill.jobs.operations import JobBody
from vectormill.models.registry import Registry
from vectormill.settings import Settings


@dataclass(frozen=True, slots=True)
class Resources:
    """The shared objects of an API process.

    `redis` is None if no Redis is configured. `is_stopping` returns True once endless streams should end.
    """

    settings: Settings
    engine: Engine
    searches: SearchPool
    registry: Registry
    redis: redis.Redis | None
    queries: QueryExchange
    generations: LiveGenerations
    metrics: ApiMetrics
    gates: Gates
    watch: Watch[UUID, JobBody]
    puts: Puts
    is_stopping: Callable[[], bool]


# These never block. FastAPI would run a function that is not async on a thread, which takes a tenth of a
# millisecond.
async def get_resources(request: Request) -> Resources:
    resources: Resources = request.app.state.resources
    return resources


async def find_id(resources: Resources, statement: TextClause, written: str, missing: type[NotFound]) -> UUID:
    """Return the id that was written whole, or as a beginning that the database completes. Raise `missing`."""
    try:
        return UUID(written)
    except ValueError:
        return await run_in_threadpool(find_by_prefix, resources.engine, statement, written, missing)


def parse_collection_name(name: str) -> str:
    """Return the name. Raise CollectionNotFound if no collection can have it."""
    if not COLLECTION_NAME.fullmatch(name):
        raise CollectionNotFound(f"There is no collection {name!r}: this is not a valid collection name.")
    return name


async def take_collection_name(
    name: Annotated[str, Path(description="The collection's name.")],
) -> str:
    """Return the collection's name in the path. Raise CollectionNotFound."""
    return parse_collection_name(name)


ResourcesDependency = Annotated[Resources, Depends(get_resources)]


async def take_job_id(
    resources: ResourcesDependency,
    job_id: Annotated[str, Path(description="The job's id, a UUID, or its first digits, at least eight.")],
) -> UUID:
    """Return the id of the job in the path. Raise JobNotFound."""
    return await find_id(resources, LIST_JOBS_BY_ID, job_id, JobNotFound)


JobId = Annotated[UUID, Depends(take_job_id)]
CollectionName = Annotated[str, Depends(take_collection_name)]
