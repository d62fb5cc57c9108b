"""Chunk sizes: by estimated tokens, for it is tokens that device time, memory and fairness are counted in.

Nobody who submits has the tokenizer: an estimate decides where a chunk ends and how many are on their way at once,
never what is encoded.
"""

import json
from collections.abc import Sequence
from typing import Final

from vectormill.domain.encoding import PASSAGES, EncodingSpec
from vectormill.domain.tasks.prompt_size import PromptEstimate

# Where a job begins. Half a second of a small model on two cores, and what a job of some hundred texts is spread by.
SMALLEST_CHUNK_TOKENS: Final = 4096
# Two full batches of a GPU. Message, claim and commit cost some 10 ms of a core, so there must not be hundreds a
# second; on two cores it is half a minute's work, which is how late a job's progress and its turn may be.
LARGEST_CHUNK_TOKENS: Final = 65_536
# No chunk has more than this share of what came before it: the last one of a job keeps one worker busy for a ninth of
# the time at the most, however many others have ended by then.
_SHARE: Final = 8
# A classifier token and a separator, or the like of another tokenizer.
_SPECIAL_TOKENS: Final = 2


def estimate_tokens(text: bytes) -> int:
    """Tokens of UTF-8 text without the special ones: one for four letters of ASCII, and one for each of Chinese.

    (3 bytes - letters) / 8 is a quarter of one-byte letters, five eighths of two-byte ones (Cyrillic, Greek: one token
    with an English vocabulary, four letters with a multilingual one) and all of three-byte ones.
    """
    num_bytes = len(text)
    if text.isascii():
        return num_bytes >> 2
    return (3 * num_bytes - len(text.decode(errors="replace"))) >> 3


class TokenEstimate:
    """An estimate of how many tokens the items of one spec have."""

    def __init__(self, spec: EncodingSpec) -> None:
        self._extra = estimate_tokens(spec.prompt.encode()) + _SPECIAL_TOKENS
        self._is_cut = spec.long_texts != PASSAGES
        self._max_tokens = spec.max_tokens
        self._prompts: PromptEstimate | None = None
        if spec.extract_schema:
            self._prompts = PromptEstimate(json.loads(spec.extract_schema), estimate_tokens)

    def of(self, text: bytes) -> int:
        """Estimate the tokens that are read of a text, prompts and special tokens included, as often as it is
        read.
        """
        if self._prompts is not None:
            return self._prompts.of(estimate_tokens(text))
        tokens = estimate_tokens(text) + self._extra
        return min(tokens, self._max_tokens) if self._is_cut else tokens

    def of_all(self, texts: Sequence[bytes]) -> int:
        """Estimate the tokens of many texts by their bytes alone, nothing cut off: for a bound of memory, at
        once.
        """
        num_tokens = sum(map(len, texts)) // 4
        if self._prompts is None or not texts:
            return num_tokens
        return len(texts) * self._prompts.of(num_tokens // len(texts))


def choose_chunk_tokens(num_tokens_before: int) -> int:
    """With how many tokens the next chunk of a job is closed, of which so many have come already."""
    return min(max(num_tokens_before // _SHARE, SMALLEST_CHUNK_TOKENS), LARGEST_CHUNK_TOKENS)
