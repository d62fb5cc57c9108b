"""Traced: the span of a chunk, within the trace of the request that submitted its job."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from vectormill.db.chunks.chunks import ClaimedChunk
from vectormill.tracing import NOTHING, Note, is_tracing, note_past, span


def trace_chunk(claimed: ClaimedChunk, asked: float) -> AbstractContextManager[Note]:
    """From its message on, which came at `asked`; with the time that it waited in Redis, and that of the claim."""
    return _trace(claimed, asked) if is_tracing() else NOTHING


@contextmanager
def _trace(claimed: ClaimedChunk, asked: float) -> Iterator[Note]:
    claim, now = claimed.claim, time.time()
    # By the database's clock, which wrote the message's time.
    waited = claimed.dispatch_seconds
    began = asked if waited is None else min(asked, now - waited)
    with span(
        "chunk",
        kind="consumer",
        parent=claim.traceparent,
        began=began,
        job_id=str(claim.job_id),
        chunk_id=claim.chunk_id,
        model=claim.spec.model,
        items=claim.num_items,
        estimated_tokens=claim.num_tokens,
        fence=claim.fence,
        attempt=claim.attempt,
    ) as note:
        if began < asked:
            note_past("wait in redis", began, asked)
        note_past("claim", asked, now)
        yield note
