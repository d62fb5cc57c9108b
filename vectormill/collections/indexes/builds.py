"""Index builds: a statement that may take hours, on a connection of its own, outside a transaction, and watched.

The session is closed at its end, so that nothing that was set in it stays.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import psycopg
from psycopg import sql
from sqlalchemy import Connection, Engine, text

from vectormill.collections.indexes.indexes import hnsw_prefix
from vectormill.collections.rows.attributes import attributes_name
from vectormill.collections.rows.generation_tables import table_name

logger = logging.getLogger(__name__)

# By which a build that outlived its indexer is known.
APPLICATION_NAME: Final = "vectormill index build"
PAUSE_SECONDS: Final = 1.0
CANCEL_SECONDS: Final = 10.0

POOLED: Final = (
    "Built with the server's own maintenance_work_mem and workers, for a pooler lets no session set them."
)

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
    """The progress of a build. `num_waiting` sessions wait for locks that it holds."""

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
        """Return the share of the phase that is done, 0 to 1; None while it cannot be told."""
        done, total = self.blocks_done, self.blocks_total
        if not total:
            done, total = self.tuples_done, self.tuples_total
        return min(1.0, done / total) if total else None


# By its table and not by its backend, whose number a pooler does not tell.
READ_PROGRESS: Final = text("""
    SELECT build.phase, build.tuples_done, build.tuples_total, build.blocks_done, build.blocks_total,
           (SELECT count(*) FROM pg_locks
             WHERE NOT granted AND build.pid = ANY (pg_blocking_pids(pg_locks.pid))) AS num_waiting
      FROM pg_stat_progress_create_index AS build
     WHERE build.relid IN (to_regclass(:vectors), to_regclass(:attributes))
     LIMIT 1
""")


def find_progress(connection: Connection, generation_id: int) -> BuildProgress | None:
    """Find the progress of a build on one of the generation's tables, whoever began it; None when none is
    under way.
    """
    row = connection.execute(READ_PROGRESS, _tables(generation_id)).one_or_none()
    return BuildProgress(**row._mapping) if row else None


def run_build(
    engine: Engine,
    generation_id: int,
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
        # A pooler in transaction mode would set it for others, and not for us.
        chosen = {} if driver.prepare_threshold is None else {**SESSION, **settings}
        notices = [] if chosen else [POOLED]
        driver.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
        failures: list[BaseException] = []

        def execute() -> None:
            try:
                for name, value in chosen.items():
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
                        progress = find_progress(watching, generation_id)
                    watch(progress)
        except BaseException:
            _cancel(driver)
            thread.join()
            raise
        if failures:
            raise failures[0]
        return notices


def _cancel(driver: "psycopg.Connection[Any]") -> None:
    """Ends what the session does, as pg_cancel_backend would; a server ends a build whose client is gone, too."""
    try:
        driver.cancel_safe(timeout=CANCEL_SECONDS)
    except psycopg.Error as error:
        logger.warning("The build of an index could not be cancelled; its connection is closed: %s", error)
        driver.close()


# With a time-out: terminating is asynchronous, and what it held must be free before it is built anew.
END_FORMER_BUILDS: Final = text("""
    SELECT count(*) FILTER (WHERE pg_terminate_backend(activity.pid, 10000))
      FROM pg_stat_progress_create_index AS build
      JOIN pg_stat_activity AS activity ON activity.pid = build.pid
      LEFT JOIN pg_class AS class ON class.oid = build.index_relid
     WHERE build.relid IN (to_regclass(:vectors), to_regclass(:attributes))
       AND (activity.application_name = :application_name OR starts_with(class.relname, :prefix))
""")


def end_former_builds(engine: Engine, generation_id: int) -> int:
    """Ends builds whose indexer is gone, or lost the run: one run at a time works on a collection. How many."""
    with engine.begin() as connection:
        values = {
            **_tables(generation_id),
            "application_name": APPLICATION_NAME,
            "prefix": hnsw_prefix(generation_id),
        }
        return int(connection.execute(END_FORMER_BUILDS, values).scalar_one())


def drop_index(
    engine: Engine, generation_id: int, name: str, *, is_live: bool, watch: Callable[[], None]
) -> None:
    """Concurrently where searches would wait otherwise; no error when it is gone already."""
    statement = sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}" if is_live else "DROP INDEX IF EXISTS {}")
    run_build(
        engine,
        generation_id,
        statement.format(sql.Identifier("vectormill", name)),
        {} if is_live else {"lock_timeout": "20s"},
        lambda _: watch(),
    )


def _tables(generation_id: int) -> dict[str, str]:
    return {
        "vectors": f"vectormill.{table_name(generation_id)}",
        "attributes": f"vectormill.{attributes_name(generation_id)}",
    }
