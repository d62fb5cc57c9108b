"""The common part of all table definitions: the schema, the names of constraints, and recurring columns."""

from collections.abc import Sequence

from sqlalchemy import BigInteger, Column, DateTime, Integer, MetaData, func, text

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
