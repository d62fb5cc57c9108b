"""Tasks: what specs say of them and to whom, and how two texts are one item."""

import tracemalloc
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import (
    ACTIVATIONS,
    EXTRACT,
    JUDGE,
    RESULT_ROUTES,
    TASKS,
    ActivationName,
)
from vectormill.jobs.item import MAX_PAIRS_BYTES, join_pair, pair_with_each, split_pair

VECTORS = EncodingSpec("m", "1", "mean", normalize=True, dimensions=8, prompt="", max_tokens=64)
SCORES = replace(VECTORS, task=JUDGE, labels=("no", "yes"), activation="softmax", dimensions=2)
RECORDS = replace(VECTORS, task=EXTRACT, extract_schema='{"a":null}', dimensions=0)
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


def test_every_task_has_a_route_for_what_comes_of_it() -> None:
    assert {task.result for task in TASKS.values()} == RESULT_ROUTES.keys()
    assert get_args(ActivationName) == ACTIVATIONS


@pytest.mark.parametrize("spec", [VECTORS, SCORES, RECORDS], ids=lambda spec: spec.task)
def test_a_spec_is_read_as_it_was_written(spec: EncodingSpec) -> None:
    assert EncodingSpec.from_json(spec.to_json()) == spec


def test_a_spec_of_vectors_tells_nothing_of_other_tasks() -> None:
    assert not {"task", "labels", "activation", "extract_schema", "confidences"} & VECTORS.to_json().keys()


def test_whatever_decides_a_result_is_in_the_fingerprint() -> None:
    changed = [
        VECTORS,
        SCORES,
        replace(SCORES, labels=("yes", "no")),
        replace(SCORES, activation="raw"),
        RECORDS,
        replace(RECORDS, extract_schema='{"b":null}'),
        replace(RECORDS, confidences=True),
    ]
    assert len({spec.fingerprint() for spec in changed}) == len(changed)
