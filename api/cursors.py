"""Cursors: the opaque `next` of a page. Clients hand it back as `after` and never look inside."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from api.problems import Place, Problem
from vectormill.operation import CURSOR

T = TypeVar("T")


def encode_cursor(position: int) -> str:
    return f"{position:016x}"


def cut_page(
    found: Sequence[T], limit: int, position_of: Callable[[T], int]
) -> tuple[Sequence[T], str | None]:
    """Return the first `limit` of what was found, and the cursor behind them, which is None on the last page."""
    page = found[:limit]
    return page, encode_cursor(position_of(page[-1])) if len(found) > limit else None


def decode_cursor(cursor: str | None) -> int | None:
    """Return the position behind which the page starts; None for the first page. Raise Problem."""
    if cursor is None:
        return None
    if not re.fullmatch(CURSOR, cursor):
        detail = "after must be the next of an earlier page, unchanged."
        raise Problem(422, "invalid-cursor", detail, errors=[Place(detail, parameter="after")])
    return int(cursor, 16)
