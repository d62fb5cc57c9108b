"""The common part of all table definitions: the schema, the names of constraints, and recurring columns."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    MetaData,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA = "vectormill"

# For tables with few rows that change every second: the fillfactor leaves room in the page for a row's next
# version, so that no index is updated, and vacuum is triggered by the number of changes.
BUSY = {"fillfactor": "50", "autovacuum_vacuum_scale_factor": "0"}

metadata = MetaData(
    schema=SCHEMA,
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    },
)


def one_of(column: str, values: Sequence[str]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


def moment(name: str, *, nullable: bool = True, is_now: bool = False) -> Column[object]:
    default = func.now() if is_now else None
    return Column(name, DateTime(timezone=True), nullable=nullable and not is_now, server_default=default)


def count(name: str, kind: type[BigInteger] | type[Integer] = BigInteger) -> Column[int]:
    return Column(name, kind, nullable=False, server_default=text("0"))


def serial(name: str = "id", **options: Any) -> Column[int]:
    """Return a column that Postgres numbers: the primary key, unless `options` say otherwise."""
    return Column(name, BigInteger, Identity(always=True), **(options or {"primary_key": True}))


def choice(
    name: str, values: Sequence[str], *, nullable: bool = False, default: str | None = None
) -> Column[str]:
    """Return a column of text for which a constraint of the same name allows these values only."""
    only = CheckConstraint(one_of(name, values), name=name)
    return Column(name, Text, only, nullable=nullable, server_default=default)


def flag(name: str) -> Column[bool]:
    return Column(name, Boolean, nullable=False, server_default=text("false"))


def document(name: str, default: str = "{}") -> Column[Any]:
    return Column(name, JSONB, nullable=False, server_default=text(f"'{default}'"))


def lease(kind: type[BigInteger] | type[Integer] = Integer) -> list[Column[Any]]:
    """Return the columns of leased work (vectormill/work); `kind` is that of the number of attempts."""
    owner: Column[Any] = Column("lease_owner", Text)
    times = [moment("lease_until"), moment("available_at", is_now=True)]
    return [count("fence"), count("attempt", kind), owner, *times]


def index(name: str, *columns: Any, where: str | None = None, **options: Any) -> Index:
    """Return an index, of the rows that satisfy `where` if that is given."""
    return Index(name, *columns, postgresql_where=None if where is None else text(where), **options)
