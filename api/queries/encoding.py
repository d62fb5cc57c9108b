"""Queries: texts of searches become vectors, on the same workers as everything else and before bulk."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine

from api.dependencies import Resources
from api.queries.exchange import NobodyListens, QueryExchange
from api.queries.lanes import Answered
from api.queries.query_jobs import encode_by_job
from vectormill.db.jobs.waiting import explain_query_wait
from vectormill.db.workers import has_worker_without_queries
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingSpec
from vectormill.domain.errors import EncodingTimeout, InvalidItem, Unavailable
from vectormill.domain.jobs.item import find_text_failure
from vectormill.settings import Settings

# Between two looks for a worker that takes queries, while there is none.
ABSENCE_SECONDS: Final = 0.25


def check_query(text: str, place: str, settings: Settings, *, what: str = "query") -> None:
    """Raises InvalidItem when the text can have no result; the message opens with the place of the query."""
    failure = find_text_failure(text.encode("utf-8", "surrogatepass"), settings.max_text_chars)
    if failure is not None:
        raise InvalidItem(f"{place}The {what} cannot be encoded: {failure.detail}.")


async def encode_queries(
    resources: Resources, spec: EncodingSpec, texts: Sequence[str]
) -> list[npt.NDArray[np.float32]]:
    """The vectors of checked queries, each float32 [dimensions], in the space of `spec`; of all together.

    Raises InvalidItem when a text can have no vector, EncodingTimeout when no worker answers in time, and QueryLost.
    """
    different = list(dict.fromkeys(texts))
    if resources.registry.is_read(spec.model):
        query_spec = make_query_spec(resources, spec)
    else:
        query_spec = await run_in_threadpool(make_query_spec, resources, spec)
    vectors = await encode_texts(resources, query_spec, [text.encode() for text in different])
    by_text = dict(zip(different, vectors, strict=True))
    return [by_text[text] for text in texts]


async def encode_texts(
    resources: Resources, spec: EncodingSpec, texts: Sequence[bytes]
) -> npt.NDArray[np.float32]:
    """What the spec's task makes of each text or pair, float32 [texts, spec.dimensions]. Raises as encode_queries."""
    answered = await answer_texts(resources, spec, texts)
    for reason in answered.failures.values():
        raise InvalidItem(f"The query cannot be encoded: {reason}.")
    return answered.vectors


async def answer_texts(resources: Resources, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
    """The same, with what is told of the texts. Raises EncodingTimeout and QueryLost."""
    if resources.queries is None:
        return await encode_by_job(resources, spec, texts, resources.settings.search_timeout_seconds)
    return await encode_by_message(resources, resources.queries, spec, texts)


def make_query_spec(resources: Resources, spec: EncodingSpec) -> EncodingSpec:
    """The collection's own spec, with the prompt that its model has for queries; a long query is never refused.

    A query is a vector of floats, whatever type the collection keeps.
    """
    prompts = resources.registry.card(spec.model).prompts
    long_texts = TRUNCATE if spec.long_texts == FAIL else spec.long_texts
    return replace(spec, prompt=prompts.get("query", spec.prompt), long_texts=long_texts, vector_type=None)


async def encode_by_message(
    resources: Resources, queries: QueryExchange, spec: EncodingSpec, texts: Sequence[bytes]
) -> Answered:
    """While no worker takes queries it waits for one, and where only workers of an earlier
    release live, a job is submitted.
    """
    loop = asyncio.get_running_loop()
    timeout = resources.settings.search_timeout_seconds
    deadline = loop.time() + timeout
    while True:
        try:
            return await queries.ask(spec, texts, deadline)
        except NobodyListens:
            if await run_in_threadpool(is_served_by_jobs, resources.engine, spec):
                return await encode_by_job(resources, spec, texts, deadline - loop.time())
        except TimeoutError:
            break
        if resources.is_stopping():
            raise Unavailable("The API is stopping; send the query again.")
        await asyncio.sleep(min(ABSENCE_SECONDS, max(deadline - loop.time(), 0.0)))
    reason = await run_in_threadpool(explain_query, resources.engine, spec)
    raise EncodingTimeout(f"No worker encoded the query within {timeout:g} s. {reason}")


def is_served_by_jobs(engine: Engine, spec: EncodingSpec) -> bool:
    with engine.connect() as connection:
        return has_worker_without_queries(connection, spec.model)


def explain_query(engine: Engine, spec: EncodingSpec) -> str:
    """Why the query was not answered, in the words of a job that waits."""
    with engine.connect() as connection:
        reason = explain_query_wait(connection, spec)
    return (
        reason or f"Its worker is slow or busy with other queries; see `vectormill status` for {spec.model}."
    )
