"""Texts to encode: real ones that every machine has, the same in every run. Knows nothing of models."""

import functools
import hashlib
import itertools
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from vectormill.corpus import Docstring, read_docstrings, split_first_sentence, take_evenly
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.chunk import choose_chunk_tokens

# About as many lines as there are, those that occur again included.
NUM_LINES: Final = 36_000
PARAGRAPHS: Final = "paragraphs"
QUERIES: Final = "queries"
DOCUMENTS: Final = "documents"
OUTLIERS: Final = "outliers"
CHINESE: Final = "chinese"
SHORT_JOB: Final = "short_job"
# In the mix of outliers one text of so many is long.
OUTLIER_PERIOD: Final = 10
CHINESE_CHARS: Final = 15
# What is for a documentation tool alone.
_MARKUP: Final = re.compile(r"^:(?:type|rtype|return).*$|^:param \w+:\s*|</?\w+[^>]*>", re.MULTILINE)
_HAN: Final = re.compile(r"[\u4e00-\u9fff]")


@functools.cache
def _read_once() -> tuple[Docstring, ...]:
    """Reading the whole standard library takes seconds."""
    return tuple(read_docstrings())


def list_docstrings(num_items: int | None = None) -> list[ItemJson]:
    """Return every docstring of the standard library, or so many spread evenly over them."""
    items: list[ItemJson] = [{"key": docstring.key, "text": docstring.text} for docstring in _read_once()]
    return items if num_items is None else take_evenly(items, num_items)


def list_lines(num_items: int) -> list[ItemJson]:
    """Return so many lines of the docstrings, again and again if need be, each under a key of its own."""
    lines = [line.strip() for each in _read_once() for line in each.text.splitlines() if line.strip()]
    return [{"key": f"line-{number}", "text": lines[number % len(lines)]} for number in range(num_items)]


def list_distinct_lines(num_items: int) -> list[ItemJson]:
    """Return so many lines of which no two are equal; used up, they come again behind the number of the round."""
    lines = unique(item["text"] for item in list_lines(NUM_LINES))
    texts = number_copies(lines, -(-num_items // len(lines)))[:num_items]
    return [{"key": f"line-{number}", "text": text} for number, text in enumerate(texts)]


def cut_chunks(texts: Sequence[bytes], count: Callable[[bytes], int], max_items: int) -> list[list[bytes]]:
    """Cut texts as a submission does, which estimates their tokens by `count`."""
    chunks: list[list[bytes]] = [[]]
    num_tokens = num_before = 0
    for text in texts:
        is_full = num_tokens - num_before >= choose_chunk_tokens(num_before)
        if is_full or len(chunks[-1]) >= max_items:
            chunks.append([])
            num_before = num_tokens
        chunks[-1].append(text)
        num_tokens += count(text)
    return chunks


@dataclass(frozen=True, slots=True)
class Mix:
    """Texts of one kind; `description` says which, for the table's readers."""

    name: str
    description: str
    texts: tuple[str, ...]


def make_mix(name: str, num_texts: int, chinese: Callable[[], Path]) -> Mix:
    """Return so many texts of a kind, or all there are; `chinese` finds packages with Chinese texts.

    Raise LookupError when there is none.
    """
    description, _, list_texts = MIXES[name]
    texts = list_texts(num_texts) if name != CHINESE else take_evenly(list_chinese(chinese()), num_texts)
    if not texts:
        raise LookupError(f"There are no texts for the mix {name!r}.")
    return Mix(name, description, tuple(texts))


def list_between(low: int, high: int, texts: Iterable[str], num_texts: int) -> list[str]:
    """Return so many of the texts that have from `low` to `high` words."""
    return take_evenly([text for text in unique(texts) if low <= len(text.split()) <= high], num_texts)


def list_paragraphs(num_texts: int) -> list[str]:
    return list_between(30, 200, (each.text for each in _read_once()), num_texts)


def list_queries(num_texts: int) -> list[str]:
    """Return first sentences of docstrings: each says what somebody might look for."""
    return list_between(3, 12, (split_first_sentence(each.text)[0] for each in _read_once()), num_texts)


def list_documents(num_texts: int) -> list[str]:
    """Return whole modules' docstrings, as `help` shows them, and the chapters of Python's reference."""
    low, high = 400, 2000
    modules: dict[str, list[str]] = {}
    for each in _read_once():
        modules.setdefault(each.key.partition(".")[0], []).append(each.text)
    texts = unique(
        [*("\n\n".join(parts) for parts in modules.values()), *(topics[name] for name in sorted(topics))]
    )
    return take_evenly([cut_words(text, high) for text in texts if len(text.split()) >= low], num_texts)


def list_outliers(num_texts: int) -> list[str]:
    """Return queries with a document in every tenth place; a document that comes again has a number before it."""
    num_documents = max(1, num_texts // OUTLIER_PERIOD)
    documents = list_documents(num_documents)
    numbered = number_copies(documents, -(-num_documents // len(documents)))
    long = dict(zip(range(OUTLIER_PERIOD // 2, num_texts, OUTLIER_PERIOD), numbered, strict=False))
    queries = iter(list_queries(num_texts))
    return [long[place] if place in long else next(queries) for place in range(num_texts)]


def list_chinese(directory: Path) -> list[str]:
    """Return the Chinese docstrings below a directory, without markup."""
    cleaned = (_MARKUP.sub("", docstring.text) for docstring in read_docstrings(directory))
    texts = unique("\n".join(line.strip() for line in text.splitlines() if line.strip()) for text in cleaned)
    return [text for text in texts if len(_HAN.findall(text)) >= max(CHINESE_CHARS, len(text) / 3)]


def list_mixed() -> list[str]:
    """Return paragraphs, queries and documents in one shuffled order, the same in every run."""
    texts = [*list_paragraphs(2400), *list_queries(2400), *list_documents(300)]
    random.Random(0).shuffle(texts)
    return texts


# By name: what it is, texts of a pass where nothing else is asked, and how they are listed.
MIXES: Final[Mapping[str, tuple[str, int, Callable[[int], list[str]]]]] = {
    PARAGRAPHS: ("docstrings of 30 to 200 words", 1200, list_paragraphs),
    QUERIES: ("first sentences of docstrings, 3 to 12 words", 2000, list_queries),
    DOCUMENTS: ("whole modules' docstrings and chapters of Python's reference, 400 to 2,000 words", 120,
        list_documents),
    OUTLIERS: ("nine queries to each long document", 1000, list_outliers),
    CHINESE: ("docstrings of a library that is documented in Chinese", 300, list_paragraphs),
    SHORT_JOB: ("the same docstrings as one short job: how it begins and ends", 1200, list_paragraphs),
}  # fmt: skip


def cut_words(text: str, num_words: int) -> str:
    """Return the text's beginning up to so many words, its spaces and line ends unchanged."""
    found = list(itertools.islice(re.finditer(r"\S+", text), num_words))
    return text[: found[-1].end()] if found else text


def number_copies(texts: Sequence[str], num_copies: int) -> list[str]:
    """Repeat the texts, from the second round on behind the round's number: no two are equal."""
    return [text if not number else f"{number} {text}" for number in range(num_copies) for text in texts]


def unique(texts: Iterable[str]) -> list[str]:
    """Return each text once: equal texts may be encoded once, which is not what is measured."""
    return list(dict.fromkeys(texts))


def list_pairs(num_pairs: int, seed: int = 1) -> list[list[str]]:
    """Return pairs of a docstring's first sentence and what follows it, or what follows in another docstring.

    Half of the pairs belong together; half of the others are of one module.
    """
    parts: list[tuple[str, str, str]] = []
    seen: set[str] = set()
    for each in _read_once():
        sentence, rest = split_first_sentence(each.text)
        if len(sentence.split()) >= 3 and len(rest.split()) >= 5 and not {sentence, rest} & seen:
            seen |= {sentence, rest}
            parts.append((each.key.partition(".")[0], sentence, rest))
    draw = random.Random(seed)
    by_module: defaultdict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for part in parts:
        by_module[part[0]].append(part)
    pairs = []
    for part in draw.sample(parts, min(num_pairs // 2, len(parts))):
        near = by_module[part[0]]
        others = near if draw.random() < 0.5 and len(near) > 1 else parts
        other = draw.choice([each for each in others if each is not part])
        pairs += [[part[1], part[2]], [part[1], other[2]]]
    draw.shuffle(pairs)
    return pairs


def hash_of(text: str) -> bytes:
    """Return a hash that is the same on every machine, unlike Python's own."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class ExactTexts:
    """Draw texts of an exact number of tokens, made from the words of docstrings; no text is drawn twice.

    `model` is a directory with a tokenizer that puts two special tokens around a text.
    """

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        words = [word for each in _read_once() for word in each.text.split()]
        # A word, or the number of a round, and its tokens.
        distinct = unique([*words, *map(str, range(1, 1000))])
        counted = self._tokenizer.encode_batch_fast(distinct, add_special_tokens=False)
        self._sizes = {word: len(each) for word, each in zip(distinct, counted, strict=True) if len(each)}
        self._words = [word for word in words if word in self._sizes]
        self._next: dict[int, int] = {}

    def draw(self, num_tokens: int, num_texts: int) -> list[str]:
        """Return texts of so many tokens, special ones included. Each begins a word further."""
        texts: dict[str, None] = {}
        number = self._next.get(num_tokens, 0)
        while len(texts) < num_texts:
            text = self._make(num_tokens - 2, *divmod(number, len(self._words)))
            if text is not None:
                texts[text] = None
            number += 1
        # A later beginning may give the text of an earlier one: the next draw begins well behind this one.
        self._next[num_tokens] = number + num_texts // 4
        found = list(texts)
        counted = {
            len(each) for each in self._tokenizer.encode_batch_fast(found[:: max(1, num_texts // 500)])
        }
        if counted != {num_tokens}:
            raise LookupError(f"Texts of {num_tokens} tokens have {sorted(counted)} by the tokenizer.")
        return found

    def _make(self, num_tokens: int, rounds: int, start: int) -> str | None:
        """Skip words that are too long; return None where 200 of them do not fill the rest."""
        chosen = [str(rounds)] if rounds else []
        left = num_tokens - sum(self._sizes[word] for word in chosen)
        num_skipped = 0
        for place in itertools.count(start):
            word = self._words[place % len(self._words)]
            if self._sizes[word] <= left:
                chosen.append(word)
                left -= self._sizes[word]
            else:
                num_skipped += 1
            if not left:
                return " ".join(chosen)
            if num_skipped > 200:
                return None
        return None
