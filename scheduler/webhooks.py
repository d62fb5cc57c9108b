"""Delivers what jobs' and runs' ends have left for webhooks: at least once each, the slow ones beside the others.

On a thread, an event loop and a connection of its own. A scheduler that dies in an attempt leaves the message to its
successor, which sends it again under the same id when the lease is over.
"""

import asyncio
import logging
import random
import threading
from collections import Counter
from types import TracebackType
from typing import Final, Self

import psycopg
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from vectormill.db.webhooks.deliveries import claim_deliveries, record_reply
from vectormill.domain.webhooks.webhook import Posting, pause_after
from vectormill.settings import Settings
from vectormill.webhooks.posting import Poster, Resolve, resolve

logger = logging.getLogger(__name__)

# Attempts at once, and of one webhook: so that it takes many slow ones before anybody waits for them.
MOST_AT_ONCE: Final = 64
MOST_OF_ONE: Final = 4
_PAUSE_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 5.0
# Beyond an attempt's own time, for its recording.
_LEASE_MARGIN_SECONDS: Final = 30.0


class WebhookSender:
    """Works from the beginning of the block to its end."""

    def __init__(self, engine: Engine, settings: Settings, resolve: Resolve = resolve) -> None:
        self._engine = engine
        self._lease_seconds = settings.webhook_timeout_seconds + _LEASE_MARGIN_SECONDS
        self._timeout_seconds = settings.webhook_timeout_seconds
        self._allows_private = settings.webhook_private_targets
        self._resolve = resolve
        self._stopping = threading.Event()
        self._busy: Counter[int] = Counter()  # attempts in progress by webhook
        self._thread = threading.Thread(target=self._run, name="webhooks", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)  # an attempt that takes longer is made again by whoever comes next

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                asyncio.run(self._serve())
            except (SQLAlchemyError, psycopg.Error) as error:
                logger.warning("Webhooks wait, for Postgres did not answer: %s", error)
            except Exception:
                logger.exception("Webhooks could not be delivered; trying again.")
            self._busy.clear()
            self._stopping.wait(_PAUSE_SECONDS)

    async def _serve(self) -> None:
        """Until told to stop. Raises errors of Postgres, after which a new loop begins."""
        poster = Poster(self._timeout_seconds, allows_private=self._allows_private, resolve=self._resolve)
        attempts: set[asyncio.Task[None]] = set()
        try:
            while not self._stopping.is_set():
                attempts |= {
                    asyncio.create_task(self._attempt(poster, each)) for each in self._claim(attempts)
                }
                if not attempts:
                    await asyncio.to_thread(self._stopping.wait, _PAUSE_SECONDS)
                    continue
                done, attempts = await asyncio.wait(
                    attempts, timeout=_PAUSE_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for attempt in done:
                    attempt.result()
        finally:
            if attempts:
                await asyncio.wait(attempts, timeout=_STOP_SECONDS / 2)

    def _claim(self, attempts: set[asyncio.Task[None]]) -> list[Posting]:
        room = MOST_AT_ONCE - len(attempts)
        if room <= 0:
            return []
        with self._engine.begin() as connection:
            claimed = claim_deliveries(
                connection, self._busy, most=MOST_OF_ONE, room=room, lease_seconds=self._lease_seconds
            )
        self._busy.update(posting.webhook_id for posting in claimed)
        return list(claimed)

    async def _attempt(self, poster: Poster, posting: Posting) -> None:
        try:
            reply = await poster.post(posting)
            chance = random.random()  # noqa: S311 - no secret
            pause = pause_after(posting.num_attempts, reply, chance)
            with self._engine.begin() as connection:
                is_disabled = record_reply(connection, posting, reply, pause)
            if is_disabled:
                logger.warning(
                    "Webhook %d was disabled; `vectormill webhooks list` says why.", posting.webhook_id
                )
        finally:
            self._busy[posting.webhook_id] -= 1
