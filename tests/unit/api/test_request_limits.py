"""Only a body that is under way is timed: whoever has sent all of it may wait for the answer as long as it takes."""

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from api.door.door import Door
from api.door.hosts import parse_allowed_hosts
from api.door.keys import KeyGuard
from api.limits.gates import Gates
from vectormill.settings import Settings

IMPATIENT = Settings(body_idle_seconds=0.001)


def test_a_client_that_has_sent_its_body_is_waited_for_without_an_end() -> None:
    received: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend([await receive(), await receive()])

    async def serve() -> None:
        leaves = asyncio.Event()
        messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"all"}]

        async def receive() -> Message:
            if len(messages) == 1:
                await leaves.wait()
            return messages.pop()

        async def send(message: Message) -> None:
            raise AssertionError(message)

        no_keys: Any = None
        door = Door(
            application,
            settings=IMPATIENT,
            gates=Gates.of(IMPATIENT),
            hosts=parse_allowed_hosts("127.0.0.1", ""),
            keys=KeyGuard(no_keys, is_local=True, settings=IMPATIENT),
            pages=lambda app: app,
            is_for_people=lambda scope: False,
        )
        scope = {"type": "http", "method": "GET", "path": "/livez", "headers": []}  # which needs no key
        served = asyncio.create_task(door(scope, receive, send))
        # Twenty times the limit: were it counted, the task would have ended with a Problem.
        await asyncio.wait([served], timeout=0.02)
        leaves.set()
        await served

    asyncio.run(serve())
    assert [message["type"] for message in received] == ["http.request", "http.disconnect"]
