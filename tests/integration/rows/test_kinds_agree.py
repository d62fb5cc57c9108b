"""Drawn values of every vector type and kind of result are the same in Postgres, JSON, Parquet and SQL as in NumPy."""

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from sqlalchemy import Engine, text

from api.streams.row_streams import write_ndjson, write_parquet
from tests.kinds import LABELS, MANY, RECORDS, SCORES
from tests.protocol import SPEC
from vectormill.collections.collection import Generation
from vectormill.collections.collections import open_collection
from vectormill.collections.exports import Inclusion, RowPage, read_pages
from vectormill.collections.generation_tables import upsert_rows
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.jobs.item import Item
from vectormill.results.kind import take_objects
from vectormill.results.records import group_records
from vectormill.search.query_vectors import read_vector
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.representations import Representations, unpack
from vectormill.vectors.vector_types import make_rows

DIMENSIONS: Final = 13  # not a multiple of eight
RANGES: Final = Ranges(
    np.full(DIMENSIONS, -3, np.float32), np.linspace(-3, 50_000, DIMENSIONS, dtype=np.float32)
)
BARE: Final = Inclusion(metadata=False)
DRAWN: Final = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
HALVES: Final = st.floats(-65504, 65504, width=32)
NAMES: Final = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)


def compute_ranged(vectors: np.ndarray) -> np.ndarray:
    steps = (RANGES.high - RANGES.low) / np.float32(255)
    steps[steps == 0] = 1
    return (np.clip(np.floor((vectors - RANGES.low) / steps), 0, 255) - 128).astype(np.int8)


# Functions that turn float32 [n, d] into the values of a type, by the coding of these values.
COMPUTED: Final[dict[str, Callable[[np.ndarray, str], np.ndarray]]] = {
    "rounded": lambda vectors, row: vectors.astype(row),
    "ranged": lambda vectors, row: compute_ranged(vectors),
    "signed": lambda vectors, row: np.packbits(vectors > 0, axis=1),
}


def write(engine: Engine, spec: EncodingSpec, results: Any) -> tuple[Generation, RowPage]:
    """Write the results into the collection `docs`, and return what an export reads of them."""
    items = [Item(f"k{place}", b"text") for place in range(len(results))]
    with engine.begin() as connection:
        generation = open_collection(connection, "docs", spec)
        connection.execute(text(f"TRUNCATE vectormill.{generation.table_name}"))
        upsert_rows(connection, generation.id, 1, items, results, spec)
    (page,) = read_pages(engine, generation, BARE)
    assert page.keys == [item.key for item in items]
    return generation, page


def read_lines(spec: EncodingSpec, page: RowPage) -> list[dict[str, Any]]:
    content = b"".join(write_ndjson(spec, BARE, (each for each in [page])))
    return [json.loads(line) for line in content.splitlines()]


def read_table(spec: EncodingSpec, page: RowPage) -> Any:
    return pq.read_table(io.BytesIO(b"".join(write_parquet(spec, BARE, (each for each in [page])))))


@pytest.mark.parametrize("vector_type", VECTOR_TYPES)
def test_vectors_of_every_type_are_the_same_numbers_everywhere(engine: Engine, vector_type: str) -> None:
    spec, kind = replace(SPEC, dimensions=DIMENSIONS, vector_type=vector_type), VECTOR_TYPES[vector_type]

    @DRAWN
    @given(vectors=arrays(np.float32, st.tuples(st.integers(1, 5), st.just(DIMENSIONS)), elements=HALVES))
    def agree(vectors: np.ndarray) -> None:
        expected = COMPUTED[kind.coding](vectors, kind.row)
        generation, page = write(engine, spec, make_rows(vectors, kind, RANGES))
        assert page.results is not None
        assert page.results.dtype == expected.dtype
        np.testing.assert_array_equal(page.results, expected)
        lines = read_lines(spec, page)
        read = np.array([line["embedding"] for line in lines])
        assert kind.is_float or read.dtype.kind == "i"  # codes are written as whole numbers
        np.testing.assert_array_equal(read.astype(expected.dtype), expected)
        column = read_table(spec, page)["embedding"].combine_chunks()
        np.testing.assert_array_equal(column.flatten().to_numpy().reshape(expected.shape), expected)
        with engine.connect() as connection:
            written = connection.execute(
                text("SELECT CAST(embedding AS text) FROM docs ORDER BY key")
            ).scalars()
            found = [read_vector(each, generation) for each in written]
        np.testing.assert_array_equal(np.array(found).astype(expected.dtype), expected)

    agree()


def test_scores_are_the_same_numbers_everywhere(engine: Engine) -> None:
    @DRAWN
    @given(
        numbers=arrays(
            np.float32, st.tuples(st.integers(1, 5), st.just(len(LABELS))), elements=st.floats(0, 1, width=32)
        )
    )
    def agree(numbers: np.ndarray) -> None:
        _, page = write(engine, SCORES, numbers)
        np.testing.assert_array_equal(page.results, numbers)
        best = [LABELS[place] for place in numbers.argmax(axis=1)]
        told = [read_lines(SCORES, page), read_table(SCORES, page).to_pylist()]
        with engine.connect() as connection:
            view = connection.execute(text("SELECT score, label, probabilities FROM docs ORDER BY key"))
            told.append([dict(row) for row in view.mappings()])
        for rows in told:
            assert [row["label"] for row in rows] == best
            found = [[row["probabilities"][label] for label in LABELS] for row in rows]
            np.testing.assert_array_equal(np.array(found, np.float32), numbers)
            np.testing.assert_array_equal(
                np.array([row["score"] for row in rows], np.float32), numbers.max(axis=1)
            )

    agree()


STEP: Final = st.fixed_dictionaries(
    {"type": NAMES, "span": NAMES, "offset": st.lists(st.integers(0, 9), min_size=2)}
)


@given(records=st.lists(st.lists(st.lists(STEP, min_size=1, max_size=3), max_size=4), min_size=1, max_size=4))
@DRAWN
def test_records_come_back_by_the_type_that_they_begin_with(engine: Engine, records: list[Any]) -> None:
    packed = take_objects([group_records(json.dumps(each).encode()) for each in records])
    _, page = write(engine, RECORDS, packed)
    assert page.results is not None
    for row, line, each, own in zip(
        page.results,
        read_lines(RECORDS, page),
        read_table(RECORDS, page)["output"].to_pylist(),
        records,
        strict=True,
    ):
        grouped: dict[str, list[Any]] = {}
        for path in own:
            grouped.setdefault(path[0]["type"], []).append(path)
        assert json.loads(row) == line["output"] == json.loads(each) == grouped


SPARSE: Final = st.dictionaries(st.integers(0, 99), st.floats(2**-20, 1000, width=32), max_size=9)
MULTI: Final = arrays(
    np.float16, st.tuples(st.integers(0, 4), st.just(4)), elements=st.floats(-8, 8, width=16)
)


@given(
    drawn=st.lists(st.tuples(arrays(np.float32, 8, elements=HALVES), SPARSE, MULTI), min_size=1, max_size=4)
)
@DRAWN
def test_outputs_of_an_encoding_are_the_same_numbers_everywhere(engine: Engine, drawn: list[Any]) -> None:
    rows = [
        Representations(
            dense,
            np.array(sorted(sparse), np.uint32),
            np.array([sparse[place] for place in sorted(sparse)], np.float32),
            tokens,
        )
        for dense, sparse, tokens in drawn
    ]
    _, page = write(engine, MANY, take_objects([row.pack() for row in rows]))
    assert page.results is not None
    table = read_table(MANY, page).to_pylist()
    for packed, line, told, row in zip(page.results, read_lines(MANY, page), table, rows, strict=True):
        read, dense = unpack(packed), row.dense.astype(np.float16).astype(np.float32)
        for found in (read.dense, line["embedding"], told["embedding"]):
            np.testing.assert_array_equal(np.array(found, np.float32), dense)
        pairs = [(each["index"], each["weight"]) for each in told["sparse"]]
        ways = [
            (read.indices, read.weights),
            tuple(line["sparse"].values()),
            ([p for p, _ in pairs], [w for _, w in pairs]),
        ]
        for indices, weights in ways:
            np.testing.assert_array_equal(indices, row.indices)
            np.testing.assert_array_equal(np.array(weights, np.float32), row.weights)
        for found in (read.vectors, line["multi_vector"], told["multi_vector"]):
            np.testing.assert_array_equal(np.array(found, np.float16).reshape(-1, 4), row.vectors)
