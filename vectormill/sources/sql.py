"""SQL sources: read a query's rows through a server-side cursor, on any database of SQLAlchemy.

The database URL is read from the environment or a file when it is needed, and is neither stored nor shown.
"""

import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus

import msgspec
import psycopg
from psycopg import sql
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader, Transformer
from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    String,
    cast,
    create_engine,
    literal,
    literal_column,
    make_url,
    text,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from vectormill.db.session import make_engine, walk_plan
from vectormill.domain.errors import InvalidItem, SourceFailed
from vectormill.jobs.item import Item
from vectormill.rows.decoding import RowBatch
from vectormill.sources.reader import (
    MOST_ROWS,
    BatchSize,
    Reader,
    SourceAssembler,
    SourcePlace,
    choose_failure,
)
from vectormill.sources.settings import read_url
from vectormill.sources.source import SqlOptions

APPLICATION_NAME: Final = "vectormill source"

# Reading a source at once is one long transaction on purpose, so the timeout of idle transactions, which ends
# forgotten ones elsewhere, is switched off.
READ_ON = (
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL statement_timeout = {milliseconds}",
    # The styles in which psycopg reads moments; a role or a database may have others.
    "SET LOCAL DateStyle = 'ISO'",
    "SET LOCAL IntervalStyle = 'postgres'",
)
# What keeps a transaction from writing; the session too, since a procedure may end the transaction.
BEGIN_READING: Final = {
    "postgresql": READ_ON,
    **dict.fromkeys(
        ("mysql", "mariadb"), ("SET SESSION TRANSACTION READ ONLY", "START TRANSACTION READ ONLY")
    ),
}
# The drivers that take one statement at a time, of databases that keep it from writing.
POSTGRES: Final = ("postgres", "postgresql", "postgresql+psycopg")
SQLITE: Final = ("sqlite", "sqlite+pysqlite")
GUARDED: Final = (*POSTGRES, *SQLITE, "mysql+pymysql", "mariadb+pymysql")

CANCEL_SECONDS: Final = 10.0
# The most rows, by the planner's estimate, that are sorted for each page of a query that is read in pages.
MOST_SORTED_ROWS: Final = 100_000

logger = logging.getLogger(__name__)

# The values of rows by column.
Values = Mapping[str, Sequence[Any]]
Fetch = Callable[[int], Sequence[Any]]


class SqlReader(Reader):
    """Read the rows of a query.

    On Postgres, `patience_seconds` is the timeout of each statement; 0 means none.
    """

    def __init__(self, options: SqlOptions, place: SourcePlace, patience_seconds: float = 0) -> None:
        super().__init__()
        self._options = options
        self.must_be_asked = options.pages
        self._place = place
        self._patience_ms = int(1000 * patience_seconds)
        self._lock = threading.Lock()
        self._driver: psycopg.Connection[Any] | None = None
        self._is_cancelled = False
        self._since: str | float | None = None
        self._failed: Sequence[str] = ()

    def narrow(self, since: str | float, failed: Sequence[str] = ()) -> None:
        self._since = self.newest = since
        self._failed = failed
        self.tells_what_vanished = False

    def read(self) -> Iterator[Sequence[Item]]:
        assembler = SourceAssembler("The query", self._place.settings.max_key_bytes, self.complaints)
        size = BatchSize()
        with self._speaking() as connection:
            if self._options.changed:
                self._mark(connection, self._options.changed)
            batches = self._read_pages if self._options.pages else self._read_at_once
            for values in batches(connection, size):
                items = assembler.assemble_batch(RowBatch(self._options.item_columns, values, ()))
                size.learn(items)
                yield items

    def _mark(self, connection: Connection, changed: str) -> None:
        """Leave out the rows below the mark of an earlier reading, and find the mark of this one.

        The database compares, since the order of texts is that of their collation. It is asked before the rows are
        read: what is committed in between is read once more by a later run.
        """
        dialect = connection.dialect
        column = f"source.{dialect.identifier_preparer.quote(changed)}"
        newest = f"CAST(max({column}) AS text)" if dialect.name == "postgresql" else f"max({column})"
        is_new = "" if self._since is None else f"{column} >= {write_value(dialect, self._since)}"
        query = ask_for(self._options.query, newest, rest=f"WHERE {is_new}" if is_new else "")
        try:
            with self._transaction(connection), streaming(connection, query) as (_, fetch):
                ((found,),) = fetch(1)
            if found is not None:
                self.newest = write_mark(found)
        except (TypeError, psycopg.errors.UndefinedFunction):
            raise SourceFailed(
                f"The column {changed!r} must have times, numbers or texts of one kind; it does not tell what changed."
            ) from None
        if self.newest in ENDLESS:
            logger.warning(
                "The greatest value of %r is %s, so the next run reads all rows.", changed, self.newest
            )
            self.newest = None
        if is_new:
            narrowed = f"WHERE {is_new}{write_failed(dialect, self._options.key, self._failed)}"
            narrowed_query = ask_for(self._options.query, rest=narrowed)
            self._options = replace(self._options, query=narrowed_query)

    def _read_at_once(self, connection: Connection, size: BatchSize) -> Iterator[Values]:
        """Yield batches of rows, all from one transaction."""
        query = strip(self._options.query)
        with self._transaction(connection), streaming(connection, query) as (names, fetch):
            columns = find_columns(names, self._options)
            while rows := fetch(size.rows):
                yield name_values(columns, rows)

    def _read_pages(self, connection: Connection, size: BatchSize) -> Iterator[Values]:
        """Yield batches of rows in the order of the key, each read in a transaction that is over by then.

        A page begins with the last row of the one before, so that equal keys are found, and rows without a key are
        looked for at the end.
        """
        if connection.dialect.name != "postgresql":
            raise SourceFailed("Only a query on Postgres can be read in pages.")
        last: str | None = None
        is_over = False
        while not is_over:
            limit = size.rows + (last is not None)
            columns, rows = self._read_page(connection, write_page(self._options, last, limit))
            is_over = len(rows) < limit
            num_known = 0 if last is None else sum(row[-1] == last for row in rows[:2])
            if num_known > 1:
                raise SourceFailed(f"The query: duplicate key {last!r}; each row must have a unique key.")
            if last is None and not is_over:
                self._refuse_sorting(connection, write_page(self._options, rows[-1][-1], limit))
            if rows[num_known:]:
                last = rows[-1][-1]
                yield name_values(columns, rows[num_known:])
        columns, rows = self._read_page(connection, write_page(self._options, None, 1, only_null=True))
        if rows:
            yield name_values(columns, rows)  # which is refused as any row without a key

    def _read_page(self, connection: Connection, query: str) -> tuple[dict[str, int], Sequence[Any]]:
        with self._transaction(connection), streaming(connection, query) as (names, fetch):
            return find_columns(names, self._options), fetch(2 * MOST_ROWS)

    def _refuse_sorting(self, connection: Connection, query: str) -> None:
        """Raise SourceFailed if Postgres would sort many rows for this page, and so for each one."""
        with self._transaction(connection):
            ((plan,),) = ask(connection, "EXPLAIN (FORMAT JSON) " + query).fetchone()
        sorted_rows = [node["Plan Rows"] for node in walk_plan(plan["Plan"]) if node["Node Type"] == "Sort"]
        if max(sorted_rows, default=0) > MOST_SORTED_ROWS:
            raise SourceFailed(
                f"Postgres would sort about {max(sorted_rows):,} rows for each page: the query needs an index by "
                f"{self._options.key!r}, and must not group or sort by itself. Create an index, or leave "
                "out `pages`."
            )

    def read_columns(self, num_rows: int) -> Iterator[Values]:
        """Yield the values of the columns that the options name, in batches of so many rows of one transaction.

        On Postgres a value of one of pgvector's types is the bytes of its binary form.
        """
        with self._speaking() as connection, self._transaction(connection):
            query = strip(self._options.query)
            if connection.dialect.driver == "psycopg":
                query = self._send_vectors(connection, query)
            with streaming(connection, query) as (names, fetch):
                columns = find_columns(names, self._options)
                while rows := fetch(num_rows):
                    yield name_values(columns, rows)

    def _send_vectors(self, connection: Connection, query: str) -> str:
        """Return a query of the same columns in which Postgres itself writes the binary form of vectors."""
        types = self._describe(connection)
        found = connection.execute(SENDERS, {"oids": list(types.values())})
        senders = {oid: str(sender) for oid, sender in found}
        columns = (
            f"{senders.get(oid, '')}(source.{name}) AS {name}"
            for name, oid in ((quote_name(name), oid) for name, oid in types.items())
        )
        return ask_for(query, ", ".join(columns))

    def describe_key(self) -> str:
        """Return the type of the key column, as Postgres writes it in SQL."""
        with self._speaking() as connection, self._transaction(connection):
            oid = self._describe(connection)[self._options.key]
            return str(connection.execute(TYPE_OF, {"oid": oid}).scalar_one())

    def _describe(self, connection: Connection) -> dict[str, int]:
        """Return the oids of the types of the columns that are read, by name."""
        found = ask(connection, ask_for(self._options.query, rest="LIMIT 0")).description
        columns = find_columns([column.name for column in found], self._options)
        return {name: found[column].type_code for name, column in columns.items()}

    def cancel(self) -> None:
        """Cancel the query on the server, from another thread, so that reading fails.

        Only Postgres supports this.
        """
        with self._lock:
            self._is_cancelled = True
            if self._driver is not None:
                try:
                    self._driver.cancel_safe(timeout=CANCEL_SECONDS)
                except psycopg.Error as error:
                    logger.warning("Could not cancel an abandoned query: %s", error)

    def _hold(self, connection: Connection | None) -> None:
        """Remember the connection that `cancel` may use, so that it never uses one returned to the pool."""
        driver = None if connection is None else connection.connection.driver_connection
        with self._lock:
            self._driver = driver if isinstance(driver, psycopg.Connection) else None
            if self._is_cancelled and connection is not None:
                raise SourceFailed("The query was cancelled before it started.")

    def count_rows(self) -> int | None:
        """Return the Postgres planner's estimate of the number of rows; None for other databases."""
        with self._speaking() as connection, self._transaction(connection):
            if connection.dialect.driver != "psycopg":
                return None
            ((plan,),) = ask(connection, "EXPLAIN (FORMAT JSON) " + strip(self._options.query)).fetchone()
            return int(plan["Plan"]["Plan Rows"])

    def thin(self, num_rows: int) -> tuple[int, int] | None:
        """Let `read` yield only about so many random rows; return how many rows and different texts or pairs there are.

        Postgres counts them and draws the rows, each in one reading of the query. Return None, and change nothing, for
        other databases, if several columns have the name of a text, and if the timeout of a statement ends before.
        """
        with self._speaking() as connection:
            if connection.dialect.driver != "psycopg":
                return None
            texts = ", E'\\x1f', ".join(f"source.{quote_name(name)}" for name in self._options.texts)
            counts = f"count(*), count(DISTINCT hashtextextended(concat({texts}), 0))"
            query = ask_for(self._options.query, counts)
            try:
                with self._transaction(connection):
                    num_all, num_distinct = ask(connection, query).fetchone()
            except (psycopg.OperationalError, psycopg.errors.AmbiguousColumn):  # the former is the timeout
                return None
        if num_all > num_rows:
            share = num_rows / num_all
            query = ask_for(self._options.query, rest=f"WHERE random() < {share}")
            self._options = replace(self._options, query=query)
        return num_all, num_distinct

    @contextmanager
    def _speaking(self) -> Iterator[Connection]:
        """Yield a read-only connection. Turn every exception into a SourceFailed that contains no secrets."""
        secrets: list[str] = []
        engine: Engine | None = None
        try:
            engine = self._open(secrets)
            with engine.connect() as connection:
                if connection.dialect.name == "postgresql":
                    connection = connection.execution_options(postgresql_readonly=True)
                elif connection.dialect.name == "sqlite":
                    driver: Any = connection.connection.driver_connection
                    driver.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
                    driver.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self._place.settings.max_line_bytes)
                    driver.set_authorizer(allow_reading)
                self._hold(connection)
                try:
                    yield connection
                finally:
                    self._hold(None)
        except SourceFailed:
            raise
        except Exception as error:  # noqa: BLE001 - drivers of many databases raise all kinds of errors
            # The cause is dropped, because it may quote the URL and would be logged with this error.
            role = engine.url.username if engine is not None else None
            raise choose_failure(error)(describe_failure(error, secrets, role)) from None
        finally:
            if engine is not None:
                engine.dispose()

    @contextmanager
    def _transaction(self, connection: Connection) -> Iterator[None]:
        with connection.begin() as transaction:
            for statement in BEGIN_READING.get(connection.dialect.name, ()):
                connection.execute(text(statement.format(milliseconds=self._patience_ms)))
            yield
            transaction.rollback()  # leaves no trace, whatever the query did

    def _open(self, secrets: list[str]) -> Engine:
        options = self._options
        if options.url_env is None and options.url_file is None:
            reading = open_own(self._place.engine, self._place.settings.reader_url)
            secrets.extend(find_secrets(reading.url))
            return reading
        named, value = read_url(options, self._place.roots)
        secrets.append(value)
        try:
            url = make_url(value)
        except SQLAlchemyError:
            raise SourceFailed(
                f"The value of {named} is not a database URL such as postgresql://user@host/database."
            ) from None
        secrets.extend(find_secrets(url))
        if url.drivername in POSTGRES:
            return make_engine(value, application_name=APPLICATION_NAME, pool_size=1, max_overflow=0)
        # Nothing here keeps the statements of other drivers from writing, so the operator must allow them.
        if url.drivername not in (*GUARDED, *self._place.settings.list_unguarded_sources()):
            raise SourceFailed(
                f"Queries by {url.drivername!r} could write whatever the login of its URL may; only "
                f"{', '.join(GUARDED)} are kept from it. If that login may only read, add {url.drivername} to "
                "VECTORMILL_UNGUARDED_SOURCES of the API and the indexer."
            )
        if url.drivername in SQLITE:
            path = url.database or ":memory:"
            path = path if path.startswith(("file:", ":")) else Path(path).absolute().as_uri()
            url = url.set(database=path, query={**url.query, "uri": "true", "mode": "ro"})
        return create_engine(url, poolclass=NullPool, hide_parameters=True)


def allow_reading(action: int, name: str | None, function: str | None, *_: str | None) -> int:
    """Let a statement of SQLite read, and do nothing else; this is an authorizer of its library."""
    is_reading = action in (
        sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION
    )  # fmt: skip
    return sqlite3.SQLITE_OK if is_reading and function != "load_extension" else sqlite3.SQLITE_DENY


def open_own(engine: Engine, reader_url: str | None) -> Engine:
    """Return an engine for queries of sources on Vectormill's own database, as its reader if there is one.

    Its session ends with it, and takes the locks and settings of a query with it.
    """
    url = reader_url or engine.url.render_as_string(hide_password=False)
    return make_engine(url, application_name=APPLICATION_NAME, pool_size=1, max_overflow=0)


def list_oids(*names: str) -> frozenset[int]:
    return frozenset(psycopg.adapters.types[name].oid for name in names)


JSON: Final = list_oids("json", "jsonb")
# psycopg reads them fast, and raises DataError for the values of a few rows.
MOMENTS: Final = list_oids("date", "time", "timetz", "timestamp", "timestamptz")
INTERVAL: Final = psycopg.adapters.types["interval"].oid
MONTHS: Final = re.compile(rb"mon|year")  # of which nobody can say how many days they have
RANGES: Final = [
    kind + form for kind in ("int4", "int8", "num", "date", "ts", "tstz") for form in ("range", "multirange")
]
# Types whose values in Python say less than the texts of Postgres, or are spelled otherwise, at least some of them.
AS_SENT: Final = JSON | list_oids("interval", "inet", "cidr", "record", *RANGES)
# 0 stands for a type that psycopg does not know.
TEXTS: Final = list_oids("text", "varchar", "bpchar", "name", '"char"') | {0}


class SafeLoader(Loader):
    """Load a moment, an interval or JSON as psycopg does, and a value of another type as the text that Postgres sends.

    So is a value that nothing in Python can hold: moments that are infinite, before the year 1 or after 9999, the
    time 24:00, intervals of months, JSON with a number beyond all limits. Bytes that are not UTF-8 become surrogates.
    """

    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        loader = psycopg.adapters.get_loader(oid, self.format) if oid in MOMENTS or oid == INTERVAL else None
        self._load = msgspec.json.decode if oid in JSON else loader(oid, context).load if loader else None

    def load(self, data: Buffer) -> Any:
        sent = bytes(data)
        if self._load is not None and not (self.oid == INTERVAL and MONTHS.search(sent)):
            with suppress(psycopg.Error, ValueError, OverflowError, RecursionError):
                return self._load(sent)
        return sent.decode("utf-8", "surrogateescape")


def fetch_all_values(cursor: psycopg.ServerCursor[Any], num_rows: int) -> Sequence[Any]:
    """Fetch the next rows. Those with a value that psycopg cannot load are loaded again, by loaders that can."""
    try:
        return cursor.fetchmany(num_rows)
    except (psycopg.DataError, psycopg.NotSupportedError, ValueError, OverflowError) as error:
        result = cursor.pgresult
        is_of_query = getattr(error, "sqlstate", None) is not None
        if is_of_query or result is None:
            raise
        for oid in MOMENTS:
            cursor.adapters.register_loader(oid, SafeLoader)
        transformer = Transformer(cursor)
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, tuple)


@contextmanager
def streaming(connection: Connection, query: str) -> Iterator[tuple[list[str], Fetch]]:
    """Yield the column names of a query, and a function that fetches its next rows from a server-side cursor.

    With psycopg its own cursor is used, because building SQLAlchemy's rows takes as long as fetching them. No
    parameters are passed, so that a percent sign or a colon in the query has no special meaning.
    """
    if connection.dialect.driver == "psycopg":
        driver: Any = connection.connection.driver_connection
        with driver.cursor(name="vectormill_source") as cursor:
            knows_none = driver.info.parameter_status("server_encoding") == "SQL_ASCII"
            for oid in AS_SENT | (TEXTS if knows_none else frozenset()):
                cursor.adapters.register_loader(oid, SafeLoader)
            cursor.execute(query.encode())
            names = [column.name for column in cursor.description or ()]
            if knows_none:  # it refuses to send bytes that are not UTF-8 to a client that asks for UTF-8
                driver.execute("SET LOCAL client_encoding = 'SQL_ASCII'")
            yield names, partial(fetch_all_values, cursor)
        return
    options = {"stream_results": True, "max_row_buffer": 1, "no_parameters": True}
    with connection.execution_options(**options).exec_driver_sql(query) as result:
        yield list(result.keys()), result.fetchmany


def ask(connection: Connection, query: str) -> Any:
    """Run a query without parameters and return its cursor of psycopg.

    Only the extended protocol, which psycopg needs for binary values, refuses several statements. In the simple one
    a query of a source could end the read-only transaction and go on to write.
    """
    driver: Any = connection.connection.driver_connection
    return driver.execute(query.encode(), binary=True)


ASKED: Final = """
SELECT {columns} FROM (
{query}
) AS source {rest}
"""


def ask_for(query: str, columns: str = "source.*", *, rest: str = "") -> str:
    """Return a query on the rows of a user's query, which may end with a comment or a semicolon."""
    return ASKED.format(columns=columns, query=strip(query), rest=rest).strip()


def write_page(options: SqlOptions, first: str | None, limit: int, *, only_null: bool = False) -> str:
    """Return the query of a page from the key `first` on; the key as text is its last column."""
    key = f"source.{quote_name(options.key)}"
    condition = f"{key} IS NULL" if only_null else "true"
    if first is not None:  # an untyped literal, which is compared in the key's own type and order
        condition = f"{key} >= {sql.Literal(first).as_string(None)}"
    rest = f"WHERE {condition} ORDER BY {key} LIMIT {limit}"
    return ask_for(options.query, f"source.*, CAST({key} AS text) AS key_as_text", rest=rest)


def quote_name(name: str) -> str:
    return sql.Identifier(name).as_string(None)


TYPE_OF: Final = text("SELECT format_type(CAST(:oid AS oid), NULL)")
SENDERS: Final = text("""
    SELECT oid, CAST(typsend AS text) FROM pg_type
     WHERE oid = ANY(:oids) AND typname IN ('vector', 'halfvec', 'sparsevec')
""")


# Above these nothing changes any more.
ENDLESS: Final = ("infinity", "Infinity", "NaN")


def write_value(dialect: Dialect, value: str | float) -> str:
    """Return a literal, which the database compares in the type of the column beside it."""
    if isinstance(value, int | float):
        return str(value)
    # With each backslash doubled where it begins an escape, as in MySQL.
    written = str(literal(value).compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
    return written.replace("%%", "%") if dialect.paramstyle in ("format", "pyformat") else written


def write_failed(dialect: Dialect, key: str, failed: Sequence[str]) -> str:
    """Return the rest of a condition that also lets the rows with these keys through."""
    column = f"source.{dialect.identifier_preparer.quote(key)}"
    if not failed:
        return ""
    if dialect.name == "postgresql":  # in the type of the column, so that an index on it is used
        return f" OR {column} = ANY({write_value(dialect, write_array(failed))})"
    cast_column = cast(literal_column(column), String).compile(dialect=dialect)
    return f" OR {cast_column} IN ({', '.join(write_value(dialect, each) for each in failed)})"


def write_array(values: Sequence[str]) -> str:
    """Return the texts as a literal of a Postgres array."""
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
    return "{" + ",".join(f'"{value}"' for value in quoted) + "}"


def write_mark(value: Any) -> str | float:
    """Return a value of the column of changes as JSON keeps it, from which the next reading starts.

    Raise TypeError if it is no time, text or number.
    """
    if isinstance(value, datetime):
        return (value.astimezone(UTC) if value.tzinfo else value).isoformat(" ", timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return value
    if isinstance(value, Decimal) and value == int(value):
        return int(value)
    raise TypeError(value)


def find_columns(there: list[str], options: SqlOptions) -> dict[str, int]:
    """Return the positions of the columns that are read: key, texts and metadata.

    Raise SourceFailed, which lists the query's columns, if one is missing or occurs twice.
    """
    try:
        return {name: there.index(name) for name in options.item_columns.find(there, "The query").names}
    except InvalidItem as error:
        raise SourceFailed(str(error)) from error


def name_values(columns: Mapping[str, int], rows: Sequence[Any]) -> Values:
    """Return the values of rows by column."""
    values = list(zip(*rows, strict=True))
    return {name: values[position] for name, position in columns.items()}


def strip(query: str) -> str:
    """Return the query without a trailing semicolon, which a cursor does not accept."""
    return query.strip().rstrip("; \n\t")


def find_secrets(url: URL) -> list[str]:
    """Return the secrets in a database URL, plain and percent-encoded, for removal from messages."""
    values = [url.password or "", *(str(value) for value in url.query.values())]
    return [form for value in values if value for form in (value, quote(value, safe=""), quote_plus(value))]


DENIED: Final = re.compile(r"permission denied for (schema|\w+) (.+)")


def describe_failure(error: Exception, secrets: list[str], role: str | None) -> str:
    """Return the database's message for an error, with the secrets removed, and what the role lacks."""
    if isinstance(error, ModuleNotFoundError):
        return f"The database driver is not installed: no Python package named {error.name!r}."
    origin = getattr(error, "orig", None) or error
    words = " ".join(str(origin).split()) or type(origin).__name__
    for secret in sorted(secrets, key=len, reverse=True):
        words = words.replace(secret, "…")
    advice = ""
    if isinstance(origin, psycopg.errors.InsufficientPrivilege) and (
        found := DENIED.match(origin.diag.message_primary or "")
    ):
        right = "USAGE ON SCHEMA" if found[1] == "schema" else "SELECT ON"
        advice = f" Its owner grants it, with its schema if that is not public: GRANT {right} {found[2]} TO {role};"
    return f"The query failed: {words.rstrip('.')}.{advice}"
