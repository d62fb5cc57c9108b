"""Tag: what goes to a token classifier, and what becomes of its answers. Knows neither batches nor a framework."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from vectormill.domain.encoding import TRUNCATE, EncodingSpec
from vectormill.jobs.item import ITEM_ERROR_CODES, TOO_MANY_TOKENS, ItemFailure
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.tasks.finishing import fail_unless, find_changed, find_finite_rows, read_texts
from worker.tasks.task import Finished, Rounds
from worker.tokens.tokenized import TokenizedTexts

OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class Words:
    """A text and where its tokens stand in it, in code points; (0, 0) of special tokens."""

    text: str
    offsets: Sequence[tuple[int, int]]


class Tag:
    """Implements WorkerTask: one round, whose answers are the logits of each token."""

    asks_again = False

    def __init__(self, card: ModelCard) -> None:
        self._max_tokens = card.max_tokens
        self._tokenizer = Tokenizer.from_file(str(card.path / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        labels = json.loads((card.path / "config.json").read_text(encoding="utf-8"))["id2label"]
        self._labels = [labels[number] for number in sorted(labels, key=int)]

    def process(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> Rounds:
        decoded, failures = read_texts(texts, max_chars)
        sound = [index for index in range(len(texts)) if index not in failures]
        words, read = self._read(decoded, spec.max_tokens, truncate=spec.long_texts == TRUNCATE)
        read = read.spread(sound, len(texts))
        results, more_failures = yield read, {}
        failures |= more_failures
        fail_unless(find_finite_rows(results), failures)
        rows = [b""] * len(texts)
        for index, each in zip(sound, words, strict=True):
            if index not in failures:
                logits = results.row(index).reshape(-1, len(self._labels))
                tags = [self._labels[best] for best in logits.argmax(axis=1)]
                rows[index] = json.dumps(join_spans(each, tags), ensure_ascii=False).encode()
        records = Ragged.from_rows([np.frombuffer(row, dtype=np.uint8) for row in rows], np.uint8)
        return Finished.of(records, failures, read.lengths, read.truncated)

    def make_known_inputs(self, text: str) -> Mapping[str, Ragged]:
        return self._read([text], self._max_tokens, truncate=True)[1].inputs

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        return find_changed(results, expected)

    def _read(
        self, texts: Sequence[str], max_tokens: int, *, truncate: bool
    ) -> tuple[list[Words], TokenizedTexts]:
        words, rows, truncated = [], [], np.zeros(len(texts), dtype=np.bool_)
        failures: dict[int, ItemFailure] = {}
        for index, encoding in enumerate(self._tokenizer.encode_batch(texts)):
            ids, offsets = encoding.ids, encoding.offsets
            if len(ids) > max_tokens and truncate:
                truncated[index] = True
                ids, offsets = [*ids[: max_tokens - 1], ids[-1]], [*offsets[: max_tokens - 1], offsets[-1]]
            elif len(ids) > max_tokens:
                failures[index] = ItemFailure(TOO_MANY_TOKENS, ITEM_ERROR_CODES[TOO_MANY_TOKENS])
                ids, offsets = [], []
            words.append(Words(texts[index], offsets))
            rows.append(np.array(ids, dtype=np.int32))
        return words, TokenizedTexts.from_rows(rows, truncated, failures)


def join_spans(words: Words, tags: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Neighbouring tokens of one label are a span, of B-… and I-… that of the label behind it; as records are."""
    labelled = [
        (tag.removeprefix("B-").removeprefix("I-"), start, end)
        for tag, (start, end) in zip(tags, words.offsets, strict=True)
        if start < end
    ]
    records = []
    for label, tokens in groupby(labelled, key=lambda token: token[0]):
        bounds = [(start, end) for _, start, end in tokens]
        start, end = bounds[0][0], bounds[-1][1]
        if label != OUTSIDE:
            records.append([{"type": label, "span": words.text[start:end], "offset": [start, end]}])
    return records
