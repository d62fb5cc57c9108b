"""Searches by sparse weights, by several outputs and by multi-vectors, compared with NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.building import encode_all
from tests.database import ask
from tests.integration.collections.test_representations import SPARSE_ONLY, VECTORS_ONLY
from tests.kinds import MANY, representations_of
from tests.protocol import SPEC, submit
from vectormill.client import Client
from vectormill.collections.collection import CollectionOptions
from vectormill.collections.collections import create_collection, find_generation
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.jobs.item import Item
from vectormill.search.late_interaction import measure_maxsim
from vectormill.search.matches import find_matches
from vectormill.search.search import BY_TEXT, FUSION_CONSTANT, Search, fit_outputs
from vectormill.vectors.representations import Representations

WORDS = ("apple", "pear", "plum")
ITEMS = [
    Item(
        f"k{number:03d}",
        f"text {number} {WORDS[number % 3]}".encode(),
        f'{{"part": {number % 4}, "_passage": {{"document": "d{number // 3}", "index": 0, "start": 0, '
        '"end": 1}}'.encode(),
    )
    for number in range(150)
]
ROWS = {item.key: representations_of(item.text) for item in ITEMS}
QUERY = representations_of(b"a query")


@pytest.fixture
def searched(engine: Engine) -> Engine:
    keep(engine, MANY)
    return engine


def keep(engine: Engine, spec: EncodingSpec) -> None:
    ask(engine, create_collection, "docs", spec, CollectionOptions(keep_text=True), 100)
    submit(engine, ITEMS, collection="docs", spec=spec, chunk_max_items=50)
    encode_all(engine)


def search(engine: Engine, query: Representations | None = QUERY, **options: Any) -> list[Any]:
    with engine.connect() as connection:
        (found,) = find_matches(connection, find_generation(connection, "docs"), [(Search(**options), query)])
    return found["data"]


def measure_cosines(query: Representations) -> dict[str, float]:
    size = float(np.linalg.norm(query.dense))
    return {
        key: float(row.dense @ query.dense) / size / float(np.linalg.norm(row.dense))
        for key, row in ROWS.items()
    }


def measure_products(query: Representations) -> dict[str, float]:
    own = dict(zip(query.indices.tolist(), query.weights.tolist(), strict=True))
    products = {
        key: sum(
            own.get(place, 0.0) * weight
            for place, weight in zip(row.indices.tolist(), row.weights.tolist(), strict=True)
        )
        for key, row in ROWS.items()
    }
    return {key: product for key, product in products.items() if product}


def measure_all(query: Representations) -> dict[str, float]:
    own = query.vectors.astype(np.float32)
    return {
        key: float((own @ row.vectors.astype(np.float32).T).max(axis=1).sum()) for key, row in ROWS.items()
    }


def rank(scores: dict[str, float]) -> list[str]:
    return sorted(scores, key=lambda key: (-scores[key], key))


def assert_found(matches: Sequence[Any], scores: dict[str, float], limit: int) -> None:
    best = rank(scores)[:limit]
    assert [match["score"] for match in matches] == pytest.approx([scores[key] for key in best], abs=1e-3)
    assert all(scores[match["key"]] == pytest.approx(match["score"], abs=1e-3) for match in matches)


def fuse(*rankings: list[str]) -> dict[str, float]:
    keys = {key for ranking in rankings for key in ranking}
    return {
        key: sum(1 / (FUSION_CONSTANT + 1 + ranking.index(key)) for ranking in rankings if key in ranking)
        for key in keys
    }


@pytest.mark.parametrize("rows_at_once", [100, 7])
def test_multi_vectors_alone_compare_every_row(
    searched: Engine, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.vectors.representations._DIMENSIONS_AT_ONCE", 4 * rows_at_once)
    assert_found(search(searched, outputs=(MULTI_VECTOR,), limit=10), measure_all(QUERY), 10)
    second = search(searched, outputs=(MULTI_VECTOR,), limit=5, offset=5)
    assert [match["key"] for match in second] == [
        match["key"] for match in search(searched, outputs=(MULTI_VECTOR,), limit=10)[5:]
    ]


@pytest.mark.parametrize("spec", [SPARSE_ONLY, VECTORS_ONLY], ids=["sparse", "multi_vector"])
def test_a_collection_without_dense_vectors_is_searched_by_what_it_has(
    engine: Engine, spec: EncodingSpec
) -> None:
    keep(engine, spec)
    fitted = fit_outputs(Search(limit=5), None, spec, "docs")
    assert fitted.outputs == (spec.outputs,)
    expected = measure_products(QUERY) if spec == SPARSE_ONLY else measure_all(QUERY)
    assert_found(search(engine, outputs=fitted.outputs, limit=5), expected, 5)


@pytest.mark.parametrize(
    ("options", "asked", "spec", "said"),
    [
        ({}, ["sparse"], SPEC, "'docs' has the outputs dense; outputs must be some of them, and not sparse"),
        ({"include": ("vector",)}, None, SPARSE_ONLY, "omit 'vector' from include"),
        ({"mode": BY_TEXT, "words": "x"}, ["sparse"], MANY, "finds rows by words"),
    ],
)
def test_what_a_collection_does_not_have_is_refused(
    options: dict[str, Any], asked: list[str] | None, spec: EncodingSpec, said: str
) -> None:
    with pytest.raises(InvalidOption, match=said):
        fit_outputs(Search(**options), asked, spec, "docs")


def test_over_http_a_row_finds_what_is_like_it_by_any_outputs(searched: Engine) -> None:
    with api_client(searched) as api, Client(str(api.base_url)) as client:
        found = client.search("docs", more_like="k007", outputs=["sparse", "multi_vector"], limit=5)
        expected = search(searched, None, outputs=(SPARSE, MULTI_VECTOR), like="k007", limit=5)
        assert [match["key"] for match in found] == [match["key"] for match in expected]
        (fused,) = client.search("docs", more_like="k007", outputs=["dense", "sparse"], limit=1)
        assert fused["sparse_rank"] is not None or fused["vector_rank"] is not None


OWN: dict[str, dict[str, Any]] = {
    DENSE: {"embedding": QUERY.dense},
    SPARSE: {"sparse": dict(zip(QUERY.indices, QUERY.weights, strict=True))},
    MULTI_VECTOR: {"multi_vector": QUERY.vectors},
}


@pytest.mark.parametrize(
    "outputs", [(DENSE,), (SPARSE,), (MULTI_VECTOR,), (DENSE, SPARSE), (DENSE, SPARSE, MULTI_VECTOR)]
)
def test_a_query_may_have_vectors_of_its_own_for_each_output(
    searched: Engine, outputs: tuple[str, ...]
) -> None:
    own = {field: value for name in outputs for field, value in OWN[name].items()}
    expected = search(searched, outputs=outputs, limit=5)
    with api_client(searched) as api, Client(str(api.base_url)) as client:
        found = client.search("docs", **own, limit=5)
        assert [match["key"] for match in found] == [match["key"] for match in expected]
        assert [match["score"] for match in found] == pytest.approx(
            [match["score"] for match in expected], abs=1e-3
        )
        (listed,) = client.search_many("docs", [{"limit": 5}], **{name: plain(own[name]) for name in own})
        assert listed == found


def plain(value: Any) -> Any:
    """Return arrays as lists, and weights by plain numbers, for JSON."""
    if isinstance(value, dict):
        return {int(place): float(weight) for place, weight in value.items()}
    return value.tolist()


def test_words_are_searched_beside_vectors_of_the_query_s_own(searched: Engine) -> None:
    nearest, weighed = rank(measure_cosines(QUERY))[:100], rank(measure_products(QUERY))[:100]
    worded = [item.key for item in ITEMS if b"plum" in item.text]
    with api_client(searched) as api, Client(str(api.base_url)) as client:
        both = {**OWN[DENSE], **OWN[SPARSE]}
        found = client.search("docs", "plum", mode="hybrid", **both, limit=10)
        ordered = client.search("docs", "plum", mode="text", multi_vector=QUERY.vectors, limit=10)
    scores = fuse(nearest, weighed, worded)
    assert [match["score"] for match in found] == pytest.approx([scores[key] for key in rank(scores)[:10]])
    best = {key: score for key, score in measure_all(QUERY).items() if key in worded}
    assert [match["key"] for match in ordered] == rank(best)[:10]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"sparse": {}}, "sparse has 0 weights other than 0; it must have from 1 to 16,000"),
        ({"sparse": {"3": 0.0}}, "sparse has 0 weights other than 0"),
        (
            {"sparse": {"100": 1}},
            "sparse has the place 100, but the vocabulary of collection 'docs' has places from 0",
        ),
        ({"sparse": {"3": 1e300}}, "sparse has numbers that are not finite, or larger than 65,504"),
        ({"multi_vector": []}, "multi_vector has 0 vectors; it must have from 1 to 64"),
        ({"multi_vector": [[1, 2, 3, 4]] * 65}, "multi_vector has 65 vectors"),
        (
            {"multi_vector": [[1, 2, 3, 4], [1, 2]]},
            r"multi_vector[1] has 2 dimensions, but collection 'docs' has 4",
        ),
        ({"multi_vector": [[1, 2, 3, -1e9]]}, "multi_vector has numbers that are not finite"),
        ({"embedding": [1.0]}, "The embedding has 1 dimensions"),
        ({"sparse": {"3": 1}, "outputs": ["dense"]}, "own vectors for sparse, so outputs must be these"),
        ({"sparse": {"3": 1}, "outputs": ["dense", "sparse"]}, "send a vector for each output"),
        ({"sparse": {"3": 1}, "text": "x"}, "exactly one of text, more_like and its own vectors"),
        ({"sparse": {"3": 1}, "more_like": "k1"}, "exactly one of text, more_like and its own vectors"),
        ({"sparse": {"3": 1}, "text": "x", "mode": "text"}, "omit embedding and sparse, or use mode hybrid"),
    ],
)
def test_vectors_that_cannot_be_compared_are_refused_by_the_number_of_their_query(
    searched: Engine, query: dict[str, Any], said: str
) -> None:
    with api_client(searched) as api:
        alone = api.post("/v1/collections/docs/search", json=query)
        many = api.post("/v1/collections/docs/search", json={"queries": [{"more_like": "k1"}, query]})
    assert (alone.status_code, many.status_code) == (422, 422)
    assert said in alone.json()["detail"]
    assert many.json()["detail"].startswith("queries[1]: ")
    assert said in many.json()["detail"]


def test_vectors_for_an_output_that_the_collection_lacks_are_refused(engine: Engine) -> None:
    keep(engine, SPARSE_ONLY)
    with api_client(engine) as api:
        answer = api.post("/v1/collections/docs/search", json={"multi_vector": [[1, 2, 3, 4]]})
    assert (
        "'docs' has the outputs sparse; outputs must be some of them, and not multi_vector"
        in answer.json()["detail"]
    )


def test_maxsim_of_rows_without_tokens_is_zero() -> None:
    rows = [np.zeros((0, 4), np.float16), QUERY.vectors, np.zeros((0, 4), np.float16)]
    own = QUERY.vectors.astype(np.float32)
    expected = float((own @ own.T).max(axis=1).sum())
    assert measure_maxsim(own, rows).tolist() == pytest.approx([0.0, expected, 0.0])
    assert measure_maxsim(own[:0], rows).tolist() == [0.0, 0.0, 0.0]
