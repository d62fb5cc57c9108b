"""A spec's fingerprint and JSON are read by other releases: what they are, they stay."""

from dataclasses import replace
from typing import Any, Final

import pytest

from vectormill.domain.encoding import FAIL, PASSAGES, TRUNCATE, EncodingSpec

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


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, long_texts=FAIL), IN_PASSAGES, replace(SPEC, vector_type="int8")]
)
def test_a_spec_is_read_as_it_was_written_and_what_is_not_known_is_passed_over(spec: EncodingSpec) -> None:
    assert EncodingSpec.from_json(spec.to_json() | {"of a later release": 1}) == spec


def test_a_spec_is_stored_by_the_names_of_its_fields() -> None:
    assert SPEC.to_json() == STORED
    assert EncodingSpec.from_json(STORED) == SPEC
