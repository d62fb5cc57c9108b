"""A spec's fingerprint and JSON are read by other releases: what they were, they stay."""

from dataclasses import replace
from typing import Any, Final

import pytest

from vectormill.domain.encoding import FAIL, PASSAGES, TRUNCATE, VECTOR_TYPES, EncodingSpec

SPEC = EncodingSpec("m", "r", "mean", True, 8, "query: ", 64)
IN_PASSAGES = replace(SPEC, long_texts=PASSAGES, passage_overlap=8)
# All that the first release reads of a stored spec, and hashes.
OLD_NAMES: Final = (
    "model",
    "revision",
    "pooling",
    "normalize",
    "dimensions",
    "prompt",
    "max_tokens",
    "truncate",
)
OLD_JSON: Final[dict[str, Any]] = {
    "model": "m", "revision": "r", "pooling": "mean", "normalize": True, "dimensions": 8, "prompt": "query: ",
    "max_tokens": 64, "truncate": True,
}  # fmt: skip


@pytest.mark.parametrize("vector_type", VECTOR_TYPES)
def test_a_worker_of_the_first_release_refuses_a_vector_type_instead_of_writing_its_own(
    vector_type: str,
) -> None:
    stored = replace(SPEC, vector_type=vector_type).to_json()
    assert stored["pooling"] == f"mean/vectors:{vector_type}"
    in_passages = replace(IN_PASSAGES, vector_type=vector_type)
    assert in_passages.to_json()["pooling"] == f"mean/passages:8/vectors:{vector_type}"
    assert EncodingSpec.from_json(in_passages.to_json()) == in_passages


@pytest.mark.parametrize(
    ("vector_type", "is_same"),
    [
        ("float16", True),  # what a collection of the first release holds
        ("float32", False),
        ("int8", False),
        ("binary", False),
    ],
)
def test_a_vector_type_that_a_collection_has_anyway_is_no_other_space(
    vector_type: str, is_same: bool
) -> None:
    spec = replace(SPEC, vector_type=vector_type)
    assert (spec.fingerprint() == "15a39d8e2c8f265a") is is_same
    assert spec.content() != SPEC.content()  # a job without a collection gets other numbers


def test_the_fingerprint_of_a_spec_without_passages_is_that_of_the_first_release() -> None:
    assert SPEC.fingerprint() == "15a39d8e2c8f265a"
    assert replace(SPEC, long_texts=FAIL).fingerprint() == SPEC.fingerprint()


def test_passages_are_another_vector_space_and_so_is_another_overlap() -> None:
    others = [IN_PASSAGES, replace(IN_PASSAGES, passage_overlap=9)]
    assert len({spec.fingerprint() for spec in (SPEC, *others)}) == 3


@pytest.mark.parametrize(("truncate", "policy"), [(True, TRUNCATE), (False, FAIL)])
def test_a_spec_that_the_first_release_stored_is_read(truncate: bool, policy: str) -> None:
    assert EncodingSpec.from_json(OLD_JSON | {"truncate": truncate}) == replace(SPEC, long_texts=policy)


@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, long_texts=FAIL), IN_PASSAGES, replace(SPEC, vector_type="int8")]
)
def test_a_spec_is_read_as_it_was_written_and_what_is_not_known_is_passed_over(spec: EncodingSpec) -> None:
    assert EncodingSpec.from_json(spec.to_json() | {"of a later release": 1}) == spec


@pytest.mark.parametrize(
    ("spec", "truncate"), [(SPEC, True), (replace(SPEC, long_texts=FAIL), False)]
)  # what is stored serves workers of the first release too
def test_the_first_release_reads_what_is_stored_now(spec: EncodingSpec, truncate: bool) -> None:
    stored = spec.to_json()
    assert {name: stored[name] for name in OLD_NAMES} == OLD_JSON | {"truncate": truncate}
    assert spec.content() == OLD_JSON | {"truncate": truncate}
    assert list(spec.content()) == list(OLD_NAMES)  # an Idempotency-Key's hash depends on their order


def test_a_worker_of_the_first_release_refuses_passages_instead_of_cutting() -> None:
    read = {name: IN_PASSAGES.to_json()[name] for name in OLD_NAMES}
    assert (
        read["pooling"] == "mean/passages:8"
    )  # no model has this pooling, so its chunk goes to another worker
    assert EncodingSpec.from_json(read | {"long_texts": PASSAGES, "passage_overlap": 8}).pooling == "mean"
