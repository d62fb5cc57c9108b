"""Searches by cosine and by inner product, compared with numpy over all rows, and rows without a direction."""

from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from sqlalchemy import Engine, text

from tests.protocol import SPEC
from vectormill.collections.collection import Generation
from vectormill.collections.collections import open_collection
from vectormill.collections.generation_tables import keep_ranges, upsert_rows
from vectormill.collections.generations import open_target_generation
from vectormill.collections.index_plan import find_operator_class
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.vector_type import COSINE, DOT, VECTOR_TYPES
from vectormill.jobs.item import Item
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from vectormill.runs.checks import measure_recall
from vectormill.search.matches import find_matches
from vectormill.search.search import Search
from vectormill.vectors.quantization import measure_ranges, quantize, restore
from vectormill.vectors.vector_types import make_rows

NUM_ROWS: Final = 400
DIMENSIONS: Final = 16
# Rows that former releases stored without a direction.
BROKEN: Final = ("zero", "zero too")
CASES: Final = [
    (name, similarity, has_index)
    for name, kind in VECTOR_TYPES.items()
    for similarity in kind.distances
    for has_index in (False, True)
    if kind.most_indexed or not has_index  # no index serves codes
]
# The first tolerance holds for values that are rounded to float16, the second for all others.
TOLERANCES: Final = {True: 1e-3, False: 1e-5}


def draw_vectors(num_rows: int = NUM_ROWS) -> npt.NDArray[np.float32]:
    """Return vectors whose lengths differ fiftyfold, so that order by product and order by cosine differ."""
    random = np.random.default_rng(5)
    vectors = random.standard_normal((num_rows, DIMENSIONS))
    vectors *= random.uniform(0.1, 5, (num_rows, 1)) / np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def fill(engine: Engine, vectors: npt.NDArray[np.float32], spec: EncodingSpec) -> Generation:
    stored = np.concatenate([np.zeros((len(BROKEN), DIMENSIONS), np.float32), vectors])
    items = [Item(key, b"text") for key in (*BROKEN, *(f"k{number}" for number in range(len(vectors))))]
    ranges = measure_ranges(vectors)
    with engine.begin() as connection:
        keep_ranges(connection, spec, ranges)
        generation = open_collection(connection, "docs", spec)
        rows = make_rows(stored, spec.kept_type, ranges)
        upsert_rows(connection, generation.id, 1, items, rows, spec)
    return generation


def compute_scores(
    vectors: npt.NDArray[np.float32], query: npt.NDArray[np.float32], vector_type: str, similarity: str
) -> npt.NDArray[np.float32]:
    if vector_type == "binary":
        vectors, query = np.sign(vectors), np.sign(query)
    products: npt.NDArray[np.float32] = vectors @ query
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(query)
    return products if similarity == DOT else products / lengths


def search(
    engine: Engine, generation: Generation, *searches: tuple[Search, Any], setting: str = ""
) -> list[Any]:
    with engine.connect() as connection:
        if setting:
            connection.execute(text(f"SET LOCAL {setting} = off"))
        return find_matches(connection, generation, searches)


@pytest.mark.parametrize(("vector_type", "similarity", "has_index"), CASES)
def test_rows_are_found_and_scored_as_numpy_compares_them(
    engine: Engine, vector_type: str, similarity: str, has_index: bool
) -> None:
    spec = replace(
        SPEC, dimensions=DIMENSIONS, vector_type=vector_type, similarity=similarity, normalize=False
    )
    vectors = draw_vectors()
    generation = fill(engine, vectors, spec)
    if vector_type == "int8":
        ranges = measure_ranges(vectors)
        vectors = restore(quantize(vectors, ranges), ranges)
    operator_class, _ = find_operator_class(VECTOR_TYPES[vector_type], DIMENSIONS, similarity)
    if has_index:
        with engine.begin() as connection:
            statement = f"CREATE INDEX mine ON vectormill.{generation.table_name} USING hnsw (embedding {{}})"
            connection.execute(text(statement.format(operator_class)))
        recall = measure_recall(engine, generation, check=lambda: None)
        assert recall is not None
        assert recall.value > 0.95, "the index serves what an exact search finds"
    queries = 2 * draw_vectors(8)
    many = [(Search(limit=NUM_ROWS + 9), query) for query in queries]
    setting = "enable_seqscan" if has_index else ""
    ways = [
        search(engine, generation, *many, setting=setting),
        [search(engine, generation, each)[0] for each in many],
    ]
    few = search(engine, generation, *((Search(limit=10), query) for query in queries), setting=setting)
    for number, query in enumerate(queries):
        expected = compute_scores(vectors, query, vector_type, similarity)
        tolerance = TOLERANCES[VECTOR_TYPES[vector_type].is_half] * float(np.abs(expected).max())
        for found in (way[number] for way in ways):
            scores = {match["key"]: match["score"] for match in found["data"] if match["key"] not in BROKEN}
            assert list(scores.values()) == sorted(scores.values(), reverse=True)
            own = [scores[f"k{row}"] for row in range(NUM_ROWS)]
            np.testing.assert_allclose(own, expected, atol=tolerance)
        least = np.sort(expected)[-10] - tolerance
        assert all(match["score"] >= least for match in few[number]["data"])
        assert not any(np.isnan(match["score"]) for match in few[number]["data"])
        assert (few[number]["num_rows_read"] is None) == has_index
    (alike,) = search(engine, generation, (Search(limit=5, like="k3"), None))
    expected = compute_scores(vectors, vectors[3], vector_type, similarity)
    tolerance = TOLERANCES[VECTOR_TYPES[vector_type].is_half] * float(np.abs(expected).max())
    others = np.sort(np.delete(expected, 3))[::-1][:5]
    np.testing.assert_allclose([match["score"] for match in alike["data"]], others, atol=2 * tolerance)


def test_a_collection_keeps_its_similarity_until_another_generation_is_built(engine: Engine) -> None:
    spec = replace(SPEC, dimensions=DIMENSIONS, normalize=False)
    by_product = replace(spec, similarity=DOT)
    generation = fill(engine, draw_vectors(5), spec)
    with engine.begin() as connection:  # a job of the present reading of the model goes on
        assert open_collection(connection, "docs", by_product).spec.similarity == COSINE
    assert open_target_generation(engine, "docs", spec).id == generation.id
    building = open_target_generation(engine, "docs", by_product)
    assert (building.state, building.spec) == ("building", by_product)
    assert open_target_generation(engine, "docs", by_product).id == building.id


@pytest.mark.parametrize(
    ("options", "similarity"),
    [
        ({}, DOT),
        ({"vector_type": "int8"}, DOT),
        ({"normalize": True}, COSINE),  # at length 1 both are equal
        ({"vector_type": "binary"}, COSINE),  # signs have no length
    ],
)
def test_a_model_of_inner_products_is_compared_so_where_its_vectors_have_a_length(
    options: dict[str, Any], similarity: str
) -> None:
    card = replace(Registry({}).card(DEFAULT_MODEL), normalize=False, similarity=DOT)
    assert make_spec(card, EncodingOptions(**options)).similarity == similarity


def test_what_is_compared_otherwise_is_the_same_vector_space() -> None:
    by_product = replace(SPEC, similarity=DOT)
    assert by_product.fingerprint() == SPEC.fingerprint()
    assert EncodingSpec.from_json(by_product.to_json()) == by_product
    assert "similarity" not in SPEC.to_json()
    assert find_operator_class(by_product.kept_type, 8, DOT)[0] == "halfvec_ip_ops"
    assert replace(by_product, outputs="dense,sparse").narrow(["sparse"]).similarity == COSINE
