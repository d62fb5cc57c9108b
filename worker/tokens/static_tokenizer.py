"""StaticTokenizer reads texts as the authors of static embeddings do: without special tokens, and by their rules."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vectormill.models.model_card import ModelCard, SpecialTokens
from vectormill.ragged import Ragged
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts
from worker.tokens.tokenizer import Tokenizer

WITHOUT = SpecialTokens(is_rewritten=True)


class StaticTokenizer(Tokenizer):
    """The tokenizer of a table of static embeddings. Thread-safe.

    By model2vec's rules (`StaticModel.encode`), a text is cut to `max_tokens` times the median length of a
    token in characters, then tokenized and cut to `max_tokens`, and then unknown tokens are left out.
    """

    def __init__(self, card: ModelCard, **options: Any) -> None:
        assert card.static is not None
        super().__init__(card.path / card.static.folder, special=WITHOUT, **options)
        self._unknown_id: int | None = None
        self._chars_per_token = 0
        if card.static.is_model2vec:
            rust, model = self._reference.rust, self._reference.description["model"]
            token = model.get("unk_token")
            self._unknown_id = model.get("unk_id") if token is None else rust.token_to_id(token)
            self._chars_per_token = int(np.median([len(token) for token in rust.get_vocab()]))

    def tokenize(
        self, texts: Sequence[str], max_tokens: int, truncate: bool, *, keeps_end: bool = False
    ) -> TokenizedTexts:
        if not truncate or not self._chars_per_token:
            return super().tokenize(texts, max_tokens, truncate)
        num_chars = max_tokens * self._chars_per_token
        found = super().tokenize([text[:num_chars] for text in texts], max_tokens, truncate)
        is_cut = np.fromiter((len(text) > num_chars for text in texts), np.bool_, count=len(texts))
        return replace(found, truncated=found.truncated | is_cut)

    def tokenize_whole(self, texts: Sequence[str]) -> TokenizedTexts:
        found = super().tokenize_whole(texts)
        return replace(found, inputs={INPUT_IDS: self._drop_unknown(found.inputs[INPUT_IDS])})

    def _fit(self, rows: Ragged, max_tokens: int, truncate: bool, keeps_end: bool) -> TokenizedTexts:
        found = super()._fit(rows, max_tokens, truncate, keeps_end)
        return replace(found, inputs={INPUT_IDS: self._drop_unknown(found.inputs[INPUT_IDS])})

    def _drop_unknown(self, rows: Ragged) -> Ragged:
        is_known = rows.values != self._unknown_id
        if self._unknown_id is None or is_known.all():
            return rows
        before = np.concatenate(([0], np.cumsum(is_known)))
        return Ragged(rows.values[is_known], before[rows.offsets])
