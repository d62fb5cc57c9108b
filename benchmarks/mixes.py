"""Mixes: the kinds of texts that encoders are compared on, real ones all. Knows nothing of models or systems.

Deterministic: the same Python and the same packages give the same texts in the same order.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from benchmarks.texts import list_docstrings
from vectormill.corpus import read_docstrings, split_first_sentence, take_evenly

PARAGRAPHS: Final = "paragraphs"
QUERIES: Final = "queries"
DOCUMENTS: Final = "documents"
OUTLIERS: Final = "outliers"
CHINESE: Final = "chinese"
SHORT_JOB: Final = "short_job"

# Texts of each mix where nothing else is asked: about 350,000 tokens together. Those with targets are gone through as
# often as it takes for a pass that tells a rate (benchmarks.cases.engine.pass_length).
NUM_TEXTS: Final[Mapping[str, int]] = {
    PARAGRAPHS: 1200,
    QUERIES: 2000,
    DOCUMENTS: 120,
    OUTLIERS: 1000,
    CHINESE: 300,
    SHORT_JOB: 1200,
}
LENGTHENED: Final = (PARAGRAPHS, QUERIES, DOCUMENTS)
SMALLEST_MIX: Final = 10
# One text of ten is long.
OUTLIER_PERIOD: Final = 10
PARAGRAPH_WORDS: Final = (30, 200)
QUERY_WORDS: Final = (3, 12)
# More than the 512 tokens that BERT has positions for, and no book: a tokenizer reads all that a model then leaves out.
DOCUMENT_WORDS: Final = (400, 2000)
CHINESE_CHARS: Final = 15

_FIELD = re.compile(r"^:(?:type|rtype|return).*$", re.MULTILINE)
_PARAMETER = re.compile(r"^:param \w+:\s*", re.MULTILINE)
_TAG = re.compile(r"</?\w+[^>]*>")
_HAN = re.compile(r"[\u4e00-\u9fff]")


@dataclass(frozen=True, slots=True)
class Mix:
    """Texts of one kind; `description` says which, for the table's readers."""

    name: str
    description: str
    texts: tuple[str, ...]


def make_mix(name: str, num_texts: int, chinese: Path) -> Mix:
    """So many texts of a kind, or all there are; `chinese` is where packages with Chinese texts are installed.

    Raises LookupError when there is none.
    """
    description, list_texts = _KINDS[name]
    texts = list_texts(num_texts) if name != CHINESE else take_evenly(list_chinese(chinese), num_texts)
    if not texts:
        raise LookupError(f"There are no texts for the mix {name!r}.")
    return Mix(name, description, tuple(texts))


def plan_sizes(names: Sequence[str], items: int | None) -> dict[str, int]:
    """Number of texts by mix: the usual ones, or in proportion to `items` paragraphs."""
    share = 1.0 if items is None else items / NUM_TEXTS[PARAGRAPHS]
    return {name: max(SMALLEST_MIX, round(NUM_TEXTS[name] * share)) for name in names}


def list_paragraphs(num_texts: int) -> list[str]:
    low, high = PARAGRAPH_WORDS
    return take_evenly([text for text in _docstrings() if low <= len(text.split()) <= high], num_texts)


def list_queries(num_texts: int) -> list[str]:
    """First sentences of docstrings: short, and each says what somebody might look for."""
    low, high = QUERY_WORDS
    sentences = unique(split_first_sentence(text)[0] for text in _docstrings())
    return take_evenly([text for text in sentences if low <= len(text.split()) <= high], num_texts)


def list_documents(num_texts: int) -> list[str]:
    """All docstrings of a module one after the other, as `help` shows them, and the chapters of Python's reference."""
    low, high = DOCUMENT_WORDS
    modules: dict[str, list[str]] = {}
    for item in list_docstrings():
        modules.setdefault(item["key"].partition(".")[0], []).append(item["text"])
    chapters = [topics[name] for name in sorted(topics)]
    texts = unique([*("\n\n".join(parts) for parts in modules.values()), *chapters])
    return take_evenly([cut_words(text, high) for text in texts if len(text.split()) >= low], num_texts)


def list_outliers(num_texts: int) -> list[str]:
    """Queries, with a document in every tenth place; from the start again when there are not enough documents."""
    num_documents = max(1, num_texts // OUTLIER_PERIOD)
    documents = list_documents(num_documents)
    queries = iter(list_queries(num_texts))
    # A repeated document gets its number, so that no two texts are equal: equal ones may be encoded once.
    numbered = [
        documents[number] if number < len(documents) else f"{number}. {documents[number % len(documents)]}"
        for number in range(num_documents)
    ]
    places = range(OUTLIER_PERIOD // 2, num_texts, OUTLIER_PERIOD)
    long = dict(zip(places, numbered, strict=False))
    return [long[place] if place in long else next(queries) for place in range(num_texts)]


def list_chinese(directory: Path) -> list[str]:
    """The Chinese docstrings below a directory, without what is for a documentation tool alone."""
    texts = unique(clean_markup(docstring.text) for docstring in read_docstrings(directory))
    return [
        text
        for text in texts
        if (num_han := len(_HAN.findall(text))) >= CHINESE_CHARS and 3 * num_han > len(text)
    ]


def clean_markup(text: str) -> str:
    """Prose without field names and tags."""
    for pattern in (_FIELD, _PARAMETER, _TAG):
        text = pattern.sub("", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def cut_words(text: str, num_words: int) -> str:
    """The text's beginning up to so many words, its spaces and line ends unchanged."""
    found = list(itertools.islice(re.finditer(r"\S+", text), num_words))
    return text[: found[-1].end()] if found else text


def number_copies(texts: Sequence[str], num_copies: int) -> list[str]:
    """The texts so many times over, from the second round on behind the round's number: no two are equal."""
    return [text if not number else f"{number} {text}" for number in range(num_copies) for text in texts]


def unique(texts: Iterable[str]) -> list[str]:
    """Each text once, in order of first occurrence: equal texts may be encoded once, which is not what is measured."""
    return list(dict.fromkeys(texts))


def _docstrings() -> list[str]:
    return unique(item["text"] for item in list_docstrings())


_KINDS: Final[Mapping[str, tuple[str, Callable[[int], list[str]]]]] = {
    PARAGRAPHS: ("docstrings of 30 to 200 words", list_paragraphs),
    QUERIES: ("first sentences of docstrings, 3 to 12 words", list_queries),
    DOCUMENTS: (
        "whole modules' docstrings and chapters of Python's reference, 400 to 2,000 words",
        list_documents,
    ),
    OUTLIERS: ("nine queries to each long document", list_outliers),
    SHORT_JOB: ("the same docstrings as one short job: how it begins and ends", list_paragraphs),
    CHINESE: ("docstrings of a library that is documented in Chinese", list_paragraphs),
}
