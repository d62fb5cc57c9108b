"""Prompt size: how long what an extraction reads may be, and how many tokens it reads of a text, about.

A text is read again for every hint that its schema takes, and below every span found of a type that has others below
it. Who submits has no tokenizer and knows not what will be found: of each such type one span is counted.
"""

from collections.abc import Callable, Iterator
from typing import Final

from vectormill.domain.tasks.schema import Schema

# A sequence is [CLS] hint [SEP] part of the text [SEP].
MAX_WINDOW_TOKENS: Final = 512
FRAME_TOKENS: Final = 3
# Tokens that a window has in common with the one before it.
WINDOW_STRIDE: Final = 32
# Tokens of a hint, [CLS] and [SEP] included, and of a path or a type in it with its special token.
MAX_HINT_COST: Final = 256
EMPTY_HINT_COST: Final = 2
# A span, with what joins it to its type: a name of a few words.
SPAN_TOKENS: Final = 6


class PromptEstimate:
    """An estimate of a schema's prompts; `count` returns how many tokens a type has."""

    def __init__(self, schema: Schema, count: Callable[[bytes], int]) -> None:
        self._hints = [cost - EMPTY_HINT_COST for cost in _list_hint_costs(schema, count)]

    def of(self, num_text_tokens: int) -> int:
        """The tokens of all sequences of a text of so many."""
        return sum(count_window_tokens(hint, num_text_tokens) for hint in self._hints)


def count_window_tokens(num_hint_tokens: int, num_text_tokens: int) -> int:
    """Count the tokens of all windows of a text with one hint."""
    room = max(WINDOW_STRIDE + 1, MAX_WINDOW_TOKENS - num_hint_tokens - FRAME_TOKENS)
    num_windows = -(-max(1, num_text_tokens - WINDOW_STRIDE) // (room - WINDOW_STRIDE))
    again = (num_windows - 1) * WINDOW_STRIDE
    return num_windows * (num_hint_tokens + FRAME_TOKENS) + num_text_tokens + again


def _list_hint_costs(schema: Schema, count: Callable[[bytes], int]) -> Iterator[int]:
    """List the costs of every hint of every level, with one span of each type that has others below it."""
    level: list[tuple[int, Schema]] = [(0, schema)]
    while level:
        below: list[tuple[int, Schema]] = []
        cost = EMPTY_HINT_COST
        for path_tokens, types in level:
            is_first = True
            for name, children in types.items():
                name_tokens = count(name.encode())
                opening = 1 + path_tokens if is_first else 0
                if cost > EMPTY_HINT_COST and cost + opening + 1 + name_tokens > MAX_HINT_COST:
                    yield cost
                    cost, opening = EMPTY_HINT_COST, 1 + path_tokens
                cost += opening + 1 + name_tokens
                is_first = False
                if children:
                    below.append((path_tokens + name_tokens + SPAN_TOKENS, children))
        yield cost
        level = below
