"""Queries: texts of searches become vectors on the same workers, as a small job that nobody else waits behind."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final
from uuid import UUID

import anyio
import numpy as np
import numpy.typing as npt
from anyio import CancelScope
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from api.dependencies import Resources
from vectormill.db.jobs.export import read_vectors
from vectormill.db.jobs.jobs import delete_job, find_job, list_item_errors
from vectormill.db.jobs.submission import JobWriter
from vectormill.db.jobs.waiting import explain_waits
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingSpec
from vectormill.domain.errors import EncodingTimeout, InvalidItem, Unavailable
from vectormill.domain.jobs.item import Item, find_text_failure
from vectormill.domain.jobs.job import INTERACTIVE_PRIORITY, Job, NewJob
from vectormill.settings import Settings

# A worker that waits for work answers within tens of milliseconds; a poll costs a quarter of one.
FIRST_POLL_SECONDS: Final = 0.005
LAST_POLL_SECONDS: Final = 0.025
# After its time-out a query is still looked at once, for the reason.
GRACE_SECONDS: Final = 30.0

logger = logging.getLogger(__name__)


def check_query(text: str, place: str, settings: Settings) -> None:
    """Raises InvalidItem when the text can have no vector; the message opens with the place of the query."""
    failure = find_text_failure(text.encode("utf-8", "surrogatepass"), settings.max_text_chars)
    if failure is not None:
        raise InvalidItem(f"{place}The query cannot be encoded: {failure.detail}.")


async def encode_queries(
    resources: Resources, spec: EncodingSpec, texts: Sequence[str]
) -> list[npt.NDArray[np.float32]]:
    """The vectors of checked queries, each float32 [dimensions], in the space of `spec`; of all by one job.

    Raises InvalidItem when a text can have no vector, and EncodingTimeout when no worker answers in time.
    """
    settings, engine = resources.settings, resources.engine
    different = list(dict.fromkeys(texts))
    query_spec = await run_in_threadpool(make_query_spec, resources, spec)
    job = await run_in_threadpool(submit_queries, engine, settings, query_spec, different)
    try:
        ended = await wait_for_end(resources, job)
        vectors = await run_in_threadpool(load_query_vectors, engine, ended)
    finally:
        with CancelScope(shield=True):
            await run_in_threadpool(remove_query, engine, job.id)
    by_text = dict(zip(different, vectors, strict=True))
    return [by_text[text] for text in texts]


def make_query_spec(resources: Resources, spec: EncodingSpec) -> EncodingSpec:
    """The collection's own spec, with the prompt that its model has for queries; a long query is never refused.

    A query is a vector of floats, whatever type the collection keeps.
    """
    prompts = resources.registry.card(spec.model).prompts
    long_texts = TRUNCATE if spec.long_texts == FAIL else spec.long_texts
    return replace(spec, prompt=prompts.get("query", spec.prompt), long_texts=long_texts, vector_type=None)


def submit_queries(engine: Engine, settings: Settings, spec: EncodingSpec, texts: Sequence[str]) -> Job:
    lifetime_seconds = settings.search_timeout_seconds + GRACE_SECONDS
    new_job = NewJob(spec, priority=INTERACTIVE_PRIORITY, lifetime_seconds=lifetime_seconds)
    with JobWriter(engine, new_job, settings) as writer:
        for number, text in enumerate(texts):
            writer.add(Item(str(number), text.encode()))
        return writer.finish()


async def wait_for_end(resources: Resources, job: Job) -> Job:
    """The job when it has ended. Raises EncodingTimeout, and Unavailable when the API itself stops."""
    timeout = resources.settings.search_timeout_seconds
    deadline = time.monotonic() + timeout
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


def load_query_vectors(engine: Engine, job: Job) -> list[npt.NDArray[np.float32]]:
    """The vectors of ended queries. Raises InvalidItem with the worker's reason when one has none."""
    vectors: list[npt.NDArray[np.float32]] = []
    for block in read_vectors(engine, job.id):
        if not block.present.all():
            break
        vectors.extend(block.vectors)
    if len(vectors) == job.num_items:
        return vectors
    with engine.connect() as connection:
        errors = list_item_errors(connection, job.id, after=None, limit=1)
    reason = errors[0].detail if errors else f"its job is {job.state}"
    raise InvalidItem(f"The query cannot be encoded: {reason}.")


def remove_query(engine: Engine, job_id: UUID) -> None:
    """Removes the query's job, and its text with it. When that fails the pruner does it within two minutes."""
    try:
        with engine.begin() as connection:
            delete_job(connection, job_id)
    except SQLAlchemyError as error:
        logger.warning("The query job %s stays until the pruner comes by: %s", job_id, error)
