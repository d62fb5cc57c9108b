"""Parts: the many texts of one request go to workers some at a time, so that others come in between.

Each part has the time of a search for itself: a request of two thousand texts is given up when it makes no progress,
and not because it is long.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from api.dependencies import Resources
from api.queries.encoding import answer_texts
from api.queries.lanes import MAX_TEXTS, Answered
from vectormill.domain.encoding import EncodingSpec

# Of one request, at the workers or waiting for them; what comes meanwhile waits for no more than these.
PARTS_AT_ONCE: Final = 4


async def answer_many(resources: Resources, spec: EncodingSpec, texts: Sequence[bytes]) -> Answered:
    """As answer_texts, of any number of texts, at least one."""
    if len(texts) <= MAX_TEXTS:
        return await answer_texts(resources, spec, texts)
    free = asyncio.Semaphore(PARTS_AT_ONCE)

    async def answer_part(part: Sequence[bytes]) -> Answered:
        async with free:
            return await answer_texts(resources, spec, part)

    parts = [texts[start : start + MAX_TEXTS] for start in range(0, len(texts), MAX_TEXTS)]
    tasks = [asyncio.create_task(answer_part(part)) for part in parts]
    try:
        return join_parts(await asyncio.gather(*tasks))
    finally:
        for task in tasks:  # of a part that failed, or whose client has gone, the others are not wanted
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def join_parts(answers: Sequence[Answered]) -> Answered:
    failures: dict[int, str] = {}
    start = 0
    for answer in answers:
        failures |= {start + row: reason for row, reason in answer.failures.items()}
        start += len(answer.vectors)
    counts = [answer.num_tokens for answer in answers if answer.num_tokens is not None]
    return Answered(
        np.concatenate([answer.vectors for answer in answers]),
        failures,
        sum(counts) if len(counts) == len(answers) else None,
        sum(answer.num_truncated for answer in answers),
    )
