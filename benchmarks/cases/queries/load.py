"""Clients: so many that ask again as soon as they are answered, over connections that are kept. Knows no system.

By hand on asyncio's streams, because the clients share the machine's cores with what they ask: a client library would
take a millisecond a request from it.
"""

import asyncio
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.order import BenchmarkFailed

CONTENT_LENGTH: Final = b"content-length:"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a text, or some, are sent, and in which body."""

    url: str
    body: Callable[[Any], dict[str, Any]]


def ask_for(target: Target, texts: Iterator[Any], num_clients: int, seconds: float) -> list[float]:
    """Seconds of every request that was begun in time. Raises BenchmarkFailed when one is not answered 200."""
    return asyncio.run(_ask_for(target, texts, num_clients, seconds))


async def _ask_for(target: Target, texts: Iterator[Any], num_clients: int, seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    clients = (_ask_again_and_again(target, texts, end) for _ in range(num_clients))
    return [taken for each in await asyncio.gather(*clients) for taken in each]


async def _ask_again_and_again(target: Target, texts: Iterator[Any], end: float) -> list[float]:
    url = urllib.parse.urlsplit(target.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    taken = []
    try:
        while (began := time.perf_counter()) < end:
            body = json.dumps(target.body(next(texts))).encode()
            head = (
                f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answered = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(answered.split(b" ", 2)[1])
            length = int(answered.partition(CONTENT_LENGTH)[2].partition(b"\r\n")[0])
            answer = await reader.readexactly(length)
            if status != 200:
                raise BenchmarkFailed(
                    f"{url.netloc} answered {status}: {answer[:300].decode(errors='replace')}"
                )
            taken.append(time.perf_counter() - began)
    finally:
        writer.close()
    return taken
