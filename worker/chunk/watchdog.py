"""The watchdog ends a worker that no longer consumes a filled queue or whose engine died.

The launcher restarts it. Celery's Redis consumer has fallen silent after reconnects in every release so far
(celery #8030, #8091, #9054, #10205); the watchdog catches past and future causes alike.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from redis.exceptions import RedisError

from vectormill.broker.queues import QueueReader, list_of
from vectormill.jobs.job import INTERACTIVE_PRIORITY, LEAST_URGENT_PRIORITY
from worker.chunk.leases import LeaseKeeper
from worker.engine.engine import Engine

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
# A worker that can consume takes waiting messages within milliseconds. After a long outage of Redis, kombu's
# next attempt to connect may come only after half a minute, which is no reason to load the model again.
_DEAF_SECONDS = 45.0
# Chunks are handed back in one short transaction each. If this takes longer, something hangs, perhaps
# Celery's own shutdown. Killing the process is safe at any moment, because every write is fenced.
_ENDING_SECONDS = 60.0


class Watchdog:
    """Checks the worker every ten seconds.

    If the worker has to be restarted, the watchdog sends it SIGTERM and, 60 s later, ends it by force.
    """

    def __init__(
        self,
        queues: QueueReader,
        model: str,
        keeper: LeaseKeeper,
        engine: Engine,
        count_taken: Callable[[], int],
    ) -> None:
        self._queues = queues
        self._lists = [list_of(model, priority) for priority in (INTERACTIVE_PRIORITY, LEAST_URGENT_PRIORITY)]
        self._keeper = keeper
        self._engine = engine
        self._count_taken = count_taken  # returns the number of messages taken from Redis since the start
        self._num_taken = 0
        self._well_at = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            reason = self.find_reason(time.monotonic())
            if reason is not None:
                logger.error("%s; stopping this worker so that it is restarted.", reason)
                os.kill(os.getpid(), signal.SIGTERM)
                if not self._stopping.wait(_ENDING_SECONDS):
                    logger.error("This worker did not stop within %g s; killing it.", _ENDING_SECONDS)
                    os._exit(1)
                return

    def find_reason(self, now: float) -> str | None:
        """Return why this worker should be restarted; None while it works."""
        if not self._engine.is_healthy():
            return "The engine has died"
        num_taken = self._count_taken()
        if num_taken != self._num_taken or self._keeper.num_held or not self._is_called():
            self._num_taken, self._well_at = num_taken, now
            return None
        if now - self._well_at < _DEAF_SECONDS:
            return None
        return f"Messages are waiting in Redis, but none was received for {now - self._well_at:.0f} s"

    def _is_called(self) -> bool:
        """Return True if Redis holds messages for this worker's model.

        Postgres cannot answer this, because it may count messages as queued that were lost.
        """
        try:
            return self._queues.count_messages(self._lists) > 0
        except RedisError:
            return False
