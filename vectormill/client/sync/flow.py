"""The parts of the blocking client that cannot be generated from `aio` by replacing words.

This is the only file of the folder that is written by hand.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from vectormill.client.frames import read_items
from vectormill.files.ndjson import ItemJson, compress_parts, encode_parts
from vectormill.rows.columns import Columns
from vectormill.rows.decoding import split_lines as split_lines

Http = httpx.Client
HttpTransport = httpx.BaseTransport
Pause = Callable[[float], None]


def pause(seconds: float) -> None:
    time.sleep(seconds)  # before a repetition, or the next look at what is awaited


def prepare_items(items: Iterable[Any], columns: Columns | None) -> Iterable[ItemJson]:
    """Convert rows to items; `columns` names the columns to read, or is None for the defaults."""
    return read_items(items, columns)


def can_repeat(items: Iterable[ItemJson]) -> bool:
    """Return whether the items can be iterated a second time."""
    return iter(items) is not items


def encode_body(items: Iterable[ItemJson], *, gzip: bool) -> Iterator[bytes]:
    """Yield items as NDJSON, in parts that can be streamed."""
    parts = encode_parts(items)
    return compress_parts(parts) if gzip else parts


def make_http(transport: HttpTransport | None, **options: Any) -> Http:
    return httpx.Client(transport=transport, **options)
