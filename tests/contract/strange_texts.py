"""Texts for tokenizers: real ones of the standard library, and such as no author writes."""

import random
import unicodedata
from collections.abc import Iterator
from functools import cache
from itertools import islice

from vectormill.corpus import read_docstrings

# What normalizers, pre-tokenizers and searches for added tokens treat each in its own way.
POOLS = (
    " \t\n\r \n ",
    "\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff",
    "\x00\x01\x08\x7f\x9f\xad\ufffd\u200c\u200d\u2060\ue000",
    "abcXYZ019",
    "éßİıſςΣǅﬁ½ÅŐŕԱа́ЖЩ",
    "\u0301\u0308\u0327\u0345\u1ab0\u0f71\u3099\u05b0",
    "漢字かな한글각゙ｶﾞ㍿",
    ".,!?[]()-_'\"`´¨▁ĠĊ／",
    "🙂👨👩🇩🇪🏽️",
    "אבעربीहिन्दीไทย",
    "ⅣⅫⓐ①²¾",
)
ADDED_TOKENS = (
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[UNK]",
    "[PAD]",
    "[sep]",
    "<s>",
    "</s>",
    "<mask>",
    "<pad>",
    "##a",
    "Ǣdded",
)
SPACES = (" ", "  ", "\n", "\n\n", "\t", " \n", "\r\n", "\u00a0", "\u3000", "\x1c", "\x85", "")


@cache
def real_words() -> tuple[str, ...]:
    return tuple(word for docstring in islice(read_docstrings(), 4000) for word in docstring.text.split())


@cache
def real_texts() -> tuple[str, ...]:
    return tuple(docstring.text for docstring in islice(read_docstrings(), 4000))


def strange_texts(seed: int) -> Iterator[str]:
    """Without end; the same ones for the same seed."""
    source = random.Random(seed)
    kinds = (_real, _phrase, _spaced, _soup, _any_characters, _long_word, _touched)
    while True:
        yield source.choices(kinds, (1, 8, 4, 3, 2, 1, 4))[0](source)


def _real(source: random.Random) -> str:
    text = source.choice(real_texts())
    start = source.randrange(max(1, len(text) - 200))
    return text[start : start + source.randrange(400)]


def _phrase(source: random.Random) -> str:
    words = real_words()
    start = source.randrange(len(words))
    prompt = source.choice(("", "", "query: ", "passage: "))
    return prompt + " ".join(words[start : start + source.randrange(20)])


def _spaced(source: random.Random) -> str:
    """Real words with all kinds of spaces between them, and added tokens."""
    pieces = []
    for _ in range(source.randrange(16)):
        pieces.append(source.choice(ADDED_TOKENS) if source.random() < 0.04 else source.choice(real_words()))
        pieces.append(source.choice(SPACES) if source.random() < 0.3 else " ")
    return "".join(pieces)


def _soup(source: random.Random) -> str:
    return "".join(source.choice(source.choice(POOLS)) for _ in range(source.randrange(40)))


def _any_characters(source: random.Random) -> str:
    return "".join(_character(source) for _ in range(source.randrange(24)))


def _character(source: random.Random) -> str:
    """Of any category but surrogates, which are no text."""
    while True:
        top = source.choice((0x80, 0x250, 0x3000, 0x10000, 0x110000))
        character = chr(source.randrange(top))
        if unicodedata.category(character) != "Cs":
            return character if source.random() < 0.8 else character + " "


def _long_word(source: random.Random) -> str:
    length = source.choice((31, 32, 33, 99, 100, 101, 102, 300))
    return f"{source.choice(real_words())} {source.choice('aé漢=-.') * length} {source.choice(real_words())}"


def _touched(source: random.Random) -> str:
    """A phrase in which some characters are others."""
    characters = list(_phrase(source))
    for _ in range(source.randrange(1, 4)):
        if characters:
            characters[source.randrange(len(characters))] = source.choice(
                (source.choice(source.choice(POOLS)), source.choice(ADDED_TOKENS), _character(source))
            )
    return "".join(characters)
