"""Work: a table whose rows are claimed, carried out under a lease, and ended. Knows no feature.

A claim raises a row's fence and attempt by one and holds the row until `lease_until`, by the database's clock. Its
holder renews the lease with the first statement of every transaction that writes, or ends it with the only one; both
compare the fence. So a holder that was too slow, or whose row was cancelled, writes nothing. A row that was handed back
waits until `available_at`.

A feature describes its table once, as a constant; its statements are composed from that when they are imported. Nothing
that a user sends ever becomes part of a statement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import Connection, Row, TextClause, text

from vectormill.domain.errors import LeaseLost

_LEASE_END: Final = "now() + make_interval(secs => CAST(:lease_seconds AS double precision))"
# Ends a lease; what is held by nobody can be claimed.
_FREE: Final = "lease_owner = NULL, lease_until = NULL"


@dataclass(frozen=True)
class Work:
    """Describe a table whose rows are leased.

    It has the columns id, state, fence, lease_owner, lease_until, and those that `attempt` and `available_at` name.
    `row` is what statements call one of its rows. A row in a state of `working` is held while its lease lasts, and
    waits for a claim otherwise. A row in a state of `begins` waits for a claim, which puts it into the state beside it.
    A row in any other state cannot be claimed.
    """

    table: str
    row: str
    working: Sequence[str]
    begins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    attempt: str = "attempt"
    available_at: str = "available_at"

    @property
    def open(self) -> Sequence[str]:
        """Return the states in which a row can be claimed."""
        return (*self.begins, *self.working)

    def compose_claim(self, candidates: str, *, sets: str = "", returning: str = "") -> TextClause:
        """Compose the statement that claims rows, for `claim`.

        `candidates` selects the ids of rows in their order. It says `{claimable}` and `{lock}` where it looks at the
        rows of this table; `sets` and `returning` may name columns of the row and of `candidate`.
        """
        row = self.row
        claimable = (
            f"{row}.{_one_of(self.open)} AND {row}.{self.available_at} <= now() "
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

    def compose_release(self, sets: str) -> TextClause:
        """Compose the statement that ends a lease and writes `sets`, under the fence, for `Lease.release`."""
        return text(f"UPDATE {self.table} SET {_FREE}, {sets} WHERE {self._is_ours} RETURNING id")

    def compose_revocation(self, sets: str, where: str) -> TextClause:
        """Compose the statement that takes rows from whoever holds them, to cancel them or to begin them anew.

        In `where`, `{open}` stands for the condition that a row can be claimed.
        """
        where = where.format(open=_one_of(self.open))
        return text(f"UPDATE {self.table} SET fence = fence + 1, {_FREE}, {sets} WHERE {where} RETURNING id")

    @cached_property
    def keeping(self) -> TextClause:
        return text(f"UPDATE {self.table} SET lease_until = {_LEASE_END} WHERE {self._is_ours} RETURNING id")

    @cached_property
    def handing_back(self) -> TextClause:
        return self.compose_release(f"""
            {self.attempt} = {self.attempt} - CASE WHEN CAST(:is_counted AS boolean) THEN 0 ELSE 1 END,
            {self.available_at} = now() + make_interval(secs => CAST(:pause_seconds AS double precision))
        """)

    @property
    def _is_ours(self) -> str:
        return f"id = :key AND fence = :fence AND {_one_of(self.working)}"


def _one_of(states: Sequence[str]) -> str:
    return f"state IN ({', '.join(repr(state) for state in states)})"


@dataclass(frozen=True, slots=True)
class Lease:
    """The proof that a row is held: what its claim made of it."""

    work: Work
    key: Any
    state: str
    fence: int
    attempt: int
    seconds: float

    def keep(self, connection: Connection) -> None:
        """Renew the lease and lock the row until COMMIT. Raises LeaseLost."""
        self.release(connection, self.work.keeping, lease_seconds=self.seconds)

    def release(self, connection: Connection, statement: TextClause, **values: Any) -> None:
        """Execute a composed statement under the fence. Raises LeaseLost, and has written nothing then."""
        if (
            connection.execute(statement, {"key": self.key, "fence": self.fence, **values}).one_or_none()
            is None
        ):
            raise LeaseLost(
                f"The {self.work.row} was cancelled or has ended, or its lease expired and another process may hold it."
            )

    def hand_back(
        self, connection: Connection, *, pause_seconds: float = 0.0, is_counted: bool = False
    ) -> None:
        """Let another process claim the row after a pause; only a failure counts as an attempt. Raises LeaseLost."""
        self.release(connection, self.work.handing_back, pause_seconds=pause_seconds, is_counted=is_counted)

    def describe_attempts(self) -> str:
        """Say why a row that was claimed so often is given up."""
        return (
            f"The {self.work.row} was tried {self.attempt - 1} times while it was {self.state} and did not come "
            "through; the log of the process that tried says why."
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
    """Claim rows by a statement of `compose_claim`: each lease with its row of `returning`."""
    rows = connection.execute(statement, {"owner": owner, "lease_seconds": lease_seconds, **values})
    return [(Lease(work, row.id, row.state, row.fence, row.attempt, lease_seconds), row) for row in rows]
