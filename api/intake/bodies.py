"""Bodies: receive the bytes of a request, decompressed and within limits, whole or block by block."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.dependencies import Resources
from api.limits.gates import Hold
from api.problems import Limit, Problem, refuse_size, require_json
from api.streams.ndjson import Inflater
from vectormill.settings import Settings

# A call in a thread costs 0.1 ms; this many bytes of NDJSON make it worthwhile with some milliseconds of work.
BLOCK_BYTES: Final = 256 << 10
NDJSON_TYPES: Final = (
    "application/x-ndjson",
    "application/ndjson",
    "application/jsonl",
    "application/x-jsonlines",
    "application/jsonlines",
)

P = ParamSpec("P")
T = TypeVar("T")

# Reading a body of at most this size takes a tenth of a millisecond.
SMALL_BYTES: Final = 16 << 10


@asynccontextmanager
async def receiving(
    request: Request, resources: Resources, read: Callable[[bytes, Resources], T], *, is_quick: bool = False
) -> AsyncIterator[tuple[Hold, T]]:
    """Read the body, parse it with `read`, and count the block, which answers it, as a search.

    `read` runs on a thread, since it may wait for a model hub, and in the event loop if it `is_quick` and the body
    small. The block is cancelled if the client leaves. Raise Problem and the errors of `read`.
    """
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        wanted = await run(is_quick and len(body) <= SMALL_BYTES, read, body, resources)
        with resources.gates.searches.enter():  # after the body, which may arrive slowly
            async with ended_by_departure(request):
                yield hold, wanted


async def run(is_little: bool, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run short work at once, because switching to a thread would take longer, and other work on a thread."""
    return work(*arguments, **options) if is_little else await run_in_threadpool(work, *arguments, **options)


@asynccontextmanager
async def ended_by_departure(request: Request) -> AsyncIterator[None]:
    """Cancel the block as soon as the client, whose body has been read, disconnects. Raise ClientDisconnect then."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_left or task.uncancel():
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()


def make_inflater(request: Request, settings: Settings) -> Inflater | None:
    """Return an Inflater for a gzip body, or None for a plain one. Raise Problem for another Content-Encoding."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("identity", ""):
        return None
    if encoding in ("gzip", "x-gzip"):
        return Inflater(Limit.of(settings, "max_gzip_ratio"))
    raise Problem(
        415,
        "unsupported-encoding",
        f"Unsupported Content-Encoding {encoding}: send gzip or none.",
        headers={"Accept-Encoding": "gzip"},
    )


async def read_blocks(request: Request) -> AsyncIterator[bytes]:
    """Yield the body in blocks of at least BLOCK_BYTES; only the last block may be smaller."""
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes >= BLOCK_BYTES:
            yield b"".join(parts)
            parts, num_bytes = [], 0
    if num_bytes:
        yield b"".join(parts)


async def read_body(request: Request, settings: Settings, hold: Hold) -> bytes:
    """Return the whole body, decompressed. Its bytes are reserved with `hold`, which limits those in memory.

    Raise Problem as soon as the body is too large, by itself or together with other bodies in memory.
    """
    names = ("max_json_bytes", "max_json_bytes_at_once")
    limit = min((Limit.of(settings, name) for name in names), key=lambda limit: limit.value)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit.value:
        raise body_too_large(limit)
    inflater = make_inflater(request, settings)
    parts: list[bytes] = []
    num_bytes = 0

    def take(piece: bytes) -> None:
        nonlocal num_bytes
        parts.append(piece)
        num_bytes += len(piece)
        if num_bytes > limit.value:
            raise body_too_large(limit)
        hold.take(len(piece))

    async for block in read_blocks(request):
        if inflater is None:
            take(block)
            continue
        pieces = inflater.feed(block)
        while (piece := await run_in_threadpool(next, pieces, None)) is not None:
            take(piece)
    if inflater:
        inflater.finish()
    return b"".join(parts)


def body_too_large(limit: Limit) -> Problem:
    return refuse_size(
        limit,
        f"The body has more than {limit.value} bytes ({limit.setting}); send large jobs as a stream of "
        "application/x-ndjson.",
    )
