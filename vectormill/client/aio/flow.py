"""Flow: all in which the asynchronous client differs from the other by more than words. Its twin is in `sync`."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Final

import httpx

from vectormill.client.frames import Columns, read_items
from vectormill.files.ndjson import ItemJson, encode_parts, make_compressor

Http = httpx.AsyncClient
HttpTransport = httpx.AsyncBaseTransport
Pause = Callable[[float], Awaitable[None]]
AnyItems = Iterable[ItemJson] | AsyncIterable[ItemJson]
# Items of a stream that are made into a part of a body together.
GATHERED_ITEMS: Final = 256


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)


def prepare_items(items: AsyncIterable[Any] | Iterable[Any], columns: Columns | None) -> AnyItems:
    """Return rows as items; what is read with `async for` gives items already."""
    return items if isinstance(items, AsyncIterable) else read_items(items, columns)


def can_repeat(items: AnyItems) -> bool:
    """Return whether a second reading gives the same items."""
    return not isinstance(items, AsyncIterable) and iter(items) is not items


async def encode_body(items: AnyItems, *, gzip: bool) -> AsyncIterator[bytes]:
    """Yield items as NDJSON, in parts fit for a stream. Reading a table holds up the event loop for a part at a
    time.
    """
    compressor = make_compressor() if gzip else None
    async for part in _encode(items):
        sent = part if compressor is None else compressor.compress(part)
        if sent:
            yield sent
    if compressor is not None:
        yield compressor.flush()


async def _encode(items: AnyItems) -> AsyncIterator[bytes]:
    if not isinstance(items, AsyncIterable):
        for part in encode_parts(items):
            yield part
        return
    gathered: list[ItemJson] = []
    async for item in items:
        gathered.append(item)
        if len(gathered) == GATHERED_ITEMS:
            yield b"".join(encode_parts(gathered))
            gathered.clear()
    if gathered:
        yield b"".join(encode_parts(gathered))


async def split_lines(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield lines without their newline, as `vectormill.files.ndjson.split_lines`."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def make_http(transport: HttpTransport | None, **options: Any) -> Http:
    return httpx.AsyncClient(transport=transport, **options)
