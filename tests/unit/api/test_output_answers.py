"""The answers of OpenAI's, Cohere's and text-embeddings-inference's routes with several outputs of each text."""

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from api.openai.operations import CohereEmbedRequest
from api.openai.routes import (
    describe_bytes,
    list_weights,
    measure_results,
    pack_rows,
    write_answer,
    write_cohere_answer,
)
from api.queries import Answered, cut_parts
from tests.kinds import MANY, representations_of
from tests.protocol import SPEC
from vectormill.batches.endpoints import EmbeddingsRequest
from vectormill.domain.errors import InvalidOption
from vectormill.vectors.representations import Representations
from vectormill.vectors.vector_types import Rows

TEXTS = (b"one", b"two", b"three")
ROWS = [representations_of(text) for text in TEXTS]


def answer(rows: list[Representations] = ROWS) -> Answered:
    vectors = np.empty(len(rows), np.object_)
    vectors[:] = rows
    no_failures = np.full(len(rows), None, np.object_)
    return Answered(vectors, no_failures, np.full(len(rows), 4, np.int32), np.zeros(len(rows), np.bool_))


def sparse_of(row: Representations) -> dict[str, Any]:
    return {"indices": row.indices.tolist(), "weights": row.weights.tolist()}


def test_an_embedding_has_each_output_beside_the_dense_one() -> None:
    request = EmbeddingsRequest(["one", "two", "three"], outputs=["dense", "sparse", "multi_vector"])
    assert request.encoding().options.outputs == "dense,sparse,multi_vector"
    told = json.loads(write_answer(request, answer(), MANY))
    for index, (item, row) in enumerate(zip(told["data"], ROWS, strict=True)):
        assert item == {
            "index": index,
            "object": "embedding",
            "embedding": row.dense.tolist(),
            "sparse": sparse_of(row),
            "multi_vector": row.vectors.tolist(),
        }
    packed = json.loads(write_answer(replace_format(request, "base64"), answer(), MANY))
    first = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(first, ROWS[0].dense)


def replace_format(request: EmbeddingsRequest, name: str) -> EmbeddingsRequest:
    return EmbeddingsRequest(request.input, encoding_format=name, outputs=request.outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding_format", [None, "base64"])
def test_an_output_that_was_not_asked_for_is_left_out(encoding_format: str | None) -> None:
    spec = MANY.narrow(["sparse"])
    rows = [representations_of(text, spec) for text in TEXTS]
    request = EmbeddingsRequest("one", encoding_format=encoding_format)  # type: ignore[arg-type]
    told = json.loads(write_answer(request, answer(rows), spec))
    assert [item.keys() - {"index", "object"} for item in told["data"]] == [{"sparse"}] * 3


HALVES = arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(2.0**-7, 65504, width=32)
)


@given(HALVES, st.sampled_from(["float32", "float16"]))
def test_base64_and_bytes_are_the_numbers_that_numpy_rounds_to(vectors: Rows, name: Any) -> None:
    for sign in (1, -1):
        rows = vectors * np.float32(sign)
        expected = rows.astype(name)
        answered = answer()._replace(vectors=rows)
        packed = EmbeddingsRequest("one", encoding_format="base64", embed_dtype=name)
        told = json.loads(write_answer(packed, answered, SPEC))["data"]
        found = b"".join(base64.b64decode(item["embedding"]) for item in told)
        assert found == expected.tobytes() == pack_rows(rows, packed).tobytes()
        metadata = json.loads(describe_bytes(packed, answered)["metadata"])
        (block,) = metadata["data"]
        assert metadata["usage"]["prompt_tokens"] == answered.num_tokens
        assert (block["shape"], block["end"]) == (list(rows.shape), len(found))
        np.testing.assert_array_equal(np.frombuffer(found, name).reshape(block["shape"]), expected)


@pytest.mark.parametrize(
    ("numbers", "is_held"),
    [
        ((65504.0, 1.0), True),  # the largest
        ((65520.0, 1.0), False),  # would be rounded to infinity
        ((1e-9, -1e-9), False),  # would both be 0
        ((1e-9, 1.0), True),
    ],
)
def test_a_vector_that_float16_cannot_hold_is_refused_by_its_place(
    numbers: tuple[float, float], is_held: bool
) -> None:
    rows = np.array([[1.0, 0.0], numbers], np.float32)
    halves = EmbeddingsRequest("one", encoding_format="bytes", embed_dtype="float16")
    assert np.isfinite(pack_rows(rows, replace_format(halves, "bytes"))).all()  # float32
    if is_held:
        assert np.isfinite(pack_rows(rows, halves)).all()
    else:
        with pytest.raises(InvalidOption, match="the vector of input 1"):
            pack_rows(rows, halves)


def test_a_type_without_a_form_that_has_it_is_refused() -> None:
    with pytest.raises(InvalidOption, match="embed_dtype is the type of numbers in base64 and bytes"):
        EmbeddingsRequest("one", embed_dtype="float16").encoding()


def test_weights_are_told_as_text_embeddings_inference_does() -> None:
    row = ROWS[0]
    pairs = zip(row.indices.tolist(), row.weights.tolist(), strict=True)
    assert list_weights(row) == [{"index": index, "value": weight} for index, weight in pairs]
    assert list_weights(Representations()) == []
    tenth = Representations(indices=np.array([7], np.uint32), weights=np.array([0.1], np.float32))
    assert json.dumps(list_weights(tenth)) == '[{"index": 7, "value": 0.1}]'


def test_cohere_s_types_have_each_output_once() -> None:
    asked = CohereEmbedRequest(["a"], embedding_types=["float", "ubinary", "sparse", "multi_vector"])
    assert asked.encoding().options.outputs == "dense,multi_vector,sparse"
    told = json.loads(write_cohere_answer(asked, answer()))["embeddings"]
    assert told["float"] == [row.dense.tolist() for row in ROWS]
    assert told["ubinary"] == [np.packbits(row.dense > 0).tolist() for row in ROWS]
    assert told["sparse"] == [sparse_of(row) for row in ROWS]
    assert told["multi_vector"] == [row.vectors.tolist() for row in ROWS]
    alone = json.loads(write_cohere_answer(CohereEmbedRequest(["a"], embedding_types=["sparse"]), answer()))
    assert alone["embeddings"] == {"sparse": [sparse_of(row) for row in ROWS]}


def test_a_message_and_an_answer_are_bounded_by_the_vectors_of_their_tokens() -> None:
    wide = replace(MANY, token_dimensions=1024)
    assert [len(part) for part in cut_parts(wide, [b"t" * 20_000] * 4)] == [1] * 4
    assert len(list(cut_parts(SPEC, [b"t" * 20_000] * 4))) == 1
    assert measure_results(SPEC, [b"text"] * 3) == 4 * 8 * 3
    assert measure_results(wide, [b"t" * 10, b"t" * 1000]) > 2 * 1024 * (10 + wide.max_tokens)
