"""Texts of an exact number of tokens, made from the words of real ones, so that a tokenizer works as on any text."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count, islice
from typing import Final

# The next word that still fits is found within so many, in any language.
MOST_SKIPPED: Final = 200


def make_texts(
    words: Sequence[str], word_tokens: Mapping[str, int], num_tokens: int, first: int, num_texts: int
) -> list[str]:
    """Texts number `first` and following, each of `num_tokens` tokens without special ones, no two of them equal.

    Each begins a word further in `words`, and skips what would be too much; when all words have been a beginning, the
    number of the round is the first word. `word_tokens` has the tokens of each word.
    """
    texts: dict[str, None] = {}
    for number in count(first):
        if len(texts) == num_texts:
            break
        rounds, start = divmod(number, len(words))
        text = _make_text(words, word_tokens, num_tokens, start, str(rounds) if rounds else "")
        if text is not None:
            texts[text] = None
    return list(texts)


def _make_text(
    words: Sequence[str], word_tokens: Mapping[str, int], num_tokens: int, start: int, prefix: str
) -> str | None:
    """None where no words of the neighbourhood fill the rest."""
    chosen = [prefix] if prefix else []
    left = num_tokens - (word_tokens[prefix] if prefix else 0)
    num_skipped = 0
    for place in count(start):
        word = words[place % len(words)]
        if word_tokens[word] <= left:
            chosen.append(word)
            left -= word_tokens[word]
        else:
            num_skipped += 1
        if not left:
            return " ".join(chosen)
        if num_skipped > MOST_SKIPPED:
            return None
    return None


def count_word_tokens(
    words: Sequence[str], count_tokens: Callable[[list[str]], list[int]], num_rounds: int = 1000
) -> dict[str, int]:
    """The tokens of every word and of every round's number; words without any are left out."""
    distinct = list(dict.fromkeys([*words, *map(str, islice(count(1), num_rounds))]))
    return {word: tokens for word, tokens in zip(distinct, count_tokens(distinct), strict=True) if tokens}
