"""Index builds: a statement that may take hours, on a connection of its own, outside a transaction, and watched.

The session is closed at its end, so that nothing that was set in it stays. It needs Postgres itself, and no pooler.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from vectormill.db.attributes import attributes_name
from vectormill.db.vectors import table_name

logger = logging.getLogger(__name__)

# By which a build that outlived its indexer is known.
APPLICATION_NAME: Final = "vectormill index build"
PAUSE_SECONDS: Final = 1.0

# CREATE INDEX CONCURRENTLY waits for transactions that may last, such as an export, without being in anybody's way. The
# server ends a build whose indexer is gone, and not hours later when it would tell it the end.
SESSION: Final[Mapping[str, str]] = {
    "application_name": APPLICATION_NAME,
    "lock_timeout": "0",
    "statement_timeout": "0",
    "client_connection_check_interval": "5s",
}


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Where a build is. `num_waiting` sessions wait for locks that it holds."""

    phase: str
    tuples_done: int
    tuples_total: int
    blocks_done: int
    blocks_total: int
    num_waiting: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def share(self) -> float | None:
        """Of the phase, 0 to 1; None while it cannot be told."""
        done, total = self.blocks_done, self.blocks_total
        if not total:
            done, total = self.tuples_done, self.tuples_total
        return min(1.0, done / total) if total else None


READ_PROGRESS: Final = text("""
    SELECT phase, tuples_done, tuples_total, blocks_done, blocks_total,
           (SELECT count(*) FROM pg_locks
             WHERE NOT granted AND CAST(:pid AS integer) = ANY (pg_blocking_pids(pid))) AS num_waiting
      FROM pg_stat_progress_create_index WHERE pid = CAST(:pid AS integer)
""")


def read_progress(connection: Connection, pid: int) -> BuildProgress | None:
    """Of the build in that backend; None when it builds nothing now."""
    row = connection.execute(READ_PROGRESS, {"pid": pid}).one_or_none()
    return BuildProgress(**row._mapping) if row else None


READ_PROGRESS_OF_TABLES: Final = text("""
    SELECT phase, tuples_done, tuples_total, blocks_done, blocks_total, 0 AS num_waiting
      FROM pg_stat_progress_create_index
     WHERE relid IN (to_regclass(:vectors), to_regclass(:attributes))
     LIMIT 1
""")


def find_progress(connection: Connection, generation_id: int) -> BuildProgress | None:
    """Of a build on one of the generation's tables, whoever started it."""
    row = connection.execute(READ_PROGRESS_OF_TABLES, _tables(generation_id)).one_or_none()
    return BuildProgress(**row._mapping) if row else None


def run_build(
    engine: Engine,
    statement: sql.Composed,
    settings: Mapping[str, str],
    watch: Callable[[BuildProgress | None], None],
) -> list[str]:
    """Runs the statement to its end; the server's notices. `watch` is called every second, and what it raises ends it.

    Raises psycopg.Error. A concurrent build that ends early leaves an invalid index behind.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        connection.detach()  # its place in the pool is free again, and its session ends with the block
        notices: list[str] = []
        driver.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        failures: list[BaseException] = []

        def execute() -> None:
            try:
                for name, value in {**SESSION, **settings}.items():
                    driver.execute(sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)))
                driver.execute(statement)
            except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
                failures.append(error)

        thread = threading.Thread(target=execute, name="index build", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(PAUSE_SECONDS)
                if thread.is_alive():
                    with engine.connect() as watching:
                        progress = read_progress(watching, driver.info.backend_pid)
                    watch(progress)
        except BaseException:
            _cancel(engine, driver)
            thread.join()
            raise
        if failures:
            raise failures[0]
        return notices


CANCEL_BUILD: Final = text("SELECT pg_cancel_backend(CAST(:pid AS integer))")


def _cancel(engine: Engine, driver: "psycopg.Connection[Any]") -> None:
    """Ends what the session does; the session itself where Postgres cannot be asked."""
    try:
        with engine.begin() as connection:
            connection.execute(CANCEL_BUILD, {"pid": driver.info.backend_pid})
    except SQLAlchemyError as error:
        logger.warning("The build of an index could not be cancelled; its connection is closed: %s", error)
        with contextlib.suppress(OSError):
            driver.cancel()


# With a time-out: terminating is asynchronous, and what it held must be free before it is built anew.
END_FORMER_BUILDS: Final = text("""
    SELECT count(*) FILTER (WHERE pg_terminate_backend(activity.pid, 10000))
      FROM pg_stat_progress_create_index AS build
      JOIN pg_stat_activity AS activity ON activity.pid = build.pid
     WHERE build.relid IN (to_regclass(:vectors), to_regclass(:attributes))
       AND activity.application_name = :application_name
""")


def end_former_builds(engine: Engine, generation_id: int) -> int:
    """Ends builds whose indexer is gone, or lost the run: one run at a time works on a collection. How many."""
    with engine.begin() as connection:
        values = {**_tables(generation_id), "application_name": APPLICATION_NAME}
        return int(connection.execute(END_FORMER_BUILDS, values).scalar_one())


def drop_index(engine: Engine, name: str, *, is_live: bool, watch: Callable[[], None]) -> None:
    """Concurrently where searches would wait otherwise; no error when it is gone already."""
    statement = sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}" if is_live else "DROP INDEX IF EXISTS {}")
    run_build(
        engine,
        statement.format(sql.Identifier("vectormill", name)),
        {} if is_live else {"lock_timeout": "20s"},
        lambda _: watch(),
    )


def _tables(generation_id: int) -> dict[str, str]:
    return {
        "vectors": f"vectormill.{table_name(generation_id)}",
        "attributes": f"vectormill.{attributes_name(generation_id)}",
    }
