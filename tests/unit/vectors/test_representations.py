"""The packed form of representations, and the specs of jobs that ask for several outputs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, MULTI_VECTOR, OUTPUTS, REPRESENTATIONS, SPARSE, VECTOR
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import make_spec
from vectormill.vectors.representations import Representations, measure_agreement, unpack

CARD = ModelCard(
    "m", Path("m"), "1", "XLMRobertaModel", 1024, 512, ("cls",), normalize=True,
    outputs=(DENSE, SPARSE, MULTI_VECTOR), sparse_dimensions=250_002, token_dimensions=128,
)  # fmt: skip


def test_a_packed_form_gives_back_each_output() -> None:
    numbers = np.random.default_rng(7)
    whole = Representations(
        numbers.normal(size=5).astype(np.float32),
        np.array([3, 250_001], np.uint32),
        np.array([0.5, 1.25], np.float32),
        numbers.normal(size=(4, 3)).astype(np.float16),
    )
    for kept in (
        whole,
        replace(whole, dense=Representations().dense),
        Representations(vectors=whole.vectors[:0]),
    ):
        read = unpack(b"..".join((b"", kept.pack()))[2:])
        for name in ("dense", "indices", "weights", "vectors"):
            np.testing.assert_array_equal(getattr(read, name), getattr(kept, name))
            assert getattr(read, name).shape == getattr(kept, name).shape


def test_agreement_sees_direction_length_and_what_is_not_a_number_in_each_output() -> None:
    one = Representations(
        np.array([1, 2, 3], np.float32),
        np.array([1, 7], np.uint32),
        np.array([2, 1], np.float32),
        np.array([[1, 2], [3, 4]], np.float16),
    )
    nan = float("nan")
    cases: list[tuple[dict[str, Any], tuple[float, float, float]]] = [
        ({}, (1, 1, 1)),
        ({"dense": one.dense * 2}, (1, 1, 1)),  # a search compares angles
        ({"dense": -one.dense}, (-1, 1, 1)),
        ({"dense": one.dense[:2]}, (0, 1, 1)),
        ({"dense": one.dense * np.float32(nan)}, (nan, 1, 1)),
        ({"weights": one.weights * 2}, (1, 0.75, 1)),  # and products of these
        ({"weights": one.weights * np.float32(nan)}, (1, nan, 1)),
        ({"indices": np.array([1, 8], np.uint32)}, (1, 0.8, 1)),
        ({"indices": one.indices[:0], "weights": one.weights[:0]}, (1, -1, 1)),
        ({"vectors": one.vectors * np.float16(2)}, (1, 1, 0.75)),
        ({"vectors": one.vectors * np.array([[1], [-1]], np.float16)}, (1, 1, -1)),
        ({"vectors": one.vectors[:1]}, (1, 1, 0)),
    ]
    for change, expected in cases:
        found = measure_agreement(one, replace(one, **change))
        assert list(found) == [DENSE, SPARSE, MULTI_VECTOR]
        assert list(found.values()) == pytest.approx(list(expected), abs=1e-6, nan_ok=True), change
    nothing = Representations()
    assert measure_agreement(nothing, nothing) == {DENSE: 1, SPARSE: 1, MULTI_VECTOR: 1}


@pytest.mark.parametrize("change", [-1, 1])
def test_bytes_of_another_length_are_refused(change: int) -> None:
    packed = Representations(np.ones(3, np.float32)).pack()
    with pytest.raises(ValueError, match="a packed form of 28 bytes has"):
        unpack(packed[:change] if change < 0 else packed + bytes(change))


def test_a_job_without_outputs_gets_the_first_of_its_model() -> None:
    spec = make_spec(CARD, EncodingOptions())
    assert (spec.outputs, spec.result, spec.dimensions) == (DENSE, VECTOR, 1024)
    assert "outputs" not in spec.to_json() | spec.vector_space(), (
        "fingerprints of dense vectors must not change"
    )
    sparse = make_spec(replace(CARD, outputs=(SPARSE,)), EncodingOptions())
    assert (sparse.outputs, sparse.dimensions, sparse.normalize) == (SPARSE, 0, False)


def test_outputs_are_kept_in_one_order_and_survive_their_stored_form() -> None:
    spec = make_spec(CARD, EncodingOptions(outputs="multi_vector, dense,sparse"))
    assert spec.outputs == ",".join(OUTPUTS)
    assert (spec.result, spec.sparse_dimensions, spec.token_dimensions) == (REPRESENTATIONS, 250_002, 128)
    assert EncodingSpec.from_json(spec.to_json()) == spec
    spaces = {
        make_spec(CARD, EncodingOptions(outputs=named)).fingerprint()
        for named in ("dense", "sparse", spec.outputs)
    }
    assert len(spaces) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (EncodingOptions(outputs="dense,words"), "outputs must be some of dense, sparse, multi_vector"),
        (EncodingOptions(outputs=""), "outputs must be some of"),
        (EncodingOptions(outputs="dense,sparse", long_texts="passages"), "averages dense vectors"),
        (
            EncodingOptions(outputs="dense,sparse", vector_type="int8"),
            "vector_type must be float16 or float32",
        ),
        (
            EncodingOptions(outputs="sparse", dimensions=64),
            "dimensions has no effect without the output dense",
        ),
    ],
)
def test_what_outputs_cannot_have_is_refused(options: EncodingOptions, said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        make_spec(CARD, options)
