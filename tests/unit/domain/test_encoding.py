"""Specs and tasks: what decides a vector space, what is stored of it, and how two texts are one item."""

import tracemalloc
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.domain.encoding import FAIL, LATE, LATE_POOLING, PASSAGES, TRUNCATE, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import (
    EXTRACT,
    JUDGE,
)
from vectormill.jobs.item import MAX_PAIRS_BYTES, join_pair, pair_with_each, split_pair

SPEC = EncodingSpec("m", "r", "mean", True, 8, "query: ", 64)
IN_PASSAGES = replace(SPEC, long_texts=PASSAGES, passage_overlap=8)
STORED: Final[dict[str, Any]] = {
    "model": "m", "revision": "r", "pooling": "mean", "normalize": True, "dimensions": 8, "prompt": "query: ",
    "max_tokens": 64, "long_texts": TRUNCATE, "passage_overlap": 0, "vector_type": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("vector_type", "is_same"),
    [
        ("float16", True),  # what a collection holds unless it is told otherwise
        ("float32", False),
        ("int8", False),
        ("binary", False),
    ],
)
def test_a_vector_type_that_a_collection_has_anyway_is_no_other_space(
    vector_type: str, is_same: bool
) -> None:
    spec = replace(SPEC, vector_type=vector_type)
    assert (spec.fingerprint() == SPEC.fingerprint()) is is_same
    assert spec.content() != SPEC.content()  # a job without a collection gets other numbers


def test_the_fingerprint_of_a_spec_never_changes() -> None:
    assert SPEC.fingerprint() == "15a39d8e2c8f265a"
    assert replace(SPEC, long_texts=FAIL).fingerprint() == SPEC.fingerprint()
    assert IN_PASSAGES.fingerprint() == "7d5fdfc02800467a"


def test_passages_are_another_vector_space_and_so_is_another_overlap() -> None:
    others = [IN_PASSAGES, replace(IN_PASSAGES, passage_overlap=0)]
    assert len({spec.fingerprint() for spec in (SPEC, *others)}) == 3


def test_late_chunking_is_a_space_of_its_own_and_for_older_workers_another_model() -> None:
    late = replace(IN_PASSAGES, long_texts=LATE, pooling=LATE_POOLING)
    assert (
        len({spec.fingerprint() for spec in (SPEC, IN_PASSAGES, late, replace(late, passage_overlap=0))}) == 4
    )
    assert late.fingerprint() == "d523486fb7dd9ad0"
    assert (late.model_pooling, SPEC.model_pooling) == ("mean", "mean")
    assert (late.reads_pairs, IN_PASSAGES.reads_pairs) == (True, False)


def test_a_spec_is_read_as_it_was_written_and_what_is_not_known_is_passed_over() -> None:
    for spec in (
        SPEC,
        replace(SPEC, long_texts=FAIL),
        IN_PASSAGES,
        replace(SPEC, vector_type="int8"),
        SCORES,
        RECORDS,
    ):
        assert EncodingSpec.from_json(spec.to_json() | {"of a later release": 1}) == spec


def test_a_spec_is_stored_by_the_names_of_its_fields() -> None:
    assert SPEC.to_json() == STORED
    assert EncodingSpec.from_json(STORED) == SPEC


SCORES = replace(SPEC, task=JUDGE, labels=("no", "yes"), activation="softmax", dimensions=2)
RECORDS = replace(SPEC, task=EXTRACT, extract_schema='{"a":null}', dimensions=0)
TEXTS = st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))


@given(TEXTS, TEXTS)
def test_a_pair_comes_apart_as_it_was_joined(first: bytes, second: bytes) -> None:
    assert split_pair(join_pair(first, second)) == (first, second)
    assert split_pair(first) == (first, None)


def test_a_long_query_with_many_documents_is_refused_before_any_pair_is_made() -> None:
    assert pair_with_each(b"q", [b"a", b"b"]) == [join_pair(b"q", b"a"), join_pair(b"q", b"b")]
    query = b"q" * 1_000_000
    tracemalloc.start()
    with pytest.raises(InvalidOption, match=f"{MAX_PAIRS_BYTES:,}"):
        pair_with_each(query, [b"document"] * 1000)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_whatever_decides_a_result_is_in_the_fingerprint() -> None:
    changed = [
        SPEC,
        SCORES,
        replace(SCORES, labels=("yes", "no")),
        replace(SCORES, activation="raw"),
        RECORDS,
        replace(RECORDS, extract_schema='{"b":null}'),
        replace(RECORDS, confidences=True),
    ]
    assert len({spec.fingerprint() for spec in changed}) == len(changed)
