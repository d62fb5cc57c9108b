"""Deliver the webhook messages that ended jobs and runs have left, each at least once.

The sender has a thread and a connection of its own. The thread runs an event loop, because an attempt mostly
waits for a receiver, up to its whole time limit, and 64 concurrent attempts would otherwise need 64 threads.
If a scheduler dies during an attempt, its successor sends the message again under the same id when the lease
has expired.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from sqlalchemy import Engine

from vectormill.settings import Settings
from vectormill.webhooks.posting import Poster, Resolve, resolve
from vectormill.webhooks.webhook import MAX_ATTEMPTS, Posting, Reply, pause_after
from vectormill.webhooks.webhooks import claim_deliveries, record_reply
from vectormill.work.work import Lease, Loop, Stopping, handing_back, name_owner

logger = logging.getLogger(__name__)

# The limits on concurrent attempts, in total and for one webhook, so that only many slow webhooks can delay
# the others.
MOST_AT_ONCE: Final = 64
MOST_OF_ONE: Final = 4
_PAUSE_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0
# The time that a lease lasts beyond the attempt, to record its outcome.
_LEASE_MARGIN_SECONDS: Final = 30.0

# Sends a message and returns the reply.
Post = Callable[[Posting], Awaitable[Reply]]


class WebhookSender(Loop):
    """A loop that sends webhook messages. Attempts still unanswered shortly after its end are handed back."""

    def __init__(self, engine: Engine, settings: Settings, resolve: Resolve = resolve) -> None:
        super().__init__("webhooks", pause_seconds=_PAUSE_SECONDS, stop_seconds=_STOP_SECONDS)
        self._engine = engine
        self._timeout_seconds = settings.webhook_timeout_seconds
        self._allows_private = settings.webhook_private_targets
        self._resolve = resolve
        self._busy: Counter[int] = Counter()  # attempts in progress by webhook

    def step(self) -> bool:
        self._busy.clear()
        asyncio.run(self._attempt_all())
        return False

    async def _attempt_all(self) -> None:
        """Make attempts until the loop is stopped.

        Raise errors of Postgres, after which a new event loop is started.
        """
        poster = Poster(self._timeout_seconds, allows_private=self._allows_private, resolve=self._resolve)
        attempts: set[asyncio.Task[None]] = set()
        try:
            while not self.stopping.is_set():
                claimed = self._claim(MOST_AT_ONCE - len(attempts))
                attempts |= {asyncio.create_task(self._attempt(poster, *each)) for each in claimed}
                if not attempts:
                    await asyncio.to_thread(self.stopping.wait, _PAUSE_SECONDS)
                    continue
                done, attempts = await asyncio.wait(
                    attempts, timeout=_PAUSE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in done:
                    attempt.result()
        finally:
            if attempts:
                await asyncio.wait(attempts, timeout=_STOP_SECONDS / 2)

    def _claim(self, room: int) -> list[tuple[Lease, Posting]]:
        if room <= 0:
            return []
        lease_seconds = self._timeout_seconds + _LEASE_MARGIN_SECONDS
        with self._engine.begin() as connection:
            claimed = claim_deliveries(
                connection,
                self._busy,
                owner=name_owner(),
                most=MOST_OF_ONE,
                room=room,
                lease_seconds=lease_seconds,
            )
        self._busy.update(posting.webhook_id for _, posting in claimed)
        return claimed

    async def _attempt(self, poster: Poster, lease: Lease, posting: Posting) -> None:
        try:
            await attempt(self._engine, poster.post, lease, posting)
        finally:
            self._busy[posting.webhook_id] -= 1


async def attempt(engine: Engine, post: Post, lease: Lease, posting: Posting) -> None:
    """Send a message and record the outcome. Raise the database's error if that cannot be recorded."""
    with handing_back(engine, lease):
        if lease.attempt > MAX_ATTEMPTS:  # schedulers died in this many attempts
            reply = Reply(None, lease.describe_attempts())
        else:
            try:
                reply = await post(posting)
            except asyncio.CancelledError:
                raise Stopping from None
        chance = random.random()  # noqa: S311 - no secret
        pause = pause_after(lease.attempt, reply, chance)
        with engine.begin() as connection:
            is_disabled = record_reply(connection, lease, posting, reply, pause)
        if is_disabled:
            logger.warning(
                "Webhook %d was disabled; `vectormill webhooks list` says why.", posting.webhook_id
            )
