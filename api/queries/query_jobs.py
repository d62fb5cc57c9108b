"""Queries as small jobs that nobody else waits behind: for workers of a release that takes them in no other way."""

import logging
import time
from collections.abc import Sequence
from typing import Final
from uuid import UUID

import anyio
import numpy as np
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from api.dependencies import Resources
from api.queries.exchange import Answered
from vectormill.db.jobs.export import read_vectors
from vectormill.db.jobs.jobs import delete_job, find_job, list_item_errors
from vectormill.db.jobs.submission import JobWriter
from vectormill.db.jobs.waiting import explain_waits
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import EncodingTimeout, Unavailable
from vectormill.domain.jobs.item import Item
from vectormill.domain.jobs.job import INTERACTIVE_PRIORITY, Job, NewJob
from vectormill.settings import Settings

# A worker that waits for work answers within tens of milliseconds; a poll costs a quarter of one.
FIRST_POLL_SECONDS: Final = 0.005
LAST_POLL_SECONDS: Final = 0.025
# After its time-out a query is still looked at once, for the reason.
GRACE_SECONDS: Final = 30.0

logger = logging.getLogger(__name__)


async def encode_by_job(
    resources: Resources, spec: EncodingSpec, texts: Sequence[bytes], seconds: float
) -> Answered:
    """What the texts come to, within so many seconds. Raises EncodingTimeout."""
    settings, engine = resources.settings, resources.engine
    job = await run_in_threadpool(submit_queries, engine, settings, spec, texts)
    try:
        ended = await wait_for_end(resources, job, seconds)
        return await run_in_threadpool(load_answer, engine, ended)
    finally:
        with CancelScope(shield=True):
            await run_in_threadpool(remove_query, engine, job.id)


def submit_queries(engine: Engine, settings: Settings, spec: EncodingSpec, texts: Sequence[bytes]) -> Job:
    lifetime_seconds = settings.search_timeout_seconds + GRACE_SECONDS
    new_job = NewJob(spec, priority=INTERACTIVE_PRIORITY, lifetime_seconds=lifetime_seconds)
    with JobWriter(engine, new_job, settings) as writer:
        for number, text in enumerate(texts):
            writer.add(Item(str(number), text))
        return writer.finish()


async def wait_for_end(resources: Resources, job: Job, seconds: float) -> Job:
    """The job when it has ended. Raises EncodingTimeout, and Unavailable when the API itself stops."""
    timeout = resources.settings.search_timeout_seconds
    deadline = time.monotonic() + seconds
    pause = FIRST_POLL_SECONDS
    while not job.is_terminal:
        if time.monotonic() >= deadline:
            reason = await run_in_threadpool(explain_query, resources.engine, job)
            raise EncodingTimeout(f"No worker encoded the query within {timeout:g} s. {reason}")
        if resources.is_stopping():
            raise Unavailable("The API is stopping; send the query again.")
        await anyio.sleep(pause)
        pause = min(pause + FIRST_POLL_SECONDS, LAST_POLL_SECONDS)
        job = await run_in_threadpool(load_job, resources.engine, job.id)
    return job


def load_job(engine: Engine, job_id: UUID) -> Job:
    with engine.connect() as connection:
        return find_job(connection, job_id)


def explain_query(engine: Engine, job: Job) -> str:
    """Why the query waits, as its job would say."""
    with engine.connect() as connection:
        reasons = explain_waits(connection, [job])
    otherwise = (
        f"Its worker is slow or busy with other queries; see `vectormill status` for {job.spec.model}."
    )
    return reasons.get(job.id, otherwise)


def load_answer(engine: Engine, job: Job) -> Answered:
    """The vectors of ended queries, with the worker's reason where there is none."""
    blocks = list(read_vectors(engine, job.id))
    missing = np.flatnonzero(~np.concatenate([block.present for block in blocks])).tolist()
    failures: dict[int, str] = dict.fromkeys(missing, f"its job is {job.state}")
    if missing:
        with engine.connect() as connection:
            errors = list_item_errors(connection, job.id, after=None, limit=job.num_items)
        failures |= {int(error.key): error.detail for error in errors}
    vectors = np.concatenate([block.vectors for block in blocks])
    return Answered(vectors, failures, job.num_tokens, job.num_truncated)


def remove_query(engine: Engine, job_id: UUID) -> None:
    """Removes the query's job, and its text with it. When that fails the pruner does it within two minutes."""
    try:
        with engine.begin() as connection:
            delete_job(connection, job_id)
    except SQLAlchemyError as error:
        logger.warning("The query job %s stays until the pruner comes by: %s", job_id, error)
