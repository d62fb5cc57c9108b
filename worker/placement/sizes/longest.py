"""The longest text that any plan holds: found by trying, because what a text needs depends on how it is shared."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

from worker.devices.links import Links
from worker.placement.drafts import draft_plans
from worker.placement.replicas import ReplicaBuilder
from worker.placement.sizes.room import Room

# A model that holds no text of so many tokens is of no use, unless it reads no longer ones.
SHORTEST_USEFUL_TOKENS: Final = 512


def find_longest_text(
    rooms: Sequence[Room],
    links: Links,
    make_builder: Callable[[int], ReplicaBuilder],
    strategy: str,
    max_tokens: int,
) -> int:
    """Return `max_tokens` if a plan holds such a text; else the longest that fits, in steps of 512; 0 for none.

    `make_builder` gives the builder of replicas that have to hold a text of so many tokens.
    """

    def fits(tokens: int) -> bool:
        drafts = draft_plans(rooms, links, make_builder(tokens), strategy)
        return any(draft.replicas for draft in drafts)

    if fits(max_tokens):
        return max_tokens
    shorter = range(SHORTEST_USEFUL_TOKENS, max_tokens, SHORTEST_USEFUL_TOKENS)
    num_fitting = bisect_right(shorter, False, key=lambda tokens: not fits(tokens))
    return shorter[num_fitting - 1] if num_fitting else 0
