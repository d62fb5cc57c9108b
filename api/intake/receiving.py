"""Receiving: requests that are answered while their client waits, such as searches and texts to encode."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec, TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from api.dependencies import Resources
from api.door.media_types import require_json
from api.intake.submissions import read_body
from api.limits.gates import Hold

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
