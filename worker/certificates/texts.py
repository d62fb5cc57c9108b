"""The texts by which a model is certified: many scripts, and every length from one token to beyond the window."""

import random
from importlib.resources import files
from typing import Final

from vectormill.corpus import take_evenly
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VECTOR
from vectormill.jobs.item import join_pair
from worker.tokens.tokenizer import SAMPLE

SCRIPTS: Final = files("worker.certificates").joinpath("texts.txt")
NUM_SAMPLES: Final = 40
# Words of the longest text for each token that the model reads: no word has less than a token.
WORDS_PER_TOKEN: Final = 2
QUERY_CHARS: Final = 40


def make_texts(spec: EncodingSpec, seed: int) -> list[bytes]:
    """Return the texts for a spec, always the same for a seed; every other one is a pair if pairs are scored.

    All are pairs if the model reads nothing else.
    """
    scripts = [line for line in SCRIPTS.read_text(encoding="utf-8").split("\n") if line]
    english = [line for line in SAMPLE.read_text(encoding="utf-8").split("\n") if line]
    texts = [*scripts, *take_evenly(english, NUM_SAMPLES)]
    chance = random.Random(seed)  # noqa: S311 - chooses texts, and no secret
    for source in (scripts, english):
        length = 1
        while length <= WORDS_PER_TOKEN * spec.max_tokens:
            texts.append(take_words(source, length, chance))
            length *= 2
    texts.append(take_words(scripts, WORDS_PER_TOKEN * spec.max_tokens, chance))
    if spec.result == VECTOR:
        return [text.encode() for text in texts]
    if not spec.labels:  # queries with documents, of which only these are cut
        return [
            join_pair(texts[place - 1][:QUERY_CHARS].encode(), text.encode())
            for place, text in enumerate(texts)
        ]
    return [
        join_pair(text.encode(), texts[place - 1].encode()) if place % 2 else text.encode()
        for place, text in enumerate(texts)
    ]


def take_words(lines: list[str], num_words: int, chance: random.Random) -> str:
    """Return a text of so many words, made of lines in random order."""
    words: list[str] = []
    while len(words) < num_words:
        words += chance.choice(lines).split()
    return " ".join(words[:num_words])
