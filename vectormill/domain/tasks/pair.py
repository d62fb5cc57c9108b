"""Pair: two texts that are judged together. On its way it is one text, so that nothing that carries texts knows of it.

The mark between them is a byte that no UTF-8 has, nor a lone surrogate as we keep it: a pair is never taken for a text,
nor a text for a pair. What cannot read it finds a text that is no Unicode, and says so.
"""

from typing import Final

from vectormill.domain.jobs.item import ItemFailure, find_text_failure

PAIR_MARK: Final = b"\xff"


def join_pair(text: bytes, text_pair: bytes) -> bytes:
    """Both as one, hashed, told apart and stored like any text."""
    return text + PAIR_MARK + text_pair


def split_pair(text: bytes) -> tuple[bytes, bytes | None]:
    """The first text and the second one; None where it is a text alone."""
    first, mark, second = text.partition(PAIR_MARK)
    return first, second if mark else None


def find_side_failure(text: bytes, max_chars: int) -> ItemFailure | None:
    """As find_text_failure, of what is a pair or a text alone; of a pair `max_chars` are allowed to each."""
    first, second = split_pair(text)
    failure = find_text_failure(first, max_chars)
    if failure is not None or second is None:
        return failure
    failure = find_text_failure(second, max_chars)
    return None if failure is None else name_second(failure)


def name_second(failure: ItemFailure) -> ItemFailure:
    """The same failure, of the second text."""
    return ItemFailure(failure.code, f"text_pair: {failure.detail}")
