"""PostgresTarget: a table of any Postgres with pgvector as the target of a load.

A batch is copied into a temporary table in the binary format and upserted from there, in one transaction.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from vectormill.addresses import to_libpq
from vectormill.db.parameters import JSONB_VERSION, Field, encode_rows
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ConfigurationError, DatabaseUnavailable, InvalidOption
from vectormill.domain.task import RECORD, SCORE, VECTOR
from vectormill.files.matrices import take_vectors
from vectormill.objects.loading.load import refuse_other_columns
from vectormill.vectors.scores import names_labels
from vectormill.vectors.vector_types import choose_vector_type, send_rows

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
class TargetColumn:
    """A column of the table: its name, its SQL type, and its fields in binary form for a batch of rows."""

    name: str
    kind: str
    encode: "Callable[[pyarrow.RecordBatch], Sequence[Field]]"


@dataclass(frozen=True, slots=True)
class PostgresTarget:
    """A table, and a connection with a temporary table of the same columns. Each batch is a transaction."""

    connection: "psycopg.Connection[tuple[Any, ...]]"
    columns: Sequence[TargetColumn]
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
        sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(column.kind)) for column in columns
    )
    updated = [sql.Identifier(column.name) for column in columns if column.name != "key"]
    assignments = sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(column) for column in updated)
    with _translating():
        connection = psycopg.connect(
            to_libpq(database_url), autocommit=True, application_name="vectormill load"
        )
    with connection:
        with _translating():
            if spec.result == VECTOR:
                _install_pgvector(connection)
            connection.execute(CREATE.format(table=name, columns=written))
            there = connection.execute(FIND_COLUMNS, {"table": name.as_string(connection)}).fetchall()
            refuse_other_columns(table, dict(there), {column.name: column.kind for column in columns})
            connection.execute(STAGE.format(columns=written))
        yield PostgresTarget(
            connection,
            columns,
            COPY.format(names=names),
            UPSERT.format(table=name, names=names, assignments=assignments),
        )


def choose_columns(spec: EncodingSpec) -> list[TargetColumn]:
    """Return the columns of a table for the results of a spec."""
    kind = choose_vector_type(spec, in_collection=False)
    labels = [
        TargetColumn("label", "text", partial(_encode_text, name="label")),
        TargetColumn("probabilities", "jsonb", _encode_probabilities),
    ]
    of_result = {
        VECTOR: [
            TargetColumn(
                "embedding",
                f"{kind.column}({spec.dimensions})",
                lambda rows: send_rows(take_vectors(rows), kind, spec.dimensions),
            )
        ],
        SCORE: [
            TargetColumn("score", "real", _encode_scores),
            *(labels if names_labels(spec.labels) else []),
        ],
        RECORD: [TargetColumn("output", "jsonb", partial(_encode_jsonb, name="output"))],
    }
    return [
        TargetColumn("key", "text", partial(_encode_text, name="key")),
        *of_result[spec.result],
        TargetColumn("metadata", "jsonb", partial(_encode_jsonb, name="metadata")),
    ]


def _encode_text(rows: "pyarrow.RecordBatch", name: str) -> list[Field]:
    return [None if value is None else value.encode() for value in rows.column(name).to_pylist()]


def _encode_jsonb(rows: "pyarrow.RecordBatch", name: str) -> list[Field]:
    return [None if value is None else JSONB_VERSION + value for value in _encode_text(rows, name)]


def _encode_probabilities(rows: "pyarrow.RecordBatch") -> list[Field]:
    values = rows.column("probabilities").to_pylist()
    return [JSONB_VERSION + json.dumps(value, ensure_ascii=False).encode() for value in values]


def _encode_scores(rows: "pyarrow.RecordBatch") -> list[bytes]:
    scores = rows.column("score").to_numpy(zero_copy_only=False).astype(">f4")
    return list(scores.view("V4").tolist())


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
