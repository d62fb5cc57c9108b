"""Event streams: what a client follows, sent as Server-Sent Events (HTML Living Standard, section 9.2)."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Final, Generic, TypeVar

import anyio
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api.dependencies import Resources
from api.problems import is_database_away
from api.watch import Watch, Watched
from vectormill.domain.errors import JobNotFound

# A comment is sent after this long without an event, since proxies close a connection silent for a minute.
SILENCE_SECONDS: Final = 15.0
RETRY_MILLISECONDS: Final = 2000

Value = TypeVar("Value")


class EventStream(StreamingResponse, ABC, Generic[Value]):
    """The response to one client; it counts in the gate until its last byte is sent.

    Serving it raises Problem when there are too many streams, and whatever the first read raises.
    """

    def __init__(self, resources: Resources, watch: Watch[Any, Value], key: Any) -> None:
        self._resources = resources
        self._watch = watch
        self._key = key
        super().__init__((), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @abstractmethod
    def read(self) -> Value:
        """Return the value as it is now, the same for all clients with the same key. Runs in a thread."""

    @abstractmethod
    def write(self, value: Value) -> bytes:
        """Return the event or events that tell the value."""

    @abstractmethod
    def is_last(self, value: Value) -> bool:
        """Return whether the value cannot change any more, which ends the stream."""

    def has_moved(self, last: Value, value: Value) -> bool:
        """Return whether the value differs so much from the last one sent that the client is told."""
        return value != last

    async def may_go_on(self, scope: Scope) -> bool:
        return True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources.gates.watchers.enter(), self._watch.join(self._key) as followed:
            # An error in the first reading gets a separate response, before the stream begins.
            first = await self._watch.look(followed, self.read)
            self.body_iterator = self._follow(followed, first, scope)
            await super().__call__(scope, receive, send)

    async def _follow(self, followed: Watched[Value], value: Value, scope: Scope) -> AsyncIterator[bytes]:
        yield b"retry: %d\n\n%b" % (RETRY_MILLISECONDS, self.write(value))
        last, spoken_at = value, time.monotonic()
        while not self.is_last(last) and not self._resources.is_stopping():
            await anyio.sleep(self._watch.seconds)
            if not await self.may_go_on(scope):
                return
            try:
                value = await self._watch.look(followed, self.read)
            except JobNotFound:
                return
            except Exception as error:  # the stream outlives a restart of Postgres, but no other error
                if not is_database_away(error):
                    raise
            if self.has_moved(last, value):
                last, spoken_at = value, time.monotonic()
                yield self.write(value)
            elif time.monotonic() - spoken_at > SILENCE_SECONDS:
                spoken_at = time.monotonic()
                yield b": still here\n\n"
