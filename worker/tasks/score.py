"""The task `score`: rate how two texts belong together, or what one text is, with a number for each label.

A classifier reads both texts of a pair at once, a generative reranker in the words of its template. An
embedding model encodes each distinct text once; the score is the cosine of the two vectors.

A template is tokenized as its authors' code does: tokens merge across the borders of texts, so each of its pieces is
tokenized whole. If a pair has too many tokens, its document is cut, and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import TRUNCATE, EncodingSpec
from vectormill.domain.task import SIGMOID, SOFTMAX, TANH
from vectormill.jobs.item import (
    ITEM_ERROR_CODES,
    NO_PAIR,
    TOO_MANY_TOKENS,
    ItemFailure,
    find_side_failure,
    name_second,
    split_pair,
)
from vectormill.models.rerankers import DOCUMENT, INSTRUCTION, QUERY, Template, fill_in, strip_texts
from vectormill.ragged import Ragged
from vectormill.vectors.vector_types import find_unfit
from worker.tasks.embed import Embed
from worker.tasks.finishing import fail_unless, find_changed
from worker.tasks.task import Finished, Rounds
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS, TokenizedTexts, drop_rows, report_length
from worker.tokens.tokenizer import Tokenizer

_MARK: Final = f"{{{DOCUMENT}}}"
# Documents of one token and of several. What their sequences end with alike is the end of the template.
SHORT_DOCUMENTS: Final = "0", "1 2 3 4"
# The one or two texts of an item.
Sides = tuple[str, str | None]


class Classify:
    """The task of scoring pairs and single texts with a classifier. Implements WorkerTask.

    A prompt is put before the first text of a pair, as a CrossEncoder of sentence-transformers puts it.
    """

    asks_again = False

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    def make_known_inputs(self, text: str) -> Mapping[str, Ragged]:
        return with_types(self._tokenizer.tokenize([text], self._max_tokens, truncate=True)).inputs

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        return find_changed(results, expected)

    def process(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> Rounds:
        sides, failed = read_sides(texts, max_chars)
        read = self._read(spec, sides, failed)
        results, more_failures = yield read, {}
        logits, failures = results.matrix, {**read.failures, **failed, **more_failures}
        is_finite = ~find_unfit(logits)[0]
        fail_unless(is_finite, failures)
        scores = activate(np.where(is_finite[:, np.newaxis], logits, 0), spec.activation)
        return finish_scores(scores, failures, read.lengths, read.truncated)

    def _read(
        self, spec: EncodingSpec, sides: Sequence[Sides], failed: dict[int, ItemFailure]
    ) -> TokenizedTexts:
        """Return the tokens of all items; those of failed ones are left out. May add failures."""
        pairs = [index for index, (_, second) in enumerate(sides) if second is not None]
        alone = [index for index, (_, second) in enumerate(sides) if second is None and index not in failed]
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
        return merge([(pairs, joined), (alone, with_types(single))], len(sides))


class Rerank(Classify):
    """The task of scoring pairs with a reranker that reads them in the words of a template."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, template: Template) -> None:
        super().__init__(tokenizer, max_tokens)
        self._template = template

    def make_known_inputs(self, text: str) -> Mapping[str, Ragged]:
        return self._tokenizer.tokenize([text], self._max_tokens, truncate=True).inputs

    def _read(
        self, spec: EncodingSpec, sides: Sequence[Sides], failed: dict[int, ItemFailure]
    ) -> TokenizedTexts:
        pairs: dict[int, tuple[str, str]] = {}
        for index, (first, second) in enumerate(sides):
            if second is not None:
                pairs[index] = first, second
            else:
                failed.setdefault(index, ItemFailure(NO_PAIR, ITEM_ERROR_CODES[NO_PAIR]))
        read = tokenize_worded(
            self._tokenizer,
            self._template,
            spec.prompt,
            list(pairs.values()),
            spec.max_tokens,
            spec.long_texts == TRUNCATE,
        )
        return read.spread(list(pairs), len(sides))


class Compare:
    """The task of scoring pairs with an embedding model by the cosine of their vectors.

    Implements WorkerTask.
    """

    asks_again = False

    def __init__(self, embed: Embed) -> None:
        self._embed = embed
        self.make_known_inputs, self.find_flaw = embed.make_known_inputs, embed.find_flaw

    def process(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> Rounds:
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
        # The indices of each pair's texts among the distinct ones.
        places = np.array(
            [[unique[first], unique[second]] for first, second in sides], dtype=np.int64
        ).reshape(-1, 2)
        vectors_spec = replace(spec, dimensions=self._embed.card.dimension, normalize=True)
        found = yield from self._embed.process(vectors_spec, list(unique), max_chars)
        for index, (one, other) in enumerate(places.tolist()):
            if one in found.failures:
                failures.setdefault(index, found.failures[one])
            elif other in found.failures:
                failures.setdefault(index, name_second(found.failures[other]))
        vectors = found.results.matrix
        cosines = np.einsum("ij,ij->i", vectors[places[:, 0]], vectors[places[:, 1]])
        scores = np.clip(cosines, -1.0, 1.0)[:, np.newaxis]
        lengths = found.num_tokens[places].sum(axis=1, dtype=np.int32)
        return finish_scores(scores, failures, lengths, np.any(found.truncated[places], axis=1))


def read_sides(texts: Sequence[bytes], max_chars: int) -> tuple[list[Sides], dict[int, ItemFailure]]:
    """Split each item into its one or two texts. Return them, and failures by index.

    Each text may have up to `max_chars` characters.
    """
    sides: list[Sides] = []
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
    scores = scores.astype(np.float32)
    scores[list(failures)] = 0
    return Finished.of(Ragged.from_matrix(scores), failures, lengths, truncated)


def tokenize_worded(
    tokenizer: Tokenizer,
    template: Template,
    instruction: str,
    pairs: Sequence[tuple[str, str]],
    max_tokens: int,
    truncate: bool,
) -> TokenizedTexts:
    """Return the token ids of n pairs of query and document, each at most `max_tokens`.

    The document of a longer pair is cut, or the pair fails if `truncate` is False or if the rest leaves no
    room for a token of the document.
    """
    pieces = template.pieces if instruction else template.plain
    filled = [{INSTRUCTION: instruction, QUERY: first, DOCUMENT: second} for first, second in pairs]
    filled = [strip_texts(texts, template.strips) for texts in filled] if template.strips else filled
    parts: list[Ragged] = []
    place = next(number for number, piece in enumerate(pieces) if _MARK in piece)
    before, _, behind = pieces[place].partition(_MARK)
    around = [(fill_in(before, texts), fill_in(behind, texts)) for texts in filled]
    limit = max_tokens if truncate else None
    for number, piece in enumerate(pieces):
        if number == place:
            parts.append(tokenizer.encode_between([texts[DOCUMENT] for texts in filled], around, limit))
        else:
            parts.append(_encode_distinct(tokenizer, [fill_in(piece, texts) for texts in filled]))
    totals = _add_lengths(parts)
    is_long = totals > max_tokens
    failures: dict[int, ItemFailure] = {}
    if not truncate:
        failures = {
            index: report_length(int(totals[index]), max_tokens) for index in np.flatnonzero(is_long).tolist()
        }
    elif is_long.any():
        room = max_tokens - (totals - parts[place].lengths)  # [n], for the piece with the document
        parts[place], failures = _cut_documents(
            tokenizer, parts[place], room, np.flatnonzero(is_long), around
        )
    n = len(pairs)
    order = np.arange(len(parts) * n).reshape(len(parts), n).T.ravel()  # piece by piece, pair after pair
    ids = Ragged.from_lengths(Ragged.join(parts).take(order).values, _add_lengths(parts))
    has_failed = np.isin(np.arange(n), list(failures))
    return TokenizedTexts(drop_rows({INPUT_IDS: ids}, has_failed), is_long & ~has_failed, failures)


def _encode_distinct(tokenizer: Tokenizer, texts: Sequence[str]) -> Ragged:
    """Return the tokens of each text; equal texts, such as a query with many documents, are read once."""
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    rows = tokenizer.encode_between(list(numbers), [("", "")] * len(numbers), None)
    return rows.take(np.array([numbers[text] for text in texts], dtype=np.int64))


def _add_lengths(parts: Sequence[Ragged]) -> NDArray[np.int64]:
    """Return how many tokens each pair has in all of its pieces [n]."""
    totals: NDArray[np.int64] = np.stack([part.lengths for part in parts]).sum(axis=0)
    return totals


def _cut_documents(
    tokenizer: Tokenizer,
    rows: Ragged,
    room: NDArray[np.int64],
    chosen: NDArray[np.int64],
    around: Sequence[tuple[str, str]],
) -> tuple[Ragged, dict[int, ItemFailure]]:
    """Return the rows with the chosen ones cut to `room` within their documents, and failures by index."""
    frames = [around[index] for index in chosen.tolist()]
    shortest, others = (
        _encode_distinct(tokenizer, [f"{before}{document}{behind}" for before, behind in frames])
        for document in SHORT_DOCUMENTS
    )
    cut: list[NDArray[np.int32]] = []
    failures: dict[int, ItemFailure] = {}
    for number, index in enumerate(chosen.tolist()):
        one, other = shortest.row(number), others.row(number)
        least = min(len(one), len(other))
        differs = np.flatnonzero(one[::-1][:least] != other[::-1][:least])
        # How many tokens follow the document, whatever its last word is.
        num_behind = (int(differs[0]) if len(differs) else least) if frames[number][1] else 0
        keep = int(room[index]) - num_behind
        cut.append(np.concatenate([rows.row(index)[: max(keep, 0)], one[len(one) - num_behind :]]))
        if len(one) > room[index]:
            failures[index] = ItemFailure(
                TOO_MANY_TOKENS,
                "the instruction, the query and the template leave no room for the document; max_tokens is "
                f"{len(one) - int(room[index])} too small",
            )
    places = np.arange(len(rows))
    places[chosen] = len(rows) + np.arange(len(chosen))
    return Ragged.join([rows, Ragged.from_rows(cut, np.int32)]).take(places), failures
