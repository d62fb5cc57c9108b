"""Tokenizer: texts to token ids, as transformers would, on the Rust library alone. Knows nothing of batches.

One object serves all threads and every max_tokens: truncation is done here, not by the library, whose setting is
shared by all callers. The library cuts the text's own tokens before it adds the special ones, and so do we.
"""

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from vectormill.domain.errors import ModelError
from vectormill.domain.jobs.item import TOO_MANY_TOKENS, ItemFailure
from worker.tokens.passages import PassageFrame
from worker.tokens.tokenized import TokenizedTexts

# Pre-tokenizers that never join two words across a space, so that the tokens of a text cut at a space are the first
# tokens of the whole text. Anything else is tokenized whole.
SPLITS_AT_SPACES: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})
# Where a long text is cut at first. A guess that is too small costs a second look at the text, never a wrong token.
CHARS_PER_TOKEN: Final = 14
# Texts tokenized at once. Enough for all threads of the library; a whole chunk of books would be hundreds of MB.
GROUP_CHARS: Final = 1 << 16
# Of the threads that tokenize at the same time, all share the library's own threads, which two keep busy. More of them
# only hold memory: six chunks of long texts took 115 MiB, most of which the heap kept. Who has little never waits.
NUM_LARGE_GROUPS: Final = 2
FEW_CHARS: Final = 1 << 12


class Tokenizer:
    """Tokenizes with the `tokenizer.json` of a model's directory. May be called by many threads at once."""

    def __init__(self, directory: Path, *, lowercase: bool = False) -> None:
        path = directory / "tokenizer.json"
        try:
            description: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            self._rust = RustTokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception
            raise ModelError(f"The tokenizer {path} cannot be read: {error}.") from error
        self._rust.no_padding()
        self._rust.no_truncation()
        if lowercase and not _lowers_case(description.get("normalizer")):
            inner = [] if self._rust.normalizer is None else [self._rust.normalizer]
            self._rust.normalizer = NormalizerSequence([Lowercase(), *inner])
        self._can_cut_text = _splits_at_spaces(description)
        self._special_ids = frozenset(
            token["id"] for token in description.get("added_tokens", []) if token.get("special")
        )
        self._num_suffix = self._count_suffix()
        self._large_groups = threading.BoundedSemaphore(NUM_LARGE_GROUPS)

    def tokenize(self, texts: Sequence[str], max_tokens: int, truncate: bool) -> TokenizedTexts:
        """The ids of all texts; a text of more than `max_tokens` is cut, or fails when `truncate` is not set."""
        given = [self._cut_text(text, max_tokens) for text in texts] if truncate else texts
        rows = self._encode(given)
        if truncate:
            self._encode_again_whole(texts, given, rows, max_tokens)
        truncated = np.zeros(len(texts), dtype=np.bool_)
        failures: dict[int, ItemFailure] = {}
        for index, ids in enumerate(rows):
            if len(ids) > max_tokens:
                if truncate:
                    truncated[index] = True
                    rows[index] = np.concatenate(
                        (ids[: max_tokens - self._num_suffix], ids[len(ids) - self._num_suffix :])
                    )
                else:
                    failures[index] = ItemFailure(
                        TOO_MANY_TOKENS,
                        f"the text has {len(ids)} tokens, {max_tokens} are allowed with long_texts=fail",
                    )
                    rows[index] = ids[:0]
        return TokenizedTexts.from_rows(rows, truncated, failures)

    def tokenize_whole(self, texts: Sequence[str]) -> TokenizedTexts:
        """The ids of all texts, whatever their length."""
        return TokenizedTexts.from_rows(self._encode(texts), np.zeros(len(texts), dtype=np.bool_), {})

    def frame(self, prompt: str, max_tokens: int, overlap: int) -> PassageFrame:
        """How texts with this prompt before them are cut into passages."""
        ids = np.array(self._rust.encode(prompt).ids, dtype=np.int32)
        return PassageFrame(max_tokens, overlap, ids[: len(ids) - self._num_suffix], self._num_suffix)

    def count_prompt_tokens(self, prompt: str) -> int:
        """Leading tokens that a prompt takes, without the special ones at its end (as sentence-transformers counts)."""
        if not prompt:
            return 0
        ids = self._rust.encode(prompt).ids
        return len(ids) - (1 if ids and ids[-1] in self._special_ids else 0)

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Releases the GIL; `fast` leaves out the offsets into the text, which nobody asks for.

        Some texts at a time: the library keeps more than a hundred bytes for a token, its text included.
        """
        rows: list[NDArray[np.int32]] = []
        for group in _group(texts):
            is_large = sum(map(len, group)) > FEW_CHARS
            with self._large_groups if is_large else contextlib.nullcontext():
                # Not bound to a name, so that they are gone before the next group.
                rows += [
                    np.array(encoding.ids, dtype=np.int32) for encoding in self._rust.encode_batch_fast(group)
                ]
        return rows

    def _cut_text(self, text: str, max_tokens: int) -> str:
        """The text up to a space that lies far enough behind, so that a book is not tokenized for its first page."""
        limit = max_tokens * CHARS_PER_TOKEN
        if not self._can_cut_text or len(text) <= 2 * limit:
            return text
        end = text.rfind(" ", limit // 2, limit)
        return text if end < 0 or text[end - 1].isspace() else text[:end]

    def _encode_again_whole(
        self, texts: Sequence[str], given: Sequence[str], rows: list[NDArray[np.int32]], max_tokens: int
    ) -> None:
        """Replaces, in `rows`, those of cut texts that turned out not to fill `max_tokens`."""
        short = [
            index
            for index, (text, part) in enumerate(zip(texts, given, strict=True))
            if part is not text and len(rows[index]) <= max_tokens
        ]
        for index, ids in zip(short, self._encode([texts[index] for index in short]), strict=True):
            rows[index] = ids

    def _count_suffix(self) -> int:
        """How many special tokens come behind a text, seen on a text without any of its own. Raises ModelError."""
        bare = self._rust.encode("a", add_special_tokens=False).ids
        whole = self._rust.encode("a").ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return len(whole) - len(bare) - start
        raise ModelError(
            "The tokenizer changes a text's own tokens when it adds special ones; that is not supported."
        )


def _group(texts: Sequence[str]) -> Iterator[list[str]]:
    """Runs of texts of about GROUP_CHARS together; a longer text is alone."""
    group: list[str] = []
    num_chars = 0
    for text in texts:
        if group and num_chars + len(text) > GROUP_CHARS:
            yield group
            group, num_chars = [], 0
        group.append(text)
        num_chars += len(text)
    if group:
        yield group


def _splits_at_spaces(description: dict[str, Any]) -> bool:
    """Whether the first tokens of a text can never depend on what comes behind a later space."""
    pre_tokenizer = description.get("pre_tokenizer") or {}
    kind = pre_tokenizer.get("type")
    is_split = (
        kind in SPLITS_AT_SPACES
        or (kind == "ByteLevel" and pre_tokenizer.get("use_regex", True))
        or (kind == "Metaspace" and pre_tokenizer.get("split", True))
    )
    # An added token that holds a space, or eats spaces to its left, would be seen across the cut.
    plain_tokens = all(
        " " not in token["content"] and not token.get("lstrip")
        for token in description.get("added_tokens", [])
    )
    return bool(is_split and plain_tokens)


def _lowers_case(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_lowers_case(part) for part in normalizer["normalizers"])
    return normalizer["type"] == "Lowercase" or bool(normalizer.get("lowercase"))
