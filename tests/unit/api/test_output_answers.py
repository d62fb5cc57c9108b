"""The answers of OpenAI's, Cohere's and text-embeddings-inference's routes with several outputs of each text."""

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from api.openai.operations import CohereEmbedRequest
from api.openai.routes import list_weights, measure_results, write_answer, write_cohere_answer
from api.queries import Answered, cut_parts
from tests.kinds import MANY, representations_of
from tests.protocol import SPEC
from vectormill.batches.endpoints import EmbeddingsRequest
from vectormill.vectors.representations import Representations

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
