"""Pairs of real texts that every machine has: a docstring's first sentence and what follows it, or another one.

Train and test pairs are of different modules, so that nothing that is asked was seen. Deterministic: the same Python
gives the same pairs. Knows nothing of models.
"""

import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.texts import list_docstrings
from vectormill.corpus import split_first_sentence

SEED: Final = 0
# Fewer words say nothing that could be told apart.
SENTENCE_WORDS: Final = 3
REST_WORDS: Final = 5
# One module of so many is for tests.
TEST_PERIOD: Final = 3
# Of the pairs that do not belong together, those whose second text is of the same module: they share its words.
HARD_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Parts:
    """A docstring in two."""

    module: str
    sentence: str
    rest: str


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and whether they are of one docstring."""

    text: str
    text_pair: str
    is_same: bool


def list_parts(*, is_test: bool) -> list[Parts]:
    """Docstrings in two, of the modules that are for tests or of all others; no sentence and no rest twice."""
    sentences: set[str] = set()
    rests: set[str] = set()
    found = []
    for item in list_docstrings():
        module = item["key"].partition(".")[0]
        sentence, rest = split_first_sentence(item["text"])
        is_short = len(sentence.split()) < SENTENCE_WORDS or len(rest.split()) < REST_WORDS
        if is_short or sentence in sentences or rest in rests or is_for_test(module) != is_test:
            continue
        sentences.add(sentence)
        rests.add(rest)
        found.append(Parts(module, sentence, rest))
    return found


def is_for_test(module: str) -> bool:
    return zlib.crc32(module.encode()) % TEST_PERIOD == 0


def make_pairs(parts: Sequence[Parts], num_docstrings: int, seed: int = SEED) -> list[Pair]:
    """Of so many of the docstrings two pairs each, in random order: one that belongs together and one that does not."""
    draw = random.Random(seed)
    chosen = draw.sample(list(parts), min(num_docstrings, len(parts)))
    by_module: defaultdict[str, list[Parts]] = defaultdict(list)
    for each in parts:
        by_module[each.module].append(each)
    pairs = []
    for each in chosen:
        near = by_module[each.module]
        others = near if draw.random() < HARD_SHARE and len(near) > 1 else parts
        other = draw.choice(others)
        while other is each:
            other = draw.choice(others)
        pairs += [Pair(each.sentence, each.rest, True), Pair(each.sentence, other.rest, False)]
    draw.shuffle(pairs)
    return pairs
