"""Real texts to encode that every machine has, the same in every run. This module knows nothing of models."""

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

from vectormill.corpus import Docstring, read_docstrings, take_evenly
from vectormill.files.ndjson import ItemJson
from vectormill.jobs.chunk import choose_chunk_tokens

# About the number of lines in the docstrings, repeated lines included.
NUM_LINES: Final = 36_000
PARAGRAPHS: Final = "paragraphs"
QUERIES: Final = "queries"
DOCUMENTS: Final = "documents"
OUTLIERS: Final = "outliers"
CHINESE: Final = "chinese"
SHORT_JOB: Final = "short_job"
# In the mix of outliers one text in this many is a long document.
OUTLIER_PERIOD: Final = 10
CHINESE_CHARS: Final = 15
# Markup that only documentation tools read.
_MARKUP: Final = re.compile(r"^:(?:type|rtype|return).*$|^:param \w+:\s*|</?\w+[^>]*>", re.MULTILINE)
_HAN: Final = re.compile(r"[\u4e00-\u9fff]")


def split_first_sentence(text: str) -> tuple[str, str]:
    """Return a text's first sentence, in one line and without full stop, and the rest.

    The rest may be empty.
    """
    paragraph, _, paragraphs = text.strip().partition("\n\n")
    sentence, _, sentences = " ".join(paragraph.split()).partition(". ")
    return sentence.removesuffix("."), f"{sentences}\n\n{paragraphs}".strip()


@functools.cache
def _read_once() -> tuple[Docstring, ...]:
    """Read the docstrings of the standard library once a process, because reading takes seconds."""
    return tuple(read_docstrings())


def list_docstrings(num_items: int | None = None) -> list[ItemJson]:
    """Return every docstring of the standard library as items, or `num_items` spread evenly over them."""
    items: list[ItemJson] = [{"key": docstring.key, "text": docstring.text} for docstring in _read_once()]
    return items if num_items is None else take_evenly(items, num_items)


def list_lines(num_items: int) -> list[ItemJson]:
    """Return `num_items` lines of the docstrings as items with keys of their own.

    Lines repeat if there are too few.
    """
    lines = [line.strip() for each in _read_once() for line in each.text.splitlines() if line.strip()]
    return [{"key": f"line-{number}", "text": lines[number % len(lines)]} for number in range(num_items)]


def list_distinct_lines(num_items: int) -> list[ItemJson]:
    """Return `num_items` lines as items, no two texts equal.

    When all lines are used they are repeated, prefixed with the number of the round.
    """
    lines = unique(item["text"] for item in list_lines(NUM_LINES))
    texts = number_copies(lines, -(-num_items // len(lines)))[:num_items]
    return [{"key": f"line-{number}", "text": text} for number, text in enumerate(texts)]


def cut_chunks(texts: Sequence[bytes], count: Callable[[bytes], int], max_items: int) -> list[list[bytes]]:
    """Split texts into chunks of at most `max_items`, as a submission does.

    `count` estimates the tokens of a text.
    """
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
    """A named set of texts of one kind; `description` says which kind, for readers of the results."""

    name: str
    description: str
    texts: tuple[str, ...]


def make_mix(name: str, num_texts: int, chinese: Callable[[], Path]) -> Mix:
    """Return a mix of `num_texts` texts, or of all there are.

    `chinese` returns the folder of packages with Chinese docstrings. Raise LookupError when there is no text.
    """
    description, _, list_texts = MIXES[name]
    texts = list_texts(num_texts) if name != CHINESE else take_evenly(list_chinese(chinese()), num_texts)
    if not texts:
        raise LookupError(f"There are no texts for the mix {name!r}.")
    return Mix(name, description, tuple(texts))


def list_between(low: int, high: int, texts: Iterable[str], num_texts: int) -> list[str]:
    """Return up to `num_texts` distinct texts of `low` to `high` words, spread evenly over all such texts."""
    return take_evenly([text for text in unique(texts) if low <= len(text.split()) <= high], num_texts)


def list_paragraphs(num_texts: int) -> list[str]:
    return list_between(30, 200, (each.text for each in _read_once()), num_texts)


def list_queries(num_texts: int) -> list[str]:
    """Return first sentences of docstrings, which resemble search queries."""
    return list_between(3, 12, (split_first_sentence(each.text)[0] for each in _read_once()), num_texts)


def list_documents(num_texts: int) -> list[str]:
    """Return long texts: all docstrings of a module joined, and the chapters of Python's reference."""
    low, high = 400, 2000
    modules: dict[str, list[str]] = {}
    for each in _read_once():
        modules.setdefault(each.key.partition(".")[0], []).append(each.text)
    texts = unique(
        [*("\n\n".join(parts) for parts in modules.values()), *(topics[name] for name in sorted(topics))]
    )
    return take_evenly([cut_words(text, high) for text in texts if len(text.split()) >= low], num_texts)


def list_outliers(num_texts: int) -> list[str]:
    """Return queries with a long document in every tenth place.

    Documents that repeat are prefixed with the number of the round.
    """
    num_documents = max(1, num_texts // OUTLIER_PERIOD)
    documents = list_documents(num_documents)
    numbered = number_copies(documents, -(-num_documents // len(documents)))
    long = dict(zip(range(OUTLIER_PERIOD // 2, num_texts, OUTLIER_PERIOD), numbered, strict=False))
    queries = iter(list_queries(num_texts))
    return [long[place] if place in long else next(queries) for place in range(num_texts)]


def list_chinese(directory: Path) -> list[str]:
    """Return the Chinese docstrings of the packages in a directory, without markup."""
    cleaned = (_MARKUP.sub("", docstring.text) for docstring in read_docstrings(directory))
    texts = unique("\n".join(line.strip() for line in text.splitlines() if line.strip()) for text in cleaned)
    return [text for text in texts if len(_HAN.findall(text)) >= max(CHINESE_CHARS, len(text) / 3)]


def list_mixed() -> list[str]:
    """Return paragraphs, queries and documents, shuffled with a fixed seed."""
    texts = [*list_paragraphs(2400), *list_queries(2400), *list_documents(300)]
    random.Random(0).shuffle(texts)
    return texts


# Name of a mix -> its description, its default number of texts, and the function that lists them.
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
    """Return the first `num_words` words of a text, its spaces and line ends unchanged."""
    found = list(itertools.islice(re.finditer(r"\S+", text), num_words))
    return text[: found[-1].end()] if found else text


def number_copies(texts: Sequence[str], num_copies: int) -> list[str]:
    """Return the texts `num_copies` times, all different.

    From the second round on each is prefixed with the number of its round.
    """
    return [text if not number else f"{number} {text}" for number in range(num_copies) for text in texts]


def unique(texts: Iterable[str]) -> list[str]:
    """Return each text once. Equal texts may be encoded only once, which would flatter the rate."""
    return list(dict.fromkeys(texts))


def list_pairs(num_pairs: int, seed: int = 1) -> list[list[str]]:
    """Return pairs of a docstring's first sentence and the rest of a docstring.

    In half of the pairs the rest belongs to the sentence. Of the other half, about half take it from another
    docstring of the same module.
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
    """Return a hash of the text that, unlike Python's own, is the same in every process."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class ExactTexts:
    """A source of texts with an exact number of tokens, made from the words of docstrings.

    No text is drawn twice. `model` is a directory with a tokenizer that puts two special tokens around a
    text.
    """

    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        words = [word for each in _read_once() for word in each.text.split()]
        # Count the tokens of every word, and of the numbers that prefix repeated texts.
        distinct = unique([*words, *map(str, range(1, 1000))])
        counted = self._tokenizer.encode_batch_fast(distinct, add_special_tokens=False)
        self._sizes = {word: len(each) for word, each in zip(distinct, counted, strict=True) if len(each)}
        self._words = [word for word in words if word in self._sizes]
        self._next: dict[int, int] = {}

    def draw(self, num_tokens: int, num_texts: int) -> list[str]:
        """Return `num_texts` texts of `num_tokens` tokens, special tokens included.

        Each starts one word after the last.
        """
        texts: dict[str, None] = {}
        number = self._next.get(num_tokens, 0)
        while len(texts) < num_texts:
            text = self._make(num_tokens - 2, *divmod(number, len(self._words)))
            if text is not None:
                texts[text] = None
            number += 1
        # Texts with neighbouring starts can be equal, so the next draw starts well after this one.
        self._next[num_tokens] = number + num_texts // 4
        found = list(texts)
        counted = {
            len(each) for each in self._tokenizer.encode_batch_fast(found[:: max(1, num_texts // 500)])
        }
        if counted != {num_tokens}:
            raise LookupError(f"Texts of {num_tokens} tokens have {sorted(counted)} by the tokenizer.")
        return found

    def _make(self, num_tokens: int, rounds: int, start: int) -> str | None:
        """Return a text of `num_tokens` tokens from the word at `start`, skipping words that are too long.

        Return None when 200 skipped words leave the text unfilled.
        """
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
