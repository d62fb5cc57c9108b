"""How a model's rows become representations, and which changes of them show a faulty process."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.rounds import ask, finish
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.task import DENSE, MULTI_VECTOR, OUTPUTS, SPARSE
from vectormill.jobs.item import NON_FINITE_VECTOR
from vectormill.models.model_card import ModelCard, SparseHead, TokenHead
from vectormill.models.specs import make_spec
from vectormill.ragged import Ragged
from vectormill.vectors.representations import Representations, unpack
from worker.batching.batch import Batch
from worker.encoder.outputs import BITS, find_bits, find_wanted, read_row
from worker.tasks.embed import find_changed_outputs, find_marks, represent
from worker.tasks.task import Finished
from worker.tokens.tokenized import TokenizedTexts

M3 = ModelCard(
    "m3", Path("m3"), "1", "XLMRobertaModel", 4, 512, ("cls",), normalize=True, outputs=OUTPUTS,
    sparse_dimensions=50, token_dimensions=2, sparse_head=SparseHead("sparse_linear.pt", left_out=(0, 2)),
    token_head=TokenHead(file="colbert_linear.pt", skips_first=True),
)  # fmt: skip
WORDS = ModelCard(
    "splade", Path("s"), "1", "BertForMaskedLM", 0, 512, (), normalize=False, outputs=(SPARSE,),
    sparse_dimensions=6, sparse_head=SparseHead(),
)  # fmt: skip
COLBERT = ModelCard(
    "colbert", Path("c"), "1", "HF_ColBERT", 0, 40, (), normalize=False, outputs=(MULTI_VECTOR,), token_dimensions=2,
    prompts={"query": "[Q] ", "document": "[D] "}, default_prompt="[D] ",
    token_head=TokenHead(
        skiplist=(9,), query_prompt="[Q] ", markers=(("[Q] ", 91), ("[D] ", 92)), most_query_tokens=8,
        fewest_query_tokens=8, filler=103,
    ),
)  # fmt: skip
IDS = [0, 7, 9, 7, 2]


def texts_of(*rows: list[int]) -> TokenizedTexts:
    ids = [np.array(row, np.int32) for row in rows]
    return TokenizedTexts.from_rows(ids, np.zeros(len(rows), np.bool_), {})


def row_of(
    dense: Sequence[float] = (), weights: Sequence[float] = (), vectors: Sequence[float] = ()
) -> NDArray[np.uint8]:
    parts = (np.array(dense, np.float32), np.array(weights, np.float32), np.array(vectors, np.float16))
    return np.concatenate([part.view(np.uint8) for part in parts])


def compute(card: ModelCard, spec: EncodingSpec, *rows: NDArray[np.uint8]) -> Finished:
    rounds = represent(card, spec, texts_of(*[IDS] * len(rows)), {}, {})
    _, constants = ask(rounds)
    assert constants["outputs"] == find_bits(spec.outputs.split(","))
    return finish(rounds, Ragged.from_rows(rows, np.uint8))


def test_a_word_has_the_largest_weight_of_its_tokens_and_special_ones_have_none() -> None:
    spec = make_spec(M3, EncodingOptions(outputs="dense,sparse,multi_vector", dimensions=2))
    vectors = [1, 0, 0, 1, 1, 0, 0, 1]
    finished = compute(M3, spec, row_of([3, 4, 5, 6], [9, 0.25, 0.0, 0.5, 9], vectors))
    found = unpack(finished.results.row(0).tobytes())
    np.testing.assert_allclose(found.dense, [0.6, 0.8])  # cut before it is normalized
    assert (found.indices.tolist(), found.weights.tolist()) == ([7], [0.5])
    assert found.vectors.tolist() == np.array(vectors).reshape(4, 2).tolist()


@pytest.mark.parametrize("place", range(3))
def test_a_text_with_a_number_that_is_not_finite_fails_alone(place: int) -> None:
    spec = make_spec(M3, EncodingOptions(outputs="dense,sparse,multi_vector"))
    parts = [[1.0] * 4, [1.0] * 5, [1.0] * 8]
    parts[place] = [*parts[place][:-2], float("nan"), 1.0]
    finished = compute(M3, spec, row_of(*parts), row_of([1] * 4, [1] * 5, [1] * 8))
    assert {index: failure.code for index, failure in finished.failures.items()} == {0: NON_FINITE_VECTOR}
    assert finished.results.lengths.tolist()[0] == 0
    assert len(unpack(finished.results.row(1).tobytes()).vectors) == 4
    assert finished.num_tokens.tolist() == [0, 5]


def test_documents_lose_the_vectors_of_the_skiplist_and_queries_keep_them() -> None:
    row = row_of(vectors=list(range(10)))
    for prompt, num_vectors in (("document", 4), ("query", 5)):
        spec = make_spec(COLBERT, EncodingOptions(prompt=prompt))
        found = unpack(compute(COLBERT, spec, row).results.row(0).tobytes())
        assert found.vectors.shape == (num_vectors, 2)


@pytest.mark.parametrize(
    ("prompt", "rows", "expected", "max_tokens"),
    [
        ("query", [[0, 5, 2]], [[0, 91, 5, 2, 103, 103, 103, 103]], 7),  # filled up
        (
            "query",
            [[0, 5, 6, 7, 8, 4, 2], []],
            [[0, 91, 5, 6, 7, 8, 4, 2], []],
            7,
        ),  # a failed text has no tokens
        (None, [[0, 5, 2], [0, 2]], [[0, 92, 5, 2], [0, 92, 2]], 39),  # a document
        ("", [[0, 5, 2]], [[0, 5, 2]], 40),  # nothing says what it is
    ],
)
def test_a_text_is_marked_as_its_prompt_says(
    prompt: str | None, rows: list[list[int]], expected: list[list[int]], max_tokens: int
) -> None:
    marks = find_marks(COLBERT, make_spec(COLBERT, EncodingOptions(prompt=prompt)))
    found = marks.put_into(texts_of(*rows), num_prefix=1)
    assert [found.ids(index).tolist() for index in range(len(rows))] == expected
    assert (marks.prompt, marks.max_tokens) == ("", max_tokens)


def test_what_follows_a_marker_is_put_before_the_text() -> None:
    marks = find_marks(COLBERT, make_spec(COLBERT, EncodingOptions(prompt="[Q] find: ")))
    assert (marks.prompt, marks.token, marks.fewest) == ("find: ", 91, 8)


def test_a_batch_of_different_wishes_gives_each_sequence_what_it_asks_for() -> None:
    wishes = [BITS[DENSE] | BITS[MULTI_VECTOR], 0, BITS[SPARSE]]
    ids = [np.arange(length, dtype=np.int32) for length in (3, 1, 2)]
    batch = Batch({**Batch.from_ids(ids).inputs, "outputs": Ragged.from_scalars(np.array(wishes, np.int32))})
    wanted = [find_wanted(batch, M3, shape) for shape in ((3, 4), (6,))]
    places = [
        {name: found.tolist() for name, found in each.places.items()} for each in wanted if each is not None
    ]
    assert places == [{MULTI_VECTOR: [1, 2], SPARSE: [8, 9]}, {MULTI_VECTOR: [1, 2], SPARSE: [4, 5]}]
    content = row_of(list(range(12)), [0.5, 0.75], [1, 2, 3, 4])
    assert wanted[0] is not None
    rows = wanted[0].lay_out(M3, content)
    first, second, third = (
        read_row(rows.row(index), bits or BITS[DENSE], len(ids[index]), M3)
        for index, bits in enumerate(wishes)
    )
    assert (first.dense.tolist(), first.vectors.tolist()) == ([0, 1, 2, 3], [[1, 2], [3, 4]])
    assert (second.dense.tolist(), len(second.weights)) == ([4, 5, 6, 7], 0)
    assert (len(third.dense), third.weights.tolist()) == (0, [0.5, 0.75])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"weights": [0.5, 0.0, 1.0, 0.004, 0.0]}, ""),  # a small weight that rounding has made
        ({"weights": [0.5, 0.0, 0.8, 0.0, 0.0]}, "a sparse weight has changed by 0.2"),
        ({"weights": [0.5, 0.3, 1.0, 0.0, 0.0]}, "a sparse weight has changed by 0.3"),
        ({"dense": [1.0, 0.0, 0.0, 1.0]}, "its vector has changed to a cosine of 0.000"),
        ({"vectors": [0, 1, 0, 1, 0, 1, 1, 0]}, "its vector has changed to a cosine of 0.000"),
        ({"vectors": [0, 1, 0, 1, 0, 1, float("inf"), 1]}, "its answer is not finite"),
        ({"vectors": [0, 1]}, "its answer cannot be read"),
    ],
)
def test_a_changed_output_of_a_known_text_is_a_flaw_unless_rounding_explains_it(
    change: dict[str, list[float]], said: str
) -> None:
    sound = {
        "dense": [0.0, 1.0, 1.0, 0.0],
        "weights": [0.5, 0.0, 1.0, 0.0, 0.0],
        "vectors": [0, 1, 0, 1, 0, 1, 0, 1],
    }
    rows = [row_of(**sound), row_of(**{**sound, **change})]  # type: ignore[arg-type]
    bits = find_bits(OUTPUTS)
    found = find_changed_outputs(
        Ragged.from_rows(rows, np.uint8), rows[0], bits, [len(IDS) + 3, len(IDS)], M3
    )
    assert found.startswith(said)
    assert bool(found) is bool(said)


def test_weights_of_words_are_compared_word_by_word() -> None:
    def weigh(*pairs: tuple[int, float]) -> NDArray[np.uint8]:
        words, weights = zip(*pairs, strict=True)
        return np.concatenate(
            (np.array(words, np.uint32).view(np.uint8), np.array(weights, np.float32).view(np.uint8))
        )

    expected = weigh((1, 0.5), (4, 1.0))
    for row, is_flaw in ((weigh((1, 0.5), (2, 0.01), (4, 1.0)), False), (weigh((2, 0.5), (4, 1.0)), True)):
        found = find_changed_outputs(Ragged.from_rows([row], np.uint8), expected, BITS[SPARSE], [9], WORDS)
        assert bool(found) is is_flaw


def test_outputs_that_were_not_asked_for_are_empty() -> None:
    found = unpack(
        compute(M3, make_spec(M3, EncodingOptions(outputs="sparse")), row_of(weights=[1] * 5))
        .results.row(0)
        .tobytes()
    )
    nothing = Representations()
    assert (found.dense.shape, found.vectors.shape) == (nothing.dense.shape, nothing.vectors.shape)
