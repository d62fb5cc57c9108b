"""The task `score`: rate how two texts belong together, or what one text is, with a number for each label.

A classifier reads both texts of a pair at once, a generative reranker in the words of its template. An
embedding model encodes each distinct text once; the score is the cosine of the two vectors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import TRUNCATE, EncodingSpec
from vectormill.domain.task import SIGMOID, SOFTMAX, TANH
from vectormill.jobs.item import (
    ITEM_ERROR_CODES,
    NO_PAIR,
    ItemFailure,
    find_side_failure,
    name_second,
    split_pair,
)
from vectormill.models.rerankers import Template
from vectormill.ragged import Ragged
from vectormill.vectors.vector_types import find_unfit
from worker.tasks.embed import Embed
from worker.tasks.finishing import fail_unless, find_changed
from worker.tasks.task import Finished, RequestState
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS, TokenizedTexts
from worker.tokens.tokenizer import Tokenizer
from worker.tokens.wording import tokenize_worded


class Classify:
    """The task of scoring pairs and single texts with a classifier. Implements WorkerTask.

    A prompt is put before the first text of a pair, as a CrossEncoder of sentence-transformers puts it.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def canary(self, text: str) -> Mapping[str, Ragged]:
        return with_types(self._tokenizer.tokenize([text], self._max_tokens, truncate=True)).inputs

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        return find_changed(results, expected)

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> "Classification":
        sides, failures = read_sides(texts, max_chars)
        sound = [index for index in range(len(texts)) if index not in failures]
        pairs = [index for index in sound if sides[index][1] is not None]
        alone = [index for index in sound if sides[index][1] is None]
        truncate = spec.long_texts == TRUNCATE
        joined = self._tokenizer.tokenize_pairs(
            [spec.prompt + sides[index][0] for index in pairs],
            [sides[index][1] or "" for index in pairs],
            spec.max_tokens,
            truncate,
        )
        single = self._tokenizer.tokenize(
            [spec.prompt + sides[index][0] for index in alone], spec.max_tokens, truncate
        )
        single = self._tokenizer.refuse_without_room(single, spec.prompt, spec.max_tokens)
        read = merge([(pairs, joined), (alone, with_types(single))], len(texts))
        return Classification(spec, read, failures)


class Rerank(Classify):
    """The task of scoring pairs with a reranker that reads them in the words of a template."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, template: Template) -> None:
        super().__init__(tokenizer, max_tokens)
        self._template = template

    def canary(self, text: str) -> Mapping[str, Ragged]:
        return self._tokenizer.tokenize([text], self._max_tokens, truncate=True).inputs

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> "Classification":
        sides, failures = read_sides(texts, max_chars)
        pairs: dict[int, tuple[str, str]] = {}
        for index, (first, second) in enumerate(sides):
            if second is not None:
                pairs[index] = first, second
            else:
                failures.setdefault(index, ItemFailure(NO_PAIR, ITEM_ERROR_CODES[NO_PAIR]))
        read = tokenize_worded(
            self._tokenizer,
            self._template,
            spec.prompt,
            list(pairs.values()),
            spec.max_tokens,
            spec.long_texts == TRUNCATE,
        )
        return Classification(spec, read.spread(list(pairs), len(texts)), failures)


class Classification:
    """The state of one request to a classifier. Implements RequestState."""

    constants: Mapping[str, int] = {}

    def __init__(self, spec: EncodingSpec, read: TokenizedTexts, failures: Mapping[int, ItemFailure]) -> None:
        self._spec = spec
        self._read = read
        self._failures = {**read.failures, **failures}
        self._logits: NDArray[np.float32] = np.zeros((len(read), spec.dimensions), dtype=np.float32)

    def start(self) -> TokenizedTexts:
        return self._read

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> None:
        self._logits = results.matrix
        self._failures |= failures

    def finish(self) -> Finished:
        is_finite = ~find_unfit(self._logits)[0]
        fail_unless(is_finite, self._failures)
        scores = activate(np.where(is_finite[:, np.newaxis], self._logits, 0), self._spec.activation)
        return finish_scores(scores, self._failures, self._read.lengths, self._read.truncated)


class Compare:
    """The task of scoring pairs with an embedding model by the cosine of their vectors.

    Implements WorkerTask.
    """

    def __init__(self, embed: Embed) -> None:
        self._embed = embed

    def canary(self, text: str) -> Mapping[str, Ragged]:
        return self._embed.canary(text)

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        return self._embed.find_flaw(results, expected)

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> RequestState:
        sides: list[tuple[bytes, bytes]] = []
        failures: dict[int, ItemFailure] = {}
        for index, text in enumerate(texts):
            first, second = split_pair(text)
            if second is None:
                failures[index] = ItemFailure(NO_PAIR, ITEM_ERROR_CODES[NO_PAIR])
            sides.append((first, first if second is None else second))
        unique = {
            text: number for number, text in enumerate(dict.fromkeys(side for pair in sides for side in pair))
        }
        places = np.array(
            [[unique[first], unique[second]] for first, second in sides], dtype=np.int64
        ).reshape(-1, 2)
        vectors = replace(spec, dimensions=self._embed.dimension, normalize=True)
        return Comparison(self._embed.begin(vectors, list(unique), max_chars), places, failures)


class Comparison:
    """The state of one request to compare pairs. Implements RequestState.

    `texts` are the distinct texts of all pairs; `places` [n, 2] are the indices of each pair's texts among
    them.
    """

    def __init__(
        self, texts: RequestState, places: NDArray[np.int64], failures: Mapping[int, ItemFailure]
    ) -> None:
        self.constants = texts.constants
        self._texts = texts
        self._places = places
        self._failures = dict(failures)

    def start(self) -> TokenizedTexts:
        return self._texts.start()

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> None:
        self._texts.take(results, failures)

    def finish(self) -> Finished:
        texts, places = self._texts.finish(), self._places
        for index, (first, second) in enumerate(places.tolist()):
            failure = texts.failures.get(first)
            other = texts.failures.get(second)
            if failure is not None:
                self._failures.setdefault(index, failure)
            elif other is not None:
                self._failures.setdefault(index, name_second(other))
        vectors = texts.results.matrix
        cosines = np.einsum("ij,ij->i", vectors[places[:, 0]], vectors[places[:, 1]])
        scores = np.clip(cosines, -1.0, 1.0)[:, np.newaxis]
        lengths = texts.num_tokens[places].sum(axis=1, dtype=np.int32)
        return finish_scores(scores, self._failures, lengths, np.any(texts.truncated[places], axis=1))


def read_sides(
    texts: Sequence[bytes], max_chars: int
) -> tuple[list[tuple[str, str | None]], dict[int, ItemFailure]]:
    """Split each item into its one or two texts. Return them, and failures by index.

    Each text may have up to `max_chars` characters.
    """
    sides: list[tuple[str, str | None]] = []
    failures: dict[int, ItemFailure] = {}
    for index, text in enumerate(texts):
        first, second = split_pair(text)
        failure = find_side_failure(text, max_chars)
        if failure is not None:
            failures[index] = failure
            sides.append(("", None))
        else:
            sides.append((first.decode(), None if second is None else second.decode()))
    return sides, failures


def with_types(read: TokenizedTexts) -> TokenizedTexts:
    """Return single texts with token type ids, all 0."""
    ids = read.inputs[INPUT_IDS]
    types = Ragged(np.zeros(len(ids.values), dtype=np.int32), ids.offsets)
    return TokenizedTexts({**read.inputs, TOKEN_TYPE_IDS: types}, read.truncated, read.failures)


def merge(parts: Sequence[tuple[Sequence[int], TokenizedTexts]], num_texts: int) -> TokenizedTexts:
    """Merge parts into one list of `num_texts` texts.

    A part's first member are its texts' indices in that list.

    Texts that are in no part have no tokens.
    """
    places = np.concatenate([np.array(some, dtype=np.int64) for some, _ in parts])
    order = np.argsort(places, kind="stable")
    names = parts[0][1].inputs.keys()
    inputs = {name: Ragged.join([read.inputs[name] for _, read in parts]).take(order) for name in names}
    truncated = np.concatenate([read.truncated for _, read in parts])[order]
    starts = np.cumsum([0, *(len(some) for some, _ in parts)])
    failures = {
        int(starts[number]) + index: failure
        for number, (_, read) in enumerate(parts)
        for index, failure in read.failures.items()
    }
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    joined = TokenizedTexts(
        inputs, truncated, {int(rank[index]): failure for index, failure in failures.items()}
    )
    return joined.spread(places[order].tolist(), num_texts)


def activate(logits: NDArray[np.float32], activation: str) -> NDArray[np.float32]:
    """Return the activation of logits [n, labels]: probabilities, numbers from -1 to 1, or for `raw` the logits."""
    if activation == SOFTMAX:
        powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        probabilities: NDArray[np.float32] = powers / powers.sum(axis=1, keepdims=True)
        return probabilities
    if activation == SIGMOID:
        # exp of a large number would overflow, so 1 / (1 + exp(-x)) is computed as (1 + tanh(x / 2)) / 2.
        return ((1 + np.tanh(logits / 2)) / 2).astype(np.float32)
    return np.tanh(logits) if activation == TANH else logits


def finish_scores(
    scores: NDArray[np.float32],
    failures: Mapping[int, ItemFailure],
    lengths: "NDArray[Any]",
    truncated: NDArray[np.bool_],
) -> Finished:
    """Build the result from `scores` [n, labels] and `lengths` [n]; those of failed items are zeroed."""
    failed = list(failures)
    scores, lengths, truncated = scores.astype(np.float32), lengths.astype(np.int32), truncated.copy()
    scores[failed], lengths[failed], truncated[failed] = 0, 0, False
    return Finished(
        Ragged.from_matrix(scores), failures, lengths, truncated, np.zeros(len(lengths), dtype=np.int32)
    )
