"""PostgresTarget: a table of any Postgres with pgvector as the target of a load.

A batch is copied into a temporary table in the binary format and upserted from there, in one transaction.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from vectormill.addresses import to_libpq
from vectormill.db.parameters import encode_rows
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ConfigurationError, DatabaseUnavailable, InvalidOption
from vectormill.objects.loading.load import refuse_other_columns
from vectormill.results.kind import LoadedColumn, encode_jsonb, encode_text
from vectormill.results.table import choose_kind

if TYPE_CHECKING:
    import pyarrow

COPY_BYTES: Final = 8 << 20

CREATE: Final = sql.SQL("CREATE TABLE IF NOT EXISTS {table} ({columns}, PRIMARY KEY (key))")
STAGE: Final = sql.SQL("CREATE TEMPORARY TABLE vectormill_load ({columns}) ON COMMIT DELETE ROWS")
COPY: Final = sql.SQL("COPY vectormill_load ({names}) FROM STDIN (FORMAT binary)")
# Ordered by key, so that two loads never wait for each other's rows.
UPSERT: Final = sql.SQL("""
    INSERT INTO {table} ({names}) SELECT {names} FROM vectormill_load ORDER BY key
    ON CONFLICT (key) DO UPDATE SET {assignments}
""")
FIND_COLUMNS: Final = """
    SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
     WHERE attrelid = to_regclass(%(table)s) AND attnum > 0 AND NOT attisdropped
"""
HAS_PGVECTOR: Final = "SELECT to_regtype('halfvec') IS NOT NULL"


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A table, and a connection with a temporary table of the same columns. Each batch is a transaction."""

    connection: "psycopg.Connection[tuple[Any, ...]]"
    columns: Sequence[LoadedColumn]
    copy: sql.Composed
    insert: sql.Composed
    batch_bytes: int = COPY_BYTES

    def upsert(self, rows: "pyarrow.RecordBatch") -> None:
        content = encode_rows([column.encode(rows) for column in self.columns])
        with _translating(), self.connection.transaction(), self.connection.cursor() as cursor:
            with cursor.copy(self.copy) as copy:
                copy.write(content)
            cursor.execute(self.insert)


@contextmanager
def open_postgres(database_url: str, table: str, spec: EncodingSpec) -> Iterator[PostgresTarget]:
    """Connect to a database and open a table for the results of a spec; create it if it is not there.

    The table's columns are key, the result (embedding; or score, label and probabilities; or output) and metadata.
    Its name may have a schema before a dot. Raise SpecMismatch if the table has other columns, ConfigurationError
    if pgvector cannot be installed, InvalidOption if Postgres refuses a statement, and DatabaseUnavailable.
    """
    columns = choose_columns(spec)
    name = sql.Identifier(*table.split("."))
    names = sql.SQL(", ").join(sql.Identifier(column.name) for column in columns)
    written = sql.SQL(", ").join(
        sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(column.type)) for column in columns
    )
    updated = [sql.Identifier(column.name) for column in columns if column.name != "key"]
    assignments = sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(column) for column in updated)
    with _translating():
        connection = psycopg.connect(
            to_libpq(database_url), autocommit=True, application_name="vectormill load"
        )
    with connection:
        with _translating():
            if choose_kind(spec).needs_pgvector:
                _install_pgvector(connection)
            connection.execute(CREATE.format(table=name, columns=written))
            there = connection.execute(FIND_COLUMNS, {"table": name.as_string(connection)}).fetchall()
            refuse_other_columns(table, dict(there), {column.name: column.type for column in columns})
            connection.execute(STAGE.format(columns=written))
        yield PostgresTarget(
            connection,
            columns,
            COPY.format(names=names),
            UPSERT.format(table=name, names=names, assignments=assignments),
        )


def choose_columns(spec: EncodingSpec) -> list[LoadedColumn]:
    """Return the columns of a table for the results of a spec. Raise InvalidOption for results that have none."""
    return [
        LoadedColumn("key", "text", partial(encode_text, name="key")),
        *choose_kind(spec).loaded(spec),
        LoadedColumn("metadata", "jsonb", partial(encode_jsonb, name="metadata")),
    ]


def _install_pgvector(connection: "psycopg.Connection[tuple[Any, ...]]") -> None:
    try:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    except psycopg.Error as error:
        # A role that may not create extensions can still use one that is already installed.
        if connection.execute(HAS_PGVECTOR).fetchone() != (True,):
            raise ConfigurationError(
                f"The database has no pgvector, and it cannot be installed: {_describe(error)}"
            ) from error


@contextmanager
def _translating() -> Iterator[None]:
    """Raise our errors for those of psycopg."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable(f"Postgres cannot be used: {_describe(error)}") from error
    except psycopg.Error as error:
        raise InvalidOption(f"Postgres refuses: {_describe(error)}") from error


def _describe(error: psycopg.Error) -> str:
    return " ".join(str(error).split())
