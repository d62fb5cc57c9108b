"""The task `embed`: compute a vector for each text, or several outputs in the packed form of representations.

A long text may be read in passages whose vectors are joined.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import LATE, PASSAGES, TRUNCATE, EncodingSpec
from vectormill.domain.errors import ModelError
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE, has_token_ids
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from vectormill.vectors.representations import Representations
from vectormill.vectors.vector_types import find_vector_failures
from worker.batching.batch import OUTPUTS, PROMPT_LENGTH
from worker.encoder.outputs import (
    BITS,
    POOLED,
    RawOutputs,
    count_skipped,
    find_bits,
    read_row,
    weighs_tokens,
)
from worker.tasks.finishing import (
    LARGEST_CHANGE,
    SMALLEST_SIZE,
    empty_rows,
    fail_unless,
    find_finite_rows,
    find_turned,
    finish_vectors,
    read_texts,
)
from worker.tasks.task import Finished, Rounds
from worker.tokens.passages import PassagedTexts, cut_passages, read_passages
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts, merge_lists
from worker.tokens.tokenizer import Tokenizer


class Embed:
    """The task `embed` of one model. Implements WorkerTask.

    `gives_vectors` is called once the model is loaded; if it returns False, the model's rows are passed on
    unchanged.
    """

    asks_again = False

    def __init__(
        self, card: ModelCard, tokenizer: Tokenizer, gives_vectors: Callable[[], bool] = lambda: True
    ) -> None:
        self.card = card
        self._tokenizer = tokenizer
        self._gives_vectors = gives_vectors
        self._known_bits = find_bits(card.outputs)
        self._known_lengths: set[int] = set()

    def make_known_inputs(self, text: str) -> Mapping[str, Ragged]:
        """Return the inputs of a text that asks for all outputs of the model."""
        inputs = self._tokenizer.tokenize([text], self.card.max_tokens, truncate=True).inputs
        self._known_lengths.add(len(inputs[INPUT_IDS].values))
        if not self._known_bits:
            return inputs
        return {**inputs, OUTPUTS: Ragged.from_scalars(np.array([self._known_bits], np.int32))}

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        if not self._known_bits:
            return find_turned(results, expected)
        return find_changed_outputs(results, expected, self._known_bits, self._known_lengths, self.card)

    def process(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> Rounds:
        if spec.outputs != DENSE:
            # The texts may be marked as queries or documents.
            marks = find_marks(self.card, spec)
            bare = replace(spec, prompt=marks.prompt, max_tokens=marks.max_tokens)
            read, failed_texts, constants = self._read(bare, texts, max_chars)
            marked = marks.put_into(read.sequences, self._tokenizer.num_prefix)
            return (yield from represent(self.card, spec, marked, failed_texts, constants))
        if spec.long_texts == LATE:
            read, failed_texts = read_passages(self._tokenizer, self.card, spec, texts, max_chars)
            constants = {OUTPUTS: BITS[POOLED]}
        else:
            read, failed_texts, constants = self._read(spec, texts, max_chars)
        gives_vectors = self._gives_vectors()
        failed_sequences = dict(read.sequences.failures)
        # Where no special tokens are added, a text may have no token at all, and would have the vector 0.
        for place in np.flatnonzero(read.sequences.lengths == 0).tolist():
            failed_sequences.setdefault(
                place, ItemFailure(EMPTY_TEXT, "the text has no token that the model knows")
            )
        results, more_failures = yield read.sequences, constants
        failures = {**read.join_failures(failed_sequences | dict(more_failures)), **failed_texts}
        if gives_vectors:
            vectors = finish_vectors(read.join_vectors(results), spec)
            failures = {**find_vector_failures(vectors), **failures}
            vectors[list(failures)] = 0
            results = Ragged.from_matrix(vectors)
        elif read.is_whole:
            fail_unless(find_finite_rows(results), failures)
            results = empty_rows(results, list(failures))
        else:
            raise ModelError(
                "Only vectors of passages can be joined; submit the job with a different long_texts."
            )
        return Finished.of(results, failures, read.num_tokens, read.truncated, read.num_passages)

    def _read(
        self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int
    ) -> tuple[PassagedTexts, dict[int, ItemFailure], dict[str, int]]:
        """Return the tokens of the texts, the failures among them, and the inputs that all share."""
        decoded, failures = read_texts(texts, max_chars)
        if spec.prompt:
            decoded = [spec.prompt + text for text in decoded]
        sound = (
            [index for index in range(len(texts)) if index not in failures] if failures else range(len(texts))
        )
        if spec.long_texts == PASSAGES:
            frame = self._tokenizer.frame(spec.prompt, spec.max_tokens, spec.passage_overlap)
            whole = self._tokenizer.tokenize_whole(decoded).spread(sound, len(texts))
            passaged = cut_passages(self._take_given(spec, texts, failures, whole), frame)
        else:
            tokenized = self._tokenizer.tokenize(
                decoded, spec.max_tokens, spec.long_texts == TRUNCATE, keeps_end=self._keeps_end(spec)
            )
            given = self._take_given(spec, texts, failures, tokenized.spread(sound, len(texts)))
            passaged = PassagedTexts.whole(
                self._tokenizer.refuse_without_room(given, spec.prompt, spec.max_tokens)
            )
        prompt_length = 0 if self.card.include_prompt else self._tokenizer.count_prompt_tokens(spec.prompt)
        return passaged, failures, {PROMPT_LENGTH: prompt_length}

    def _keeps_end(self, spec: EncodingSpec) -> bool:
        """Return True if long texts lose their beginning, and the spec is not one of a release that cut their end."""
        return self.card.truncates_left and not self.card.reads_as_before(spec.revision)

    def _take_given(
        self,
        spec: EncodingSpec,
        texts: Sequence[bytes],
        failures: dict[int, ItemFailure],
        tokenized: TokenizedTexts,
    ) -> TokenizedTexts:
        """Add the texts that were sent as token ids to `tokenized`, and remove them from `failures`."""
        places = [place for place in failures if has_token_ids(texts[place])]  # they are not Unicode
        if not places:
            return tokenized
        for place in places:
            del failures[place]
        max_tokens = None if spec.long_texts == PASSAGES else spec.max_tokens
        given = self._tokenizer.take_ids(
            [texts[place] for place in places],
            spec.prompt,
            max_tokens,
            spec.long_texts == TRUNCATE,
            keeps_end=self._keeps_end(spec),
        )
        return merge_lists(tokenized, given.spread(places, len(texts)))


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


def represent(
    card: ModelCard,
    spec: EncodingSpec,
    texts: TokenizedTexts,
    failed: Mapping[int, ItemFailure],
    constants: Mapping[str, int],
) -> Rounds:
    """Compute several outputs of the texts, of which some have failed already.

    A result is the packed form of its text's Representations, and empty for a text that failed.
    """
    bits = find_bits(spec.outputs.split(","))
    results, more_failures = yield texts, {**constants, OUTPUTS: bits}
    failures = {**texts.failures, **failed, **more_failures}
    ids, is_finite = texts.inputs[INPUT_IDS], np.ones(len(texts), np.bool_)
    rows = [b""] * len(texts)
    for index in [index for index in range(len(texts)) if index not in failures]:
        raw = read_row(results.row(index), bits, int(texts.lengths[index]), card)
        is_finite[index] = is_finite_whole(raw)
        if is_finite[index]:
            outputs = finish_outputs(raw, ids.row(index), bits, card, spec)
            unfit = find_vector_failures(outputs.dense[np.newaxis])
            failures |= {index + row: failure for row, failure in unfit.items()}
            rows[index] = b"" if unfit else outputs.pack()
    fail_unless(is_finite, failures)
    lengths = np.array(list(map(len, rows)), np.int64)
    packed = Ragged.from_lengths(np.frombuffer(b"".join(rows), np.uint8), lengths)
    return Finished.of(packed, failures, texts.lengths, texts.truncated)


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
        row = Ragged.from_matrix(vector.astype(np.float32)[np.newaxis])
        if len(other) and (flaw := find_turned(row, other.astype(np.float32))):
            return flaw
    change = np.abs(_spread(now, num_words) - _spread(before, num_words)).max(initial=0)
    largest = float(before.weights.max(initial=SMALLEST_SIZE))
    return f"a sparse weight has changed by {change:.3g}" if change > LARGEST_CHANGE * largest else ""


def _spread(outputs: RawOutputs, num_words: int) -> NDArray[np.float32]:
    """Return the weights of all words, or those of the tokens as they are."""
    if not len(outputs.words):
        return outputs.weights
    whole = np.zeros(num_words, np.float32)
    whole[outputs.words] = outputs.weights
    return whole
