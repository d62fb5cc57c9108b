"""Requests for other outputs than a dense vector: from a model's rows to the packed form of representations."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.jobs.item import ItemFailure
from vectormill.jobs.vector_failures import find_vector_failures
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from vectormill.vectors.representations import Representations
from worker.batching.batch import OUTPUTS
from worker.encoder.outputs import BITS, RawOutputs, count_skipped, find_bits, read_row, weighs_tokens
from worker.tasks.finishing import LARGEST_CHANGE, SMALLEST_SIZE, fail_unless, find_turned, finish_vectors
from worker.tasks.task import Finished
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts


@dataclass(frozen=True, slots=True)
class Marks:
    """What is put into a text's tokens to tell queries from documents, as ColBERT's authors do.

    `prompt` and `max_tokens` are those that the text is tokenized with. `token` follows the special tokens before
    the text, if it is not None, and `filler` is added until there are `fewest` tokens.
    """

    prompt: str
    max_tokens: int
    token: int | None = None
    fewest: int = 0
    filler: int = 0

    def put_into(self, texts: TokenizedTexts, num_prefix: int) -> TokenizedTexts:
        """Return the texts with these tokens, behind `num_prefix` special ones; a text without tokens stays so."""
        if self.token is None and not self.fewest:
            return texts
        ids = texts.inputs[INPUT_IDS]
        num_marks = int(self.token is not None)
        lengths = np.where(ids.lengths > 0, np.maximum(ids.lengths + num_marks, self.fewest), 0)
        marked = Ragged.from_lengths(np.full(lengths.sum(), self.filler, np.int32), lengths)
        places = np.arange(len(ids.covered)) - np.repeat(ids.offsets[:-1] - ids.offsets[0], ids.lengths)
        starts = np.repeat(marked.offsets[:-1], ids.lengths)
        marked.values[starts + places + num_marks * (places >= num_prefix)] = ids.covered
        if self.token is not None:
            marked.values[marked.offsets[:-1][lengths > 0] + num_prefix] = self.token
        return replace(texts, inputs={INPUT_IDS: marked})


def find_marks(card: ModelCard, spec: EncodingSpec) -> Marks:
    """Return the marks of texts with the spec's prompt; a model without vectors of tokens has none."""
    head = card.token_head
    if head is None:
        return Marks(spec.prompt, spec.max_tokens)
    token, rest = head.split_prompt(spec.prompt)
    is_query = head.is_query(spec.prompt)
    most = (
        min(spec.max_tokens, head.most_query_tokens)
        if is_query and head.most_query_tokens
        else spec.max_tokens
    )
    return Marks(
        rest, most - (token is not None), token, head.fewest_query_tokens if is_query else 0, head.filler
    )


class Representing:
    """The state of one request for several outputs. Implements RequestState.

    A result is the packed form of its text's Representations, and empty for a text that failed.
    """

    def __init__(
        self,
        card: ModelCard,
        spec: EncodingSpec,
        texts: TokenizedTexts,
        failures: Mapping[int, ItemFailure],
        constants: Mapping[str, int],
    ) -> None:
        self._card = card
        self._spec = spec
        self._texts = texts
        self._failures = {**texts.failures, **failures}
        self._bits = find_bits(spec.outputs.split(","))
        self.constants = {**constants, OUTPUTS: self._bits}
        self._results = Ragged.from_lengths(np.zeros(0, np.uint8), np.zeros(len(texts), np.int64))

    def start(self) -> TokenizedTexts:
        return self._texts

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> None:
        self._results = results
        self._failures |= failures

    def finish(self) -> Finished:
        texts, ids = self._texts, self._texts.inputs[INPUT_IDS]
        is_finite = np.ones(len(texts), np.bool_)
        rows = [b""] * len(texts)
        for index in [index for index in range(len(texts)) if index not in self._failures]:
            raw = read_row(self._results.row(index), self._bits, int(texts.lengths[index]), self._card)
            is_finite[index] = is_finite_whole(raw)
            if is_finite[index]:
                outputs = finish_outputs(raw, ids.row(index), self._bits, self._card, self._spec)
                unfit = find_vector_failures(outputs.dense[np.newaxis])
                self._failures |= {index + row: failure for row, failure in unfit.items()}
                rows[index] = b"" if unfit else outputs.pack()
        fail_unless(is_finite, self._failures)
        failed = list(self._failures)
        lengths, truncated = texts.lengths.astype(np.int32), texts.truncated.copy()
        lengths[failed], truncated[failed] = 0, False
        row_lengths = np.array(list(map(len, rows)), np.int64)
        results = Ragged.from_lengths(np.frombuffer(b"".join(rows), np.uint8), row_lengths)
        return Finished(results, self._failures, lengths, truncated, np.zeros(len(texts), np.int32))


def finish_outputs(
    raw: RawOutputs, ids: "NDArray[Any]", bits: int, card: ModelCard, spec: EncodingSpec
) -> Representations:
    """Return the outputs of the text with these token ids as the authors' code and the spec define them."""
    dense, words, weights, vectors = raw.dense, raw.words, raw.weights, raw.vectors
    if bits & BITS[DENSE]:
        (dense,) = finish_vectors(dense[np.newaxis].copy(), spec)
    if bits & BITS[SPARSE] and weighs_tokens(card):
        assert card.sparse_head is not None
        words, weights = join_tokens(ids, weights, card.sparse_head.left_out)
    if bits & BITS[MULTI_VECTOR]:
        assert card.token_head is not None
        head = card.token_head
        if head.skiplist and (head.skips_in_queries or not head.is_query(spec.prompt)):
            vectors = vectors[~np.isin(ids[count_skipped(card) :], head.skiplist)]
    return Representations(dense, words, weights, vectors)


def join_tokens(
    ids: "NDArray[Any]", weights: NDArray[np.float32], left_out: tuple[int, ...]
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Return the distinct tokens with a weight, ascending, and the largest weight of each.

    FlagEmbedding does the same (`inference/embedder/encoder_only/m3.py`, `_process_token_weights`).
    """
    counts = ~np.isin(ids, left_out) & (weights > 0)
    words, places = np.unique(ids[counts], return_inverse=True)
    largest = np.zeros(len(words), np.float32)
    np.maximum.at(largest, places, weights[counts])
    return words.astype(np.uint32), largest


def is_finite_whole(outputs: RawOutputs) -> bool:
    """Return True if no number is NaN or infinite."""
    return all(bool(np.isfinite(each).all()) for each in (outputs.dense, outputs.weights, outputs.vectors))


def find_changed_outputs(
    results: Ragged, expected: "NDArray[Any]", bits: int, counts: Iterable[int], card: ModelCard
) -> str:
    """Return what is wrong with rows of one text that were computed again; empty if nothing is.

    `counts` are the numbers of tokens that the text may have; only one fits the length of its row.

    Vectors are compared by their direction, each token's alone, and sparse weights by their values: rounding may
    make a small one appear or vanish.
    """
    flaw = ""
    for num_tokens in counts:
        try:
            before, *now = (
                read_row(row, bits, num_tokens, card)
                for row in (expected, *(results.row(index) for index in range(len(results))))
            )
            break
        except ValueError as error:
            flaw = f"its answer cannot be read: {error}"
    else:
        return flaw
    flaws = (_compare(each, before, card.sparse_dimensions) for each in now)
    return next((flaw for flaw in flaws if flaw), "")


def _compare(now: RawOutputs, before: RawOutputs, num_words: int) -> str:
    if not (is_finite_whole(now) and is_finite_whole(before)):
        return "its answer is not finite"
    pairs = [(now.dense, before.dense), *zip(now.vectors, before.vectors, strict=True)]
    for vector, other in pairs:
        if len(other) and (flaw := find_turned(Ragged.from_matrix(_as_row(vector)), _as_row(other)[0])):
            return flaw
    change = np.abs(_spread(now, num_words) - _spread(before, num_words)).max(initial=0)
    largest = float(before.weights.max(initial=SMALLEST_SIZE))
    return f"a sparse weight has changed by {change:.3g}" if change > LARGEST_CHANGE * largest else ""


def _as_row(vector: "NDArray[Any]") -> NDArray[np.float32]:
    return vector.astype(np.float32)[np.newaxis]


def _spread(outputs: RawOutputs, num_words: int) -> NDArray[np.float32]:
    """Return the weights of all words, or those of the tokens as they are."""
    if not len(outputs.words):
        return outputs.weights
    whole = np.zeros(num_words, np.float32)
    whole[outputs.words] = outputs.weights
    return whole
