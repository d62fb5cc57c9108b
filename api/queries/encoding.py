"""Queries: texts of searches become vectors, on the same workers as everything else and before bulk.

The many texts of one request go to workers in parts, so that others come in between, and no message is larger than one
part. Each part has the time of a search for itself: a request of two thousand texts is given up when it makes no
progress, and not because it is long.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Engine

from api.dependencies import Resources
from api.queries.exchange import (
    MAX_BYTES,
    MAX_TEXTS,
    PARTS_AT_ONCE,
    Answered,
    NobodyListens,
)
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingSpec
from vectormill.domain.errors import EncodingTimeout, InvalidItem, Unavailable
from vectormill.jobs.item import find_text_failure
from vectormill.jobs.waiting import explain_query_wait
from vectormill.settings import Settings

# Between two looks for a worker that takes queries, while there is none.
ABSENCE_SECONDS: Final = 0.25
NO_REDIS: Final = (
    "This API knows no Redis, through which the texts of queries go to workers: set VECTORMILL_REDIS_URL to that of "
    "the workers. A search by a vector, or by words alone, needs none."
)


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
    """Encode texts or pairs by the spec's task: float32 [texts, spec.dimensions]. Raise the errors of
    encode_queries.
    """
    return (await answer_all(resources, spec, texts)).vectors


async def answer_all(resources: Resources, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
    """Give what the task makes of the texts, of which none has failed. Raises as encode_queries."""
    answered = await answer_many(resources, spec, texts)
    for reason in answered.failures.values():
        raise InvalidItem(f"The query cannot be encoded: {reason}.")
    return answered


async def answer_many(resources: Resources, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
    """Answer any number of texts, at least one, in parts. Raises as answer_texts."""
    parts = list(cut_parts(texts))
    if len(parts) == 1:
        return await answer_texts(resources, spec, texts)
    free = asyncio.Semaphore(PARTS_AT_ONCE)

    async def answer_part(part: Sequence[bytes]) -> Answered:
        async with free:
            return await answer_texts(resources, spec, part)

    tasks = [asyncio.create_task(answer_part(part)) for part in parts]
    try:
        return join_parts(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # of a part that failed, or whose client has gone, the others are not wanted
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def cut_parts(texts: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield the texts in runs that fit one message: a run of one text may be larger."""
    start = num_bytes = 0
    for index, text in enumerate(texts):
        if index > start and (index - start == MAX_TEXTS or num_bytes + len(text) > MAX_BYTES):
            yield texts[start:index]
            start, num_bytes = index, 0
        num_bytes += len(text)
    yield texts[start:]


def join_parts(answers: Sequence[Answered]) -> Answered:
    failures: dict[int, str] = {}
    start = 0
    for answer in answers:
        failures |= {start + row: reason for row, reason in answer.failures.items()}
        start += len(answer.vectors)
    return Answered(
        np.concatenate([answer.vectors for answer in answers]),
        failures,
        sum(answer.num_tokens for answer in answers),
        sum(answer.num_truncated for answer in answers),
    )


async def answer_texts(resources: Resources, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
    """Answer texts that fit one message. While no worker takes queries of this spec, wait for one.

    Raises EncodingTimeout, QueryLost, and Unavailable when the API stops or knows no Redis.
    """
    if resources.queries is None:
        raise Unavailable(NO_REDIS)
    loop = asyncio.get_running_loop()
    timeout = resources.settings.search_timeout_seconds
    deadline = loop.time() + timeout
    while True:
        try:
            return await resources.queries.ask(spec, texts, deadline)
        except NobodyListens:
            pass
        except TimeoutError:
            break
        if resources.is_stopping():
            raise Unavailable("The API is stopping; send the query again.")
        await asyncio.sleep(min(ABSENCE_SECONDS, max(deadline - loop.time(), 0.0)))
    reason = await run_in_threadpool(explain_query, resources.engine, spec)
    raise EncodingTimeout(f"No worker encoded the query within {timeout:g} s. {reason}")


def make_query_spec(resources: Resources, spec: EncodingSpec) -> EncodingSpec:
    """The collection's own spec, with the prompt that its model has for queries; a long query is never refused.

    A query is a vector of floats, whatever type the collection keeps.
    """
    prompts = resources.registry.card(spec.model).prompts
    long_texts = TRUNCATE if spec.long_texts == FAIL else spec.long_texts
    return replace(spec, prompt=prompts.get("query", spec.prompt), long_texts=long_texts, vector_type=None)


def explain_query(engine: Engine, spec: EncodingSpec) -> str:
    """Why the query was not answered, in the words of a job that waits."""
    with engine.connect() as connection:
        reason = explain_query_wait(connection, spec)
    return (
        reason or f"Its worker is slow or busy with other queries; see `vectormill status` for {spec.model}."
    )
