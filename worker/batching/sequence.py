"""Sequence: one tokenized text that waits for its forward pass. Knows its length and owner, not its tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sequence:
    """`request` grows with every request admitted, so that a smaller one is older; `position` is its place there.

    `length` is in tokens, as long as the sequence is computed when it is alone.
    """

    request: int
    position: int
    length: int
