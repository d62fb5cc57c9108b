"""Resources that the routes need, created once by the composition root, and dependencies that parse paths."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final
from uuid import UUID

import redis
from fastapi import Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine, TextClause

from api.intake.puts import Puts
from api.limits.gates import Gates
from api.metrics import ApiMetrics
from api.queries import QueryExchange
from api.searches import SearchPool
from api.watch import Watch
from vectormill.collections.collection import COLLECTION_NAME
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
    metrics: ApiMetrics
    gates: Gates
    watch: Watch[UUID, JobBody]
    puts: Puts
    is_stopping: Callable[[], bool]


# For a page of the console, FastAPI would run a function that is not async on a thread.
async def get_resources(request: Request) -> Resources:
    resources: Resources = request.app.state.resources
    return resources


async def find_id(resources: Resources, statement: TextClause, written: str, missing: type[NotFound]) -> UUID:
    """Return the id that was written whole, or as a beginning that the database completes. Raise `missing`."""
    try:
        return UUID(written)
    except ValueError:
        return await run_in_threadpool(find_by_prefix, resources.engine, statement, written, missing)


def parse_collection_name(name: Annotated[str, Path(description="The collection's name.")]) -> str:
    """Return the name. Raise CollectionNotFound if no collection can have it."""
    if not COLLECTION_NAME.fullmatch(name):
        raise CollectionNotFound(f"There is no collection {name!r}: this is not a valid collection name.")
    return name


ResourcesDependency = Annotated[Resources, Depends(get_resources)]


async def take_job_id(
    resources: ResourcesDependency,
    job_id: Annotated[str, Path(description="The job's id, a UUID, or its first digits, at least eight.")],
) -> UUID:
    """Return the id of the job in the path. Raise JobNotFound."""
    return await find_id(resources, LIST_JOBS_BY_ID, job_id, JobNotFound)


JobId = Annotated[UUID, Depends(take_job_id)]
CollectionName = Annotated[str, Depends(parse_collection_name)]


# Ids are random: of a million records, a given record shares eight digits with another one in 4,300 cases.
LEAST_DIGITS: Final = 8
DIGITS: Final = re.compile(r"[0-9a-f]+")
MOST_NAMED: Final = 5


def find_by_prefix(engine: Engine, statement: TextClause, prefix: str, missing: type[NotFound]) -> UUID:
    """Return the only id that begins with these digits, of those that the statement lists `BETWEEN :least AND :most`.

    Raise `missing` if there is none, if there are several, which the message names, or if the digits are too few.
    """
    digits = prefix.lower().replace("-", "")
    if not DIGITS.fullmatch(digits) or len(digits) >= 32:
        raise missing
    if len(digits) < LEAST_DIGITS:
        raise missing(f"{missing()} Of an id, at least the first {LEAST_DIGITS} digits are needed.")
    ends = {"least": UUID(digits.ljust(32, "0")), "most": UUID(digits.ljust(32, "f")), "limit": MOST_NAMED}
    with engine.connect() as connection:
        found = list(connection.execute(statement, ends).scalars())
    if len(found) > 1:
        raise missing(f"Several ids begin with {prefix}: {', '.join(map(str, found))}. Write more digits.")
    if not found:
        raise missing
    id: UUID = found[0]
    return id
