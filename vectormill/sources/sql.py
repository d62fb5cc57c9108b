"""SQL: the rows of a query, of any database that SQLAlchemy reaches, through a cursor on the server.

The URL is read from the environment or a file when it is needed, and neither kept nor shown.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote, quote_plus

import msgspec
import psycopg
from psycopg.types.json import set_json_loads
from sqlalchemy import URL, Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from vectormill.db.session import make_engine
from vectormill.domain.errors import SourceFailed
from vectormill.jobs.item import Item
from vectormill.sources.reader import Assembler, BatchSize, Reader, SourcePlace, choose_failure
from vectormill.sources.settings import read_secret, read_secret_file
from vectormill.sources.source import SqlOptions

APPLICATION_NAME: Final = "vectormill source"

# The reading is one long statement on purpose: what the rest of the project counts as a forgotten transaction.
READ_ON = (
    "SET LOCAL idle_in_transaction_session_timeout = 0",
    "SET LOCAL statement_timeout = {milliseconds}",
)


CANCEL_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)

Fetch = Callable[[int], Sequence[Any]]


class SqlReader(Reader):
    """Read a query's rows. `patience_seconds` bounds each statement where the database is Postgres; 0 is for ever."""

    def __init__(self, options: SqlOptions, place: SourcePlace, patience_seconds: float = 0) -> None:
        super().__init__()
        self._options = options
        self._place = place
        self._patience_ms = int(1000 * patience_seconds)
        self._lock = threading.Lock()
        self._driver: psycopg.Connection[Any] | None = None
        self._is_cancelled = False

    def read(self) -> Iterator[list[Item]]:
        query = strip(self._options.query)
        with self._speaking() as connection, streaming(connection, query) as (names, fetch):
            columns = find_columns(names, self._options)
            assembler = Assembler("The query", self._place.settings.max_key_bytes, self.complaints)
            size = BatchSize()
            while rows := fetch(size.rows):
                values = list(zip(*rows, strict=True))
                items = assembler.assemble(*self._options.pick(values, columns))
                size.learn(items)
                yield items

    def cancel(self) -> None:
        """End the query on its server, from another thread; the reading fails then. Only Postgres can be told."""
        with self._lock:
            self._is_cancelled = True
            if self._driver is not None:
                try:
                    self._driver.cancel_safe(timeout=CANCEL_SECONDS)
                except psycopg.Error as error:
                    logger.warning("A query that nobody waits for could not be cancelled: %s", error)

    def _hold(self, connection: Connection | None) -> None:
        """Note the connection that `cancel` may speak to: never one that the pool has given to somebody else."""
        driver = None if connection is None else connection.connection.driver_connection
        with self._lock:
            self._driver = driver if isinstance(driver, psycopg.Connection) else None
            if self._is_cancelled and connection is not None:
                raise SourceFailed("The query was cancelled before it started.")

    def count_rows(self) -> int | None:
        """Return Postgres' estimate of the rows; None for other databases."""
        with self._speaking() as connection:
            if connection.dialect.name != "postgresql":
                return None
            plain = connection.execution_options(no_parameters=True)
            plan = plain.exec_driver_sql("EXPLAIN (FORMAT JSON) " + strip(self._options.query)).scalar_one()
            return int(plan[0]["Plan"]["Plan Rows"])

    @contextmanager
    def _speaking(self) -> Iterator[Connection]:
        """Yield a connection for reading alone. Whatever is raised meanwhile becomes a SourceFailed without secrets."""
        secrets: list[str] = []
        engine: Engine | None = None
        try:
            engine = self._open(secrets)
            with engine.connect() as connection:
                is_postgres = connection.dialect.name == "postgresql"
                if is_postgres:
                    connection = connection.execution_options(postgresql_readonly=True)
                self._hold(connection)
                try:
                    with connection.begin() as transaction:
                        for statement in READ_ON if is_postgres else ():
                            connection.execute(text(statement.format(milliseconds=self._patience_ms)))
                        yield connection
                        transaction.rollback()  # whatever the query is, nothing of it stays
                finally:
                    self._hold(None)
        except SourceFailed:
            raise
        except Exception as error:  # noqa: BLE001 - drivers of a dozen databases raise what they like
            # Without its cause, which may quote the URL, and would be logged with this error.
            raise choose_failure(error)(describe_failure(error, secrets)) from None
        finally:
            if engine is not None and engine is not self._place.engine:
                engine.dispose()

    def _open(self, secrets: list[str]) -> Engine:
        options = self._options
        if options.url_env is None and options.url_file is None:
            return self._place.engine
        value = read_secret(options.url_env) if options.url_env else read_secret_file(options.url_file or "")
        secrets.append(value)
        named = f"the variable {options.url_env}" if options.url_env else f"the file {options.url_file}"
        try:
            url = make_url(value)
        except SQLAlchemyError:
            raise SourceFailed(
                f"The value of {named} is not a database URL, for example postgresql://user@host/database."
            ) from None
        secrets.extend(find_secrets(url))
        if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
            return make_engine(value, application_name=APPLICATION_NAME, pool_size=1, max_overflow=0)
        return create_engine(url, poolclass=NullPool, hide_parameters=True)


@contextmanager
def streaming(connection: Connection, query: str) -> Iterator[tuple[list[str], Fetch]]:
    """Yield the names of the query's columns, and what fetches more of its rows from a cursor on the server.

    psycopg's own cursor, where it is the driver: to make rows of SQLAlchemy takes as long as to fetch them. No
    parameters are given, so that a percent sign or a colon is what it is.
    """
    if connection.dialect.driver == "psycopg":
        driver: Any = connection.connection.driver_connection
        with driver.cursor(name="vectormill_source") as cursor:
            set_json_loads(msgspec.json.decode, cursor)
            cursor.execute(query.encode())
            yield [column.name for column in cursor.description or ()], cursor.fetchmany
        return
    options = {"stream_results": True, "max_row_buffer": 1, "no_parameters": True}
    with connection.execution_options(**options).exec_driver_sql(query) as result:
        yield list(result.keys()), result.fetchmany


def find_columns(there: list[str], options: SqlOptions) -> list[int]:
    """Find the columns of key, texts and metadata. Raise SourceFailed naming the columns that there are."""
    for name in options.columns:
        if name not in there:
            raise SourceFailed(
                f"The query has no column {name!r}; its columns are {', '.join(map(repr, there))}."
            )
    return [there.index(name) for name in options.columns]


def strip(query: str) -> str:
    """Return the query as a cursor takes it, without a semicolon at its end."""
    return query.strip().rstrip("; \n\t")


def find_secrets(url: URL) -> list[str]:
    """Return the secrets in the URL, plain and percent-encoded, which must not be shown."""
    values = [url.password or "", *(str(value) for value in url.query.values())]
    return [form for value in values if value for form in (value, quote(value, safe=""), quote_plus(value))]


def describe_failure(error: Exception, secrets: list[str]) -> str:
    """Describe an error in the database's own words, without the secrets that open it."""
    if isinstance(error, ModuleNotFoundError):
        return f"The driver of the database is not installed: there is no Python package {error.name!r}."
    origin = getattr(error, "orig", None) or error
    words = " ".join(str(origin).split()) or type(origin).__name__
    for secret in sorted(secrets, key=len, reverse=True):
        words = words.replace(secret, "…")
    return f"The query cannot be read: {words.rstrip('.')}."
