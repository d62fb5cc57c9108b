"""Hints: what is asked of a text, as prompts that keep a budget of tokens. Knows no texts and no windows.

A hint is [PREFIX] with the path of spans that was found so far (empty at the root), then [TYPE]name for each type that
is asked below that path, and so on for the next path.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.tasks.prompt_size import EMPTY_HINT_COST, MAX_HINT_COST
from vectormill.domain.tasks.schema import Schema
from worker.tasks.extract.prompt_tokenizer import PREFIX, TYPE, PromptTokenizer, Tokens

MAX_STRING_COST: Final = 125

# (type, span, (start, end)), and behind these the confidence where a text is classified.
Step = tuple[Any, ...]
Prefix = tuple[Step, ...]
# The types that are asked below each path.
Asked = Mapping[Prefix, Schema]


@dataclass(frozen=True, slots=True)
class Piece:
    """A special token with what stands behind it; `question` is the path and the type for which it asks, if any."""

    string: str
    question: tuple[Prefix, str] | None


@dataclass(frozen=True, slots=True, eq=False)
class Hint:
    """`tokens` are without [CLS] and [SEP]; `type_places` are those of each question's [TYPE] in a sequence, where
    [CLS] is 0, and `type_chars` where it stands in `text`.
    """

    text: str
    questions: tuple[tuple[Prefix, str], ...]
    tokens: Tokens
    type_places: NDArray[np.int64]  # [questions]
    type_chars: tuple[int, ...]


def write_prefix(prefix: Prefix) -> str:
    return ",".join(f"{step[0]}: {step[1]}" for step in prefix)


def cut_hints(asked: Asked, costs: Mapping[str, int]) -> tuple[list[list[Piece]], int]:
    """Return the pieces of each hint, paths in order and types in that of their code points; and how many types are
    left out.

    `costs` are of each path's string and each type, in tokens with one for the special token before it. One above
    MAX_STRING_COST is left out. A hint that would exceed MAX_HINT_COST is closed, and the next begins with the path.
    """
    hints: list[list[Piece]] = []
    num_left_out, hint_cost = 0, EMPTY_HINT_COST
    for prefix in sorted(asked):
        string = write_prefix(prefix)
        if costs[string] > MAX_STRING_COST:
            num_left_out += len(asked[prefix])
            continue
        is_first = True
        for name in sorted(asked[prefix]):
            if costs[name] > MAX_STRING_COST:
                num_left_out += 1
                continue
            opening = costs[string] if is_first else 0
            if not hints or hint_cost + opening + costs[name] > MAX_HINT_COST:
                hints.append([])
                opening, is_first, hint_cost = costs[string], True, EMPTY_HINT_COST
            if is_first:
                hints[-1].append(Piece(PREFIX + string, None))
            hints[-1].append(Piece(TYPE + name, (prefix, name)))
            hint_cost += opening + costs[name]
            is_first = False
    return hints, num_left_out


@dataclass(frozen=True, slots=True)
class Hints:
    """All of one text's level. `num_left_out` types are not asked for, since their strings are too long."""

    hints: tuple[Hint, ...]
    num_left_out: int


class HintWriter:
    """Writes hints for many texts at once; keeps what it knows of the types of one schema."""

    def __init__(self, tokenizer: PromptTokenizer, types: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        names = sorted(set(types))
        self._costs = self._count_costs(names)
        self._pieces = self._tokenize([TYPE + name for name in names])
        self._roots: Hints | None = None

    def write(self, levels: Sequence[Asked]) -> list[Hints]:
        """Return the hints of each text's level. What all texts are asked first is the same, and written once."""
        others = [asked for asked in levels if list(asked) != [()]]
        written = iter(self._write(others))
        return [self._write_roots(asked) if list(asked) == [()] else next(written) for asked in levels]

    def _write_roots(self, asked: Asked) -> Hints:
        if self._roots is None:
            self._roots = self._write([asked])[0]
        return self._roots

    def _write(self, levels: Sequence[Asked]) -> list[Hints]:
        strings = sorted({write_prefix(prefix) for asked in levels for prefix in asked})
        costs = self._costs | self._count_costs(strings)
        cut = [cut_hints(asked, costs) for asked in levels]
        used = {piece.string for hints, _ in cut for pieces in hints for piece in pieces}
        tokens = self._pieces | self._tokenize(sorted(used - self._pieces.keys()))
        return [
            Hints(tuple(_join_pieces(pieces, tokens) for pieces in hints), num_left_out)
            for hints, num_left_out in cut
        ]

    def _count_costs(self, strings: Sequence[str]) -> dict[str, int]:
        return {
            string: count + 1 for string, count in zip(strings, self._tokenizer.count(strings), strict=True)
        }

    def _tokenize(self, strings: Sequence[str]) -> dict[str, Tokens]:
        return dict(zip(strings, self._tokenizer.encode(strings), strict=True))


def _join_pieces(pieces: Sequence[Piece], tokens: Mapping[str, Tokens]) -> Hint:
    parts = [tokens[piece.string] for piece in pieces]
    chars = list(accumulate((len(piece.string) for piece in pieces), initial=0))
    places = list(accumulate((len(part) for part in parts), initial=1))
    asks = [index for index, piece in enumerate(pieces) if piece.question is not None]
    return Hint(
        text="".join(piece.string for piece in pieces),
        questions=tuple(piece.question for piece in pieces if piece.question is not None),
        tokens=Tokens.join(parts, chars[:-1]),
        type_places=np.array([places[index] for index in asks], dtype=np.int64),
        type_chars=tuple(chars[index] for index in asks),
    )
