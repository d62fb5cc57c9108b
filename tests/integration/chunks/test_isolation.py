"""Chunks of the sizes that users have are taken apart, whatever they hold and wherever it is kept."""

from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import Engine

from tests.database import ask, execute, load_payload
from tests.protocol import SPEC, claim, claim_next, dispatch_all, make_items, submit
from vectormill.collections.generation_tables import keep_ranges
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.chunks import split_chunk
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.export import read_results
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.jobs import find_job, retry_job
from vectormill.ragged import Ragged
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.vector_types import make_rows

DIMENSIONS = 384
RANGES = Ranges(np.full(DIMENSIONS, -1, dtype=np.float32), np.full(DIMENSIONS, 1, dtype=np.float32))
# 256 × 1,536 bytes is the first product that no smallint holds; 512 is what a chunk of paragraphs has, and no chunk of
# short texts has more than 2,048.
SIZES = (256, 488, 512, 2000)


def vectors_of(positions: list[int]) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """float32 [n, DIMENSIONS]: a row tells its position in the job."""
    return np.stack(
        [np.random.default_rng(position).uniform(-1, 1, DIMENSIONS) for position in positions]
    ).astype(np.float32)


def complete_large(engine: Engine, claimed: Claim, failing: frozenset[int] = frozenset()) -> None:
    """Commits the wanted items of the chunk; those at a position of the job in `failing` fail."""
    with engine.begin() as connection:
        items = load_payload(connection, claimed.chunk_id)
        wanted = claimed.wanted_items(0, claimed.num_items)
        encoded = np.array(range(claimed.num_items) if wanted is None else wanted, dtype=np.int64)
        places = (encoded + claimed.first_item).tolist()
        failures = {
            position: ItemFailure(EMPTY_TEXT, "")
            for position, place in zip(encoded.tolist(), places, strict=True)
            if place in failing
        }
        results = Ragged.from_matrix(vectors_of(places))
        complete_chunk(connection, claimed, items, encoded, results, ChunkOutcome(failures, 1, 1))


@pytest.mark.parametrize("collection", [None, "docs"])
@pytest.mark.parametrize("vector_type", VECTOR_TYPES)
def test_chunks_of_real_size_are_split_and_keep_every_vector_they_had(
    engine: Engine, vector_type: str, collection: str | None
) -> None:
    # Texts are cut after two tokens, so that the first chunk of a job has room for 2,000.
    spec = replace(SPEC, dimensions=DIMENSIONS, vector_type=vector_type, max_tokens=2)
    ask(engine, keep_ranges, spec, RANGES)
    for size in SIZES:
        split_a_retried_chunk(engine, spec, size, collection)


def split_a_retried_chunk(engine: Engine, spec: EncodingSpec, size: int, collection: str | None) -> None:
    job = submit(engine, make_items(size), spec=spec, collection=collection, chunk_max_items=size)
    failing = frozenset({1, size // 2, size - 1})
    complete_large(engine, claim_next(engine), failing)
    ask(engine, retry_job, job.id)
    whole = claim_next(engine)
    ask(engine, split_chunk, whole, "lost twice")
    halves = [claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine)]
    assert [(half.first_item, half.num_items, half.lost) for half in halves if half] == [
        (0, size // 2, 0),
        (size // 2, size - size // 2, 0),
    ]
    for half in halves:
        assert half is not None
        complete_large(engine, half)
    blocks = list(read_results(engine, job.id))
    assert np.concatenate([block.present for block in blocks]).all()
    kind = spec.delivered_type if collection is None else spec.kept_type
    expected = make_rows(vectors_of(list(range(size))), kind, RANGES)
    assert np.array_equal(np.concatenate([block.results for block in blocks]), expected)
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_done, ended.num_open_chunks) == ("completed", size, 0)


@pytest.mark.parametrize("first_item", [32_500, 2**31 - 100], ids=["smallint", "integer"])
def test_a_chunk_far_into_its_job_is_split(engine: Engine, first_item: int) -> None:
    job = submit(engine, make_items(512), chunk_max_items=512)
    execute(engine, "UPDATE vectormill.chunks SET first_item = :at", at=first_item)
    claimed = claim_next(engine)
    ask(engine, split_chunk, claimed, "lost twice")
    rows = execute(
        engine, "SELECT first_item, num_items FROM vectormill.chunks WHERE state = 'pending' ORDER BY seq"
    ).all()
    assert [tuple(row) for row in rows] == [(first_item, 256), (first_item + 256, 256)]
    assert ask(engine, find_job, job.id).num_open_chunks == 2
