"""Pair: two texts that are judged together. On its way it is one text, so that nothing that carries texts knows of it.

The mark between them is a byte that no UTF-8 has, nor a lone surrogate as we keep it: a pair is never taken for a text,
nor a text for a pair. What cannot read it finds a text that is no Unicode, and says so.
"""

from collections.abc import Sequence
from typing import Final

from vectormill.domain.errors import InvalidOption
from vectormill.jobs.item import ItemFailure, find_text_failure

PAIR_MARK: Final = b"\xff"
# The bytes of one request's pairs, which are in memory together and repeat their query. A thousand passages of 8 KiB
# fit with a query of as many bytes; no model reads so much.
MAX_PAIRS_BYTES: Final = 16 << 20


def join_pair(text: bytes, text_pair: bytes) -> bytes:
    """Both as one, hashed, told apart and stored like any text."""
    return text + PAIR_MARK + text_pair


def pair_with_each(query: bytes, texts: Sequence[bytes]) -> list[bytes]:
    """Pair a query with each text. Raises InvalidOption, before any is joined, when the pairs would be too large."""
    num_bytes = (len(query) + len(PAIR_MARK)) * len(texts) + sum(map(len, texts))
    if num_bytes > MAX_PAIRS_BYTES:
        raise InvalidOption(
            f"The query of {len(query):,} bytes, with each of {len(texts):,} documents, makes pairs of "
            f"{num_bytes:,} bytes, and a request may make {MAX_PAIRS_BYTES:,}. Shorten the query, or send fewer "
            "documents at a time."
        )
    return [join_pair(query, text) for text in texts]


def split_pair(text: bytes) -> tuple[bytes, bytes | None]:
    """The first text and the second one; None where it is a text alone."""
    first, mark, second = text.partition(PAIR_MARK)
    return first, second if mark else None


def find_side_failure(text: bytes, max_chars: int) -> ItemFailure | None:
    """Find why a pair, or a text alone, cannot be encoded; each side of a pair may have `max_chars`."""
    first, second = split_pair(text)
    failure = find_text_failure(first, max_chars)
    if failure is not None or second is None:
        return failure
    failure = find_text_failure(second, max_chars)
    return None if failure is None else name_second(failure)


def name_second(failure: ItemFailure) -> ItemFailure:
    """Return the same failure, told of the second text."""
    return ItemFailure(failure.code, f"text_pair: {failure.detail}")
