"""Work: a table whose rows are claimed, processed under a lease, and ended.

Nothing here depends on a feature.

A claim increments a row's fence and attempt, and holds the row until `lease_until` by the database's clock.
The holder renews the lease with the first statement of every transaction that writes, or ends it with a
single statement; both compare the fence. So a holder that was too slow, or whose row was cancelled, writes
nothing. A row that was handed back waits until `available_at`.

A feature describes its table once, as a constant, and its statements are composed from that on import.
Nothing that a user sends ever becomes part of a statement.
"""

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Self

from sqlalchemy import Connection, Engine, Row, TextClause, text

from vectormill.db.outages import DATABASE_ERRORS
from vectormill.domain.errors import LeaseLost
from vectormill.domain.states import States

_LEASE_END: Final = "now() + make_interval(secs => CAST(:lease_seconds AS double precision))"
# Ends a lease; a row without an owner can be claimed.
_FREE: Final = "lease_owner = NULL, lease_until = NULL"


@dataclass(frozen=True)
class Work:
    """A description of a table whose rows are leased.

    The table has the columns id, state, fence, lease_owner and lease_until, and those that `attempt` and
    `available_at` name. `last_error` optionally names the column for the error with which a row was handed
    back. `row` is the alias of a row in statements.

    A row in a `working` state is held while its lease lasts, and can be claimed afterwards. A row in a state
    of `begins` can be claimed, and the claim moves it into the state that `begins` maps it to. A row in any
    other state cannot be claimed.
    """

    table: str
    row: str
    working: States
    begins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attempt: str = "attempt"
    available_at: str = "available_at"
    last_error: str | None = None

    @property
    def open(self) -> States:
        """Return the states in which a row can be claimed."""
        return States((*self.begins, *self.working))

    def compose_claim(self, candidates: str, *, sets: str = "", returning: str = "") -> TextClause:
        """Compose the statement that claims rows, for `claim`.

        `candidates` is a SELECT of ids in the order of their claim; it contains the placeholders
        `{claimable}` and `{lock}` where it reads rows of this table. `sets` and `returning` may refer to
        columns of the row and of `candidate`.
        """
        row = self.row
        claimable = (
            f"{row}.state IN {self.open} AND {row}.{self.available_at} <= now() "
            f"AND ({row}.lease_until IS NULL OR {row}.lease_until <= now())"
        )
        lock = f"FOR NO KEY UPDATE OF {row} SKIP LOCKED"
        begun = "".join(f"WHEN '{wait}' THEN '{work}' " for wait, work in self.begins.items())
        settings = [
            f"state = CASE {row}.state {begun}ELSE {row}.state END" if begun else "",
            f"fence = {row}.fence + 1",
            f"{self.attempt} = {row}.{self.attempt} + 1",
            "lease_owner = :owner",
            f"lease_until = {_LEASE_END}",
            sets,
        ]
        returned = [f"{row}.id, {row}.state, {row}.fence, {row}.{self.attempt} AS attempt", returning]
        return text(f"""
            WITH candidate AS ({candidates.format(claimable=claimable, lock=lock)})
            UPDATE {self.table} AS {row} SET {", ".join(filter(None, settings))}
              FROM candidate
             WHERE {row}.id = candidate.id
            RETURNING {", ".join(filter(None, returned))}
        """)

    def compose_keeping(self, *sets: str) -> TextClause:
        """Compose the fenced statement that renews a lease and writes `sets`, for `Lease.keep`."""
        return self._compose_ours(f"lease_until = {_LEASE_END}", *sets)

    def compose_release(self, sets: str) -> TextClause:
        """Compose the fenced statement that ends a lease and writes `sets`, for `Lease.release`."""
        return self._compose_ours(_FREE, sets)

    def compose_revocation(self, sets: str, where: str) -> TextClause:
        """Compose the statement that takes rows away from their holders, to cancel or to restart them.

        In `where`, `{open}` stands for the condition that the row is in a state in which it can be claimed.
        """
        where = where.format(open=f"state IN {self.open}")
        return text(f"UPDATE {self.table} SET fence = fence + 1, {_FREE}, {sets} WHERE {where} RETURNING id")

    @cached_property
    def keeping(self) -> TextClause:
        return self.compose_keeping()

    # A locked row is skipped: the transaction that locked it has renewed the lease itself, and may outlast
    # the lease.
    @cached_property
    def renewal(self) -> TextClause:
        return text(f"""
            WITH held AS (SELECT id FROM {self.table} WHERE {self._is_ours} FOR NO KEY UPDATE SKIP LOCKED),
                 kept AS (UPDATE {self.table} AS {self.row} SET lease_until = {_LEASE_END}
                            FROM held WHERE {self.row}.id = held.id)
            SELECT state FROM {self.table} WHERE {self._is_ours}
        """)

    @cached_property
    def handing_back(self) -> TextClause:
        return self._compose_ours(
            _FREE,
            f"{self.attempt} = {self.attempt} - CASE WHEN CAST(:is_counted AS boolean) THEN 0 ELSE 1 END",
            f"{self.available_at} = now() + make_interval(secs => CAST(:pause_seconds AS double precision))",
            f"{self.last_error} = coalesce(CAST(:error AS text), {self.last_error})"
            if self.last_error
            else "",
        )

    def _compose_ours(self, *sets: str) -> TextClause:
        assigned = ", ".join(filter(None, sets))
        return text(f"UPDATE {self.table} SET {assigned} WHERE {self._is_ours} RETURNING state")

    @property
    def _is_ours(self) -> str:
        return f"id = :key AND fence = :fence AND state IN {self.working}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The lease of one claimed row, as its claim returned it."""

    work: Work
    key: Any
    state: str
    fence: int
    attempt: int
    seconds: float

    def keep(self, connection: Connection, statement: TextClause | None = None, **values: Any) -> str:
        """Renew the lease and lock the row until COMMIT; return its state. Raise LeaseLost.

        A `statement` made by `compose_keeping` also writes `values`.
        """
        statement = self.work.keeping if statement is None else statement
        return self._execute(connection, statement, lease_seconds=self.seconds, **values)

    def renew(self, connection: Connection) -> str:
        """Renew the lease without waiting for a transaction that has locked the row.

        Return its state. Raise LeaseLost.
        """
        return self._execute(connection, self.work.renewal, lease_seconds=self.seconds)

    def release(self, connection: Connection, statement: TextClause, **values: Any) -> str:
        """End the lease with a statement made by `compose_release`.

        Return the row's state. Raise LeaseLost.
        """
        return self._execute(connection, statement, **values)

    def _execute(self, connection: Connection, statement: TextClause, **values: Any) -> str:
        values |= {"key": self.key, "fence": self.fence}
        state: str | None = connection.execute(statement, values).scalar_one_or_none()
        if state is None:
            raise LeaseLost(
                f"The {self.work.row} was cancelled or has ended, or its lease expired and another process may hold it."
            )
        return state

    def hand_back(
        self,
        connection: Connection,
        *,
        pause_seconds: float = 0.0,
        is_counted: bool = False,
        error: str | None = None,
    ) -> None:
        """End the lease and let any process claim the row again after `pause_seconds`. Raise LeaseLost.

        Only with `is_counted` does the attempt count.
        """
        values = {"pause_seconds": pause_seconds, "is_counted": is_counted, "error": error}
        self._execute(connection, self.work.handing_back, **values)

    def describe_attempts(self) -> str:
        """Return the sentence that explains why a row which was claimed too often has failed."""
        return (
            f"The {self.work.row} was tried {self.attempt - 1} times while it was {self.state} and did not succeed; "
            "the log of the process that tried it shows why."
        )


def claim(
    connection: Connection,
    work: Work,
    statement: TextClause,
    *,
    owner: str,
    lease_seconds: float,
    **values: Any,
) -> list[tuple[Lease, Row[Any]]]:
    """Claim rows with a statement of `compose_claim`. Return each lease with the columns it returned."""
    rows = connection.execute(statement, {"owner": owner, "lease_seconds": lease_seconds, **values})
    return [(Lease(work, row.id, row.state, row.fence, row.attempt, lease_seconds), row) for row in rows]


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
