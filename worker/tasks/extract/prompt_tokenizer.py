"""PromptTokenizer: the tokens of hints and of texts, apart, and how a tokenizer joins them. Knows no windows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from vectormill.domain.errors import ModelError
from worker.tokens.reference import group_texts

PREFIX: Final = "[PREFIX]"
TYPE: Final = "[TYPE]"
CLASSIFY: Final = "[CLASSIFY]"
MULTICLASSIFY: Final = "[MULTICLASSIFY]"
# In this order: ids are given one after another.
ADDED_TOKENS: Final = (PREFIX, TYPE, CLASSIFY, MULTICLASSIFY)
# The names under which a tokenizer's files give its special tokens.
NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of one string, without special ones: ids and where each stands, in code points."""

    ids: NDArray[np.int32]  # [L]
    starts: NDArray[np.int32]  # [L]
    ends: NDArray[np.int32]  # [L]

    @classmethod
    def join(cls, parts: "Sequence[Tokens]", shifts: Sequence[int]) -> "Tokens":
        """Join parts; part i starts at `shifts[i]` of the joined string."""
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.starts + shift for part, shift in zip(parts, shifts, strict=True)]),
            np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)]),
        )

    def part(self, start: int, end: int) -> "Tokens":
        """Return a view of some of the tokens."""
        return Tokens(self.ids[start:end], self.starts[start:end], self.ends[start:end])

    def __len__(self) -> int:
        return len(self.ids)


class PromptTokenizer:
    """A model's `tokenizer.json` with RexUniNLU's four tokens, which the published files leave to be added.

    A pair is [CLS] hint [SEP] text [SEP], and a hint is special tokens with strings between them, so that the ids of
    the whole are those of its parts: special tokens are found before anything is normalized, and what stands between
    two is tokenized for itself. Raises ModelError when the tokenizer joins pairs in another way.
    """

    def __init__(self, directory: Path) -> None:
        self._rust = _read_tokenizer(directory)
        self.cls_id, self.sep_id, self.text_type_id = _find_frame(self._rust)
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self.prefix_id, self.type_id = vocabulary[PREFIX], vocabulary[TYPE]
        self.classify_ids = {token: vocabulary[token] for token in (CLASSIFY, MULTICLASSIFY)}

    @property
    def num_ids(self) -> int:
        """Return how many rows the model's word table must have."""
        return int(self._rust.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize each text, some at a time, since the library keeps more than a hundred bytes for a token."""
        return [_lay_out(encoding) for encoding in self._encode(texts)]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return how many tokens each text has, without special ones."""
        return [len(encoding.ids) for encoding in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> Iterator[Encoding]:
        for group in group_texts(texts):
            yield from self._rust.encode_batch(group, add_special_tokens=False)


def _lay_out(encoding: Encoding) -> Tokens:
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    return Tokens(
        np.array(encoding.ids, dtype=np.int32),
        np.ascontiguousarray(offsets[:, 0]),
        np.ascontiguousarray(offsets[:, 1]),
    )


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        rust = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelError(
            f"The tokenizer {path} cannot be read: {error}. A model that has only spm.model or vocab.txt needs it "
            "written once: AutoTokenizer.from_pretrained(…).save_pretrained(…) of transformers does."
        ) from error
    rust.no_padding()
    rust.no_truncation()
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    # Special tokens that the files only name are tokens in a text too, as transformers reads them.
    rust.add_special_tokens([token for token in _list_named_tokens(directory) if token not in known])
    rust.add_special_tokens([token for token in ADDED_TOKENS if token not in known])
    return rust


def _list_named_tokens(directory: Path) -> list[str]:
    """Return the special tokens that the tokenizer's files name beside tokenizer.json, each once."""
    named: list[str] = []
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / file
        if not path.is_file():
            continue
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for name in NAMED_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named.append(token)
    return list(dict.fromkeys(named))


def _find_frame(rust: Tokenizer) -> tuple[int, int, int]:
    """Return the ids of [CLS] and [SEP], and the type id of a text behind a hint. Raises ModelError."""
    first, second = (rust.encode(word, add_special_tokens=False).ids for word in ("甲a", "乙b"))
    pair, single = rust.encode("甲a", "乙b"), rust.encode("甲a")
    cls_id, sep_id = pair.ids[0], pair.ids[-1]
    hint = [cls_id, *first, sep_id]
    text_type_id = pair.type_ids[-1]
    type_ids = [0] * len(hint) + [text_type_id] * (len(second) + 1)
    if single.ids != hint or pair.ids != [*hint, *second, sep_id] or pair.type_ids != type_ids:
        raise ModelError(
            "The tokenizer joins two texts to another sequence than [CLS] first [SEP] second [SEP], with type ids 0 "
            "for the first; prompts are of that form alone."
        )
    return cls_id, sep_id, text_type_id
