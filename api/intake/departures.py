"""Departures: a client that disconnects ends the work on its request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.requests import ClientDisconnect


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
