"""Loop: run leased work on threads, and hand back what cannot be finished.

Nothing here depends on a feature.
"""

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from sqlalchemy import Engine

from vectormill.db.outages import DATABASE_ERRORS
from vectormill.domain.errors import LeaseLost
from vectormill.work.work import Lease

logger = logging.getLogger(__name__)

# The share of a lease after which it is renewed.
RENEWAL_SHARE: Final = 1 / 4
_FIRST_BACK_OFF_SECONDS: Final = 1.0
_LONGEST_BACK_OFF_SECONDS: Final = 60.0


class Stopping(Exception):
    """Raised when the process is shutting down, so that claimed work is handed back."""


def name_owner() -> str:
    """Return the name of this process as an owner of leases: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def back_off(attempt: int) -> float:
    """Return the backoff in seconds before work is retried after this many failed attempts."""
    return float(min(_FIRST_BACK_OFF_SECONDS * 2 ** min(attempt, 16), _LONGEST_BACK_OFF_SECONDS))


@dataclass(slots=True, kw_only=True)
class Held:
    """Claimed work that takes long. Call `keep` between transactions, at least every second."""

    engine: Engine
    lease: Lease
    is_stopping: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    _renewed_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._renewed_at = self.clock()

    def keep(self) -> None:
        """Renew the lease if that is due. Raise LeaseLost, or Stopping if the process is shutting down."""
        if self.is_stopping():
            raise Stopping
        if self.clock() >= self._renewed_at + RENEWAL_SHARE * self.lease.seconds:
            with self.engine.begin() as connection:
                self.lease.keep(connection)
            self._renewed_at = self.clock()


@contextmanager
def handing_back(engine: Engine, lease: Lease) -> Iterator[None]:
    """Hand the work back if the block raises: uncounted for Stopping, with backoff for any other error.

    If the hand-back itself fails, the database's error is raised and the lease expires. A lost lease is only
    logged.
    """
    name = f"{lease.work.row.capitalize()} {lease.key}"
    try:
        try:
            yield
        except Stopping:
            with engine.begin() as connection:
                lease.hand_back(connection)
        except LeaseLost:
            raise
        except Exception as error:
            pause, reason = back_off(lease.attempt), f"{type(error).__name__}: {error}"[:1000]
            logger.error("%s failed; retrying in %g s.", name, pause, exc_info=error)
            with engine.begin() as connection:
                lease.hand_back(connection, pause_seconds=pause, is_counted=True, error=reason)
    except LeaseLost as error:
        logger.warning("%s: %s", name, error)


class Loop(ABC):
    """A loop that repeats `step` on its own threads, whatever it raises, while its `with` block runs.

    With `stop_seconds` the end of the block waits at most that long for each thread; the lease of longer work
    expires.
    """

    def __init__(
        self, name: str, *, pause_seconds: float, num_threads: int = 1, stop_seconds: float | None = None
    ) -> None:
        self.stopping = threading.Event()
        self._name = name
        self._pause_seconds = pause_seconds
        self._stop_seconds = stop_seconds
        self._threads = [
            threading.Thread(target=self._run, name=f"{name} {number}", daemon=stop_seconds is not None)
            for number in range(num_threads)
        ]

    @abstractmethod
    def step(self) -> bool:
        """Do one piece of work; return True if there is more to do at once."""

    def close(self) -> None:  # noqa: B027 - most have nothing to free
        """Free the resources that the steps have used."""

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self._threads:
            thread.join(self._stop_seconds)
        self.close()

    def _run(self) -> None:
        while not self.stopping.is_set():
            has_more = False
            try:
                has_more = self.step()
            except DATABASE_ERRORS as error:
                logger.warning("Waiting for Postgres before continuing with %s: %s", self._name, error)
            except Exception:
                logger.exception("Retrying after an error in %s.", self._name)
            if not has_more:
                self.stopping.wait(self._pause_seconds)
