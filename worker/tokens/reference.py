"""Reference is the Rust tokenizers library, which defines what a text's tokens are.

It knows nothing about limits or words.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence
from tokenizers.processors import TemplateProcessing

from vectormill.domain.errors import ModelError
from vectormill.models.model_card import SpecialTokens
from vectormill.models.stored import read_stored
from vectormill.ragged import Ragged

# Characters that are tokenized at once. This keeps all threads of the library busy; a whole chunk of books
# would take hundreds of MB.
GROUP_CHARS: Final = 1 << 16
# All threads that tokenize at the same time share the library's own threads, which two calls keep busy. More
# calls would only take memory: six chunks of long texts took 115 MiB, most of which the heap kept. Calls with
# few characters never wait.
NUM_LARGE_GROUPS: Final = 2
FEW_CHARS: Final = 1 << 12
# The special tokens of a BERT that has only a vocabulary, because it is older than tokenizer.json.
SPECIAL: Final = {
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
    "pad_token": "[PAD]",
}


# What the tokenizer itself adds stays.
NO_SPECIAL: Final = SpecialTokens()


class Reference:
    """The tokenizer in a model's directory, as the library reads it. Thread-safe; never truncates a text.

    `description` is the content of its file, and `favors_longer` says how pairs are cut (`PairFrame`). Raises
    ModelError if the library cannot read the tokenizer.
    """

    def __init__(
        self, directory: Path, *, lowercase: bool = False, special: SpecialTokens = NO_SPECIAL
    ) -> None:
        self.rust, self.description, self.favors_longer = _read(directory)
        self.rust.no_padding()
        self.rust.no_truncation()
        if lowercase and not _lowers_case(self.description.get("normalizer")):
            inner = [] if self.rust.normalizer is None else [self.rust.normalizer]
            self.rust.normalizer = NormalizerSequence([Lowercase(), *inner])
        if special.is_rewritten:
            self.rust.post_processor = _make_template(self.rust, special)
        self.prefix, self.suffix = self._find_special()
        added = self.description.get("added_tokens", [])
        self._find_raw = _pattern(token["content"] for token in added if not token.get("normalized"))
        self._find_normalized = _pattern(
            self._normalize(token["content"]) for token in added if token.get("normalized")
        )
        self._large_groups = threading.BoundedSemaphore(NUM_LARGE_GROUPS)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> Ragged:
        """Return the int32 token ids of each text. Releases the GIL.

        Texts are tokenized in groups, because the library keeps more than a hundred bytes for each token.
        `encode_batch_fast` leaves out offsets, which are not needed.
        """
        parts = [Ragged(np.zeros(0, np.int32), np.zeros(1, np.int64))]
        for group in group_texts(texts):
            is_large = sum(map(len, group)) > FEW_CHARS
            with self._large_groups if is_large else contextlib.nullcontext():
                # The encodings are not bound to a name, so that the library's objects are freed before the
                # next group.
                parts.append(
                    _lay_out(
                        [
                            encoding.ids
                            for encoding in self.rust.encode_batch_fast(
                                group, add_special_tokens=add_special_tokens
                            )
                        ]
                    )
                )
        return Ragged.join(parts)

    def encode_with_characters(self, texts: Sequence[str]) -> tuple[Ragged, Ragged]:
        """Return the token ids of each text, and for each token two numbers: its first character, and that behind."""
        found = [encoding for group in group_texts(texts) for encoding in self.rust.encode_batch(group)]
        characters = [list(chain.from_iterable(encoding.offsets)) for encoding in found]
        return _lay_out([encoding.ids for encoding in found]), _lay_out(characters)

    def encode_one(self, text: str) -> list[int]:
        ids: list[int] = self.rust.encode(text).ids
        return ids

    def has_added_token(self, text: str) -> bool:
        """Return True if the library may find an added token in the text, either raw or normalized."""
        if self._find_raw is not None and self._find_raw.search(text):
            return True
        return self._find_normalized is not None and bool(self._find_normalized.search(self._normalize(text)))

    def _normalize(self, text: str) -> str:
        return text if self.rust.normalizer is None else str(self.rust.normalizer.normalize_str(text))

    def _find_special(self) -> tuple[list[int], list[int]]:
        """Return the ids before and after each text, derived from a sample text.

        Raises ModelError if they cannot be derived.
        """
        bare = self.rust.encode("a", add_special_tokens=False).ids
        whole = self.rust.encode("a").ids
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        raise ModelError(
            "The tokenizer changes a text's own tokens when it adds special ones, which is not supported."
        )


def _read(directory: Path) -> tuple[RustTokenizer, dict[str, Any], bool]:
    """Return the tokenizer, its description, and its `favors_longer` for pairs (`PairFrame`)."""
    path = directory / "tokenizer.json"
    if not path.is_file() and (directory / "vocab.txt").is_file():
        rust = read_vocabulary(directory)
        return rust, json.loads(rust.to_str()), False
    try:
        return RustTokenizer.from_file(str(path)), json.loads(path.read_text(encoding="utf-8")), True
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelError(f"Cannot read the tokenizer {path}: {error}.") from error


def read_vocabulary(directory: Path) -> RustTokenizer:
    """Return the tokenizer that transformers makes from a BERT's `vocab.txt` and configuration.

    Raises ModelError if the files cannot be used.
    """
    path = directory / "vocab.txt"
    # Do not use splitlines: pieces of multilingual vocabularies contain characters that it treats as ends of
    # lines.
    words = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    vocabulary = {word: number for number, word in enumerate(words)}
    missing = [
        token
        for token in (SPECIAL["unk_token"], SPECIAL["cls_token"], SPECIAL["sep_token"])
        if token not in vocabulary
    ]
    if missing:
        raise ModelError(f"The vocabulary {path} has no {' or '.join(missing)}; it is not a BERT vocabulary.")
    config = read_stored(directory / "tokenizer_config.json", directory.name)
    tokenizer = RustTokenizer(
        WordPiece(vocabulary, unk_token=SPECIAL["unk_token"], max_input_chars_per_word=100)
    )
    tokenizer.add_special_tokens([token for token in SPECIAL.values() if token in vocabulary])
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=config.take("tokenize_chinese_chars", True),
        strip_accents=config.take("strip_accents", False)
        if config.find("strip_accents") is not None
        else None,
        lowercase=config.take("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    first, last = SPECIAL["cls_token"], SPECIAL["sep_token"]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[(first, vocabulary[first]), (last, vocabulary[last])],
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _make_template(rust: RustTokenizer, special: SpecialTokens) -> TemplateProcessing:
    """Return the template that puts special tokens around texts. Raise ModelError if a token has no id."""
    names = (*special.prefix, *special.suffix)
    ids = {name: rust.token_to_id(name) for name in names}
    if None in ids.values():
        raise ModelError(
            f"The tokenizer has no id for at least one of its special tokens: {', '.join(names)}."
        )
    sides = [[*special.prefix, text, *special.suffix] for text in ("$A:0", "$B:1")]
    second = [part if part.startswith("$") else f"{part}:1" for part in sides[1]]
    return TemplateProcessing(single=sides[0], pair=[*sides[0], *second], special_tokens=list(ids.items()))


def group_texts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield groups of consecutive texts with at most GROUP_CHARS together; a longer text is alone."""
    if sum(map(len, texts)) <= GROUP_CHARS:
        if texts:
            yield list(texts)
        return
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


def _lay_out(rows: list[list[int]]) -> Ragged:
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    ids = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))
    return Ragged.from_lengths(ids, lengths)


def _pattern(contents: Iterable[str]) -> "re.Pattern[str] | None":
    """Return a pattern that matches any of these strings; None if there are none."""
    wanted = [re.escape(content) for content in contents if content]
    return re.compile("|".join(wanted)) if wanted else None


def _lowers_case(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return False
    if normalizer["type"] == "Sequence":
        return any(_lowers_case(part) for part in normalizer["normalizers"])
    return normalizer["type"] == "Lowercase" or bool(normalizer.get("lowercase"))
