"""Splitting a text into words whose tokens do not depend on the neighbouring words.

A tokenizer that is described by its parts (normalizer, pre-tokenizer, model) allows this in one of two ways.
Either each part acts only between two spaces, and spaces are dropped (BERT). Or a space is the beginning of
the next word (RoBERTa, Qwen, T5): then a text is cut before each single space between two characters that are
not spaces, because no part acts across that place. This module lists the parts for which this holds, with the
reason for each; any other combination is not split. Texts with characters for which it does not hold are not
split either.

If only the first tokens of a long text are wanted, one place suffices after which nothing changes the tokens
before it. More tokenizers have such places than have words, and texts without spaces have them too. All
functions are pure.
"""

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

# Characters that str.split() treats as whitespace, but that BERT removes as control characters, which joins
# the text around them.
CONTROL_SPACE: Final = re.compile("[\x0b\x0c\x1c-\x1f\x85]")

# Each of these acts on a character and its following marks, or on each word; whitespace stays whitespace.
NORMALIZERS: Final = frozenset({"BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents"})
SPLITS_AT_WHITESPACE: Final = frozenset({"BertPreTokenizer", "Whitespace", "WhitespaceSplit"})

# The place before a single space. Whitespace in Python includes all that any tokenizer's pattern treats as
# such.
BEFORE_A_SPACE: Final = re.compile(r"(?<=\S)(?= \S)")
NEVER: Final = re.compile(r"(?!)")
# Each of these acts on a character and its following marks, and adds no whitespace where there was none.
SPACE_KEEPING_NORMALIZERS: Final = frozenset({"Lowercase", "NFC", "NFD"})
# With these, a piece begins at every space, so it does not matter if a normalizer adds a space.
METASPACE_NORMALIZERS: Final = SPACE_KEEPING_NORMALIZERS | {"NFKC", "NFKD", "StripAccents"}


def _write_pattern(numbers: str) -> str:
    """Return the pattern of Llama 3. Qwen 2 and 3 differ only in the number of digits in a piece."""
    letters = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    return f"{letters}|{numbers}" + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


# No match of these patterns has a space after its first character, unless whitespace comes before or after
# the space.
SPLITS_BEFORE_A_SPACE: Final = frozenset({_write_pattern(r"\p{N}{1,3}"), _write_pattern(r"\p{N}")})


# Each of these acts on a character and what belongs to it, never across a single space between two plain
# characters.
CUTTABLE_NORMALIZERS: Final = METASPACE_NORMALIZERS | {
    "BertNormalizer",
    "Nmt",
    "Precompiled",
    "Prepend",
    "Strip",
}
MARK: Final = "▁"
# A letter or digit that no normalizer joins with the next character, or replaces by one that ends with a
# space. This excludes characters that combine with the next one, Arabic presentation forms, and all outside
# the basic plane.
PLAIN: Final = "[^\\W_\u0d4e\ufb50-\ufdff\ufe70-\ufeff\U00010000-\U0010ffff]"
AT_A_SPACE: Final = f"(?<={PLAIN})(?= {PLAIN})"
# Chinese and Japanese punctuation that no normalizer changes.
STOPS: Final = "。、"
AT_A_STOP: Final = f"(?<={PLAIN})(?=[{STOPS}])"
IDEOGRAPH: Final = "[\u4e00-\u9fff]"


@dataclass(frozen=True, slots=True)
class Splitting:
    """A way to split texts into words: `split` returns all words of a text without `unsplittable` matches."""

    split: Callable[[str], list[str]]
    unsplittable: re.Pattern[str]

    def split_all(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the words of each text; an empty list for a text that must not be split."""
        # Texts nearly always match nothing, so one search over all is tried first.
        if self.unsplittable.search("".join(texts)) is None:
            return [self.split(text) for text in texts]
        return [[] if self.unsplittable.search(text) else self.split(text) for text in texts]


def find_splitting(description: dict[str, Any]) -> Splitting | None:
    """Return the splitting that a `tokenizer.json` allows; None if its parts are not known to allow one."""
    # Added tokens are found before a text is split, so none may span two words.
    added = [token["content"] for token in description.get("added_tokens", [])]
    has_wide_token = any(re.search(r"[\s▁Ġ]", token) or not token for token in added)
    if has_wide_token or (description.get("model") or {}).get("dropout"):
        return None
    normalizers = {part["type"] for part in _parts(description.get("normalizer"), "normalizers")}
    parts = _parts(description.get("pre_tokenizer"), "pretokenizers")
    if _begins_pieces_at_spaces(parts, normalizers):
        return Splitting(BEFORE_A_SPACE.split, NEVER)
    # All pre-tokenizers after the first see only words, not their place in the text.
    sees_words_alone = all(
        part["type"] in SPLITS_AT_WHITESPACE | {"Punctuation", "Digits"}
        or (part["type"] == "Metaspace" and part.get("prepend_scheme") != "first")
        for part in parts
    )
    if not parts or parts[0]["type"] not in SPLITS_AT_WHITESPACE or not sees_words_alone:
        return None
    return Splitting(str.split, CONTROL_SPACE) if normalizers <= NORMALIZERS else None


def find_cuts(description: dict[str, Any]) -> re.Pattern[str] | None:
    """Return a pattern for places to cut a text without changing the tokens before; None if unknown.

    Every part of the tokenizer has to treat the text before such a place independently of the text after it.
    If no pre-tokenizer ensures this, the vocabulary must: Unigram's best pieces and BPE's merges are found
    independently on both sides of a place that no token of the vocabulary spans.
    """
    model = description.get("model") or {}
    added = [token["content"] for token in description.get("added_tokens", [])]
    # Added tokens are found in the whole text, so none may span a single space or a punctuation mark of
    # STOPS.
    if model.get("dropout") or any(
        re.search(rf"\S[\s{MARK}Ġ]|[\s{MARK}Ġ]\S|^\s$|[{STOPS}]", token) for token in added
    ):
        return None
    normalizers = _parts(description.get("normalizer"), "normalizers")
    if not all(_keeps_sides_apart(part) for part in normalizers):
        return None
    parts = _parts(description.get("pre_tokenizer"), "pretokenizers")
    match [part["type"] for part in parts]:
        case [("BertPreTokenizer" | "Whitespace"), *_]:
            return re.compile(f"{AT_A_SPACE}|{AT_A_STOP}")
        case ["ByteLevel"] if parts[0].get("use_regex", True):
            return re.compile(f"{AT_A_SPACE}|{AT_A_STOP}")
        case ["Split", "ByteLevel"] if _begins_pieces_at_spaces(parts, set()):
            return re.compile(f"{AT_A_SPACE}|{AT_A_STOP}")
        case ["WhitespaceSplit"] | ["WhitespaceSplit", "Metaspace"] | ["Metaspace"]:
            is_split = parts != [] and (parts[0]["type"] == "WhitespaceSplit" or parts[0].get("split", True))
        case [] | ["Split"]:
            is_split = False
        case _:
            return None
    vocabulary = model.get("vocab") or {}
    if model.get("type") not in ("BPE", "Unigram"):
        return re.compile(AT_A_SPACE) if is_split else None
    tokens = [piece for piece, _ in vocabulary] if isinstance(vocabulary, list) else list(vocabulary)
    at_a_stop = _find_cuts_at_stops(tokens)
    if is_split:
        return re.compile(f"{AT_A_SPACE}|{at_a_stop}")
    return (
        re.compile(f"{AT_A_SPACE}|{at_a_stop}") if _ends_tokens_at_marks(parts, normalizers, tokens) else None
    )


def _keeps_sides_apart(normalizer: dict[str, Any]) -> bool:
    """Return True if a normalizer changes the beginning of a text just as within the whole text."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] in CUTTABLE_NORMALIZERS
    pattern = normalizer["pattern"]
    if "Regex" in pattern:
        return bool(pattern["Regex"] == " {2,}")
    return pattern["String"] == " " or not re.search(rf"[\s{STOPS}]", pattern["String"])


def _ends_tokens_at_marks(
    parts: Sequence[dict[str, Any]], normalizers: Sequence[dict[str, Any]], tokens: Sequence[str]
) -> bool:
    """Return True if each space becomes a mark (▁) that no token spans."""
    makes_marks = any(
        part["type"] == "Metaspace"
        or (part["type"] == "Replace" and part["pattern"].get("String") == " " and part["content"] == MARK)
        for part in (*normalizers, *parts)
    )
    splits_nothing = all(
        part["type"] == "Metaspace" or part["pattern"].get("String") == " " for part in parts
    )
    is_apart = MARK in tokens and not any(re.search(f"[^{MARK}]{MARK}", token) for token in tokens)
    return makes_marks and splits_nothing and is_apart


def _find_cuts_at_stops(tokens: Sequence[str]) -> str:
    """Return a pattern for places between an ideograph and a mark of STOPS that no token spans."""
    known = "".join(stop for stop in STOPS if stop in tokens)
    if not known:
        return "(?!)"
    joined = {before for token in tokens for before, stop in pairwise(token) if stop in known}
    apart = f"(?<![{re.escape(''.join(sorted(joined)))}])" if joined else ""
    return f"(?<={IDEOGRAPH}){apart}(?=[{known}])"


def _begins_pieces_at_spaces(parts: Sequence[dict[str, Any]], normalizers: Set[str]) -> bool:
    """Return True if a single space between two other characters always begins a piece."""
    match [part["type"] for part in parts]:
        case ["Metaspace"]:
            return bool(parts[0].get("split", True)) and normalizers <= METASPACE_NORMALIZERS
        case ["ByteLevel"]:
            return bool(parts[0].get("use_regex", True)) and normalizers <= SPACE_KEEPING_NORMALIZERS
        case ["Split", "ByteLevel"]:
            split, byte_level = parts
            is_known = (
                split["pattern"].get("Regex") in SPLITS_BEFORE_A_SPACE and split["behavior"] == "Isolated"
            )
            is_plain = not (split.get("invert") or byte_level["use_regex"] or byte_level["add_prefix_space"])
            return is_known and is_plain and normalizers <= SPACE_KEEPING_NORMALIZERS
    return False


def _parts(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return a part of a tokenizer as a list; for a Sequence, the list of its parts."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part[key] for inner in _parts(each, key)]
