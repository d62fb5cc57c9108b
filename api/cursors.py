"""Cursors: a page's opaque `next`, which clients send back unchanged as `after` to get the next page."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from api.problems import refuse
from vectormill.operation import CURSOR

T = TypeVar("T")


def encode_cursor(position: int) -> str:
    return f"{position:016x}"


def cut_page(found: Sequence[T], limit: int, position_of: Callable[[T], int]) -> tuple[list[T], str | None]:
    """Return the first `limit` rows of `found`, and the cursor of the next page.

    The cursor is None on the last page.
    """
    page = list(found[:limit])
    return page, encode_cursor(position_of(page[-1])) if len(found) > limit else None


def decode_cursor(cursor: str | None) -> int | None:
    """Return the position after which the page starts; None for the first page.

    Raise Problem if it is invalid.
    """
    if cursor is None:
        return None
    if not re.fullmatch(CURSOR, cursor):
        reason = "after must be the `next` value of an earlier page, unchanged."
        raise refuse(reason, code="invalid-cursor", parameter="after")
    return int(cursor, 16)
