"""A finished job whose vectors were written without a worker, through the functions that a worker uses."""

from collections.abc import Callable, Iterable
from uuid import UUID

import numpy as np
from sqlalchemy import Engine

from vectormill.db.chunks.chunks import claim_chunk
from vectormill.db.chunks.completion import complete_chunk
from vectormill.db.chunks.dispatch import mark_queued
from vectormill.db.chunks.payloads import open_payload
from vectormill.db.jobs.submission import JobWriter
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.jobs.chunk import ChunkOutcome
from vectormill.domain.jobs.item import Item
from vectormill.domain.jobs.job import NewJob
from vectormill.files.ndjson import ItemJson
from vectormill.ragged import Ragged
from vectormill.settings import Settings

OWNER = "benchmark"


def store_job(
    engine: Engine,
    spec: EncodingSpec,
    items: Iterable[ItemJson],
    collection: str | None,
    on_chunk: Callable[[], None] = lambda: None,
) -> UUID:
    """The job's id, once every item has a random vector of unit length. `on_chunk` is called after each commit."""
    settings = Settings()
    with JobWriter(engine, NewJob(spec, collection), settings) as writer:
        for item in items:
            writer.add(Item(item["key"], item["text"].encode()))
        job = writer.finish()
    random = np.random.default_rng(job.seq)
    with engine.begin() as connection:
        dispatches = mark_queued(connection, [(job.id, job.num_chunks)])
    for dispatch in dispatches:
        complete_with_random_vectors(engine, dispatch.chunk_id, dispatch.model, random)
        on_chunk()
    return job.id


def complete_with_random_vectors(
    engine: Engine, chunk_id: int, model: str, random: np.random.Generator
) -> int:
    """Claims a chunk of the model and commits it; the number of its items."""
    with engine.begin() as connection:
        claimed = claim_chunk(connection, chunk_id, OWNER, model, Settings().lease_seconds)
        assert claimed is not None, "nobody else claims chunks here"
        claim = claimed.claim
        items = open_payload(claimed.payload, claim.chunk_id)
        vectors = random.standard_normal((len(items), claim.spec.dimensions), dtype=np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        outcome = ChunkOutcome(failures={}, num_tokens=0, num_computed_tokens=0)
        complete_chunk(connection, claim, items, np.arange(len(items)), Ragged.from_matrix(vectors), outcome)
    return len(items)
