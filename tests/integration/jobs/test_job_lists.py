"""Lists of jobs by collection and day read about as many jobs as they show, wherever these are among all."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from tests.protocol import make_items, submit
from vectormill.jobs.jobs import list_jobs

NUM_JOBS = 20_000
NUM_SHOWN = 10
# The oldest jobs are those of the collection `rare`; one is submitted an hour.
FILL = text("""
    INSERT INTO vectormill.jobs
        (id, state, model, spec, generation_id, priority, created_at, finished_at, num_items, num_done, num_chunks)
    SELECT gen_random_uuid(), 'completed', model, spec,
           CASE WHEN n < 15 THEN CAST(:rare AS bigint) ELSE CAST(:busy AS bigint) END, 5,
           now() - make_interval(hours => :num_jobs - n), now(), 1, 1, 1
      FROM vectormill.jobs, generate_series(1, :num_jobs) AS n WHERE idempotency_key = 'first'
     ORDER BY n
""")
GENERATIONS = text("""
    SELECT collections.name, generations.id FROM vectormill.generations
      JOIN vectormill.collections ON collections.id = generations.collection_id
""")


def count_read(connection: Connection, **selection: Any) -> tuple[int, int]:
    """Return how many jobs a list shows, and how many rows its plan has read and not wanted."""
    asked: list[tuple[str, Any]] = []

    def note(_: Any, cursor: Any, statement: str, parameters: Any, *rest: Any) -> None:
        asked.append((statement, parameters))

    event.listen(connection, "before_cursor_execute", note)
    num_shown = len(list_jobs(connection, limit=NUM_SHOWN, **selection))
    event.remove(connection, "before_cursor_execute", note)
    statement, parameters = asked[-1]
    lines = connection.exec_driver_sql(f"EXPLAIN (ANALYZE) {statement}", parameters).scalars().all()
    return num_shown, sum(int(line.split(":")[1]) for line in lines if "Rows Removed by" in line)


def test_a_list_by_collection_or_day_does_not_read_all_newer_jobs(engine: Engine) -> None:
    for name in ("busy", "rare", "empty"):
        submit(engine, make_items(1), collection=name, idempotency_key="first" if name == "busy" else name)
    with engine.begin() as connection:
        generations = {row.name: row.id for row in connection.execute(GENERATIONS)}
        values = {"rare": generations["rare"], "busy": generations["busy"], "num_jobs": NUM_JOBS}
        connection.execute(FILL, values)
        connection.execute(text("DELETE FROM vectormill.jobs WHERE idempotency_key = 'empty'"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE vectormill.jobs"))
    long_ago = datetime.now(UTC) - timedelta(hours=NUM_JOBS // 2)
    day = {"since": long_ago, "until": long_ago + timedelta(hours=NUM_SHOWN)}
    with engine.connect() as connection:
        for selection, num_shown in (
            ({"collection": "rare"}, NUM_SHOWN),
            ({"collection": "rare", "state": "completed"}, NUM_SHOWN),
            ({"collection": "empty"}, 0),
            ({"collection": "none"}, 0),
            ({"until": long_ago}, NUM_SHOWN),
            (day, NUM_SHOWN),
            ({**day, "state": "completed"}, NUM_SHOWN),
            ({**day, "collection": "busy"}, NUM_SHOWN),
        ):
            found, num_removed = count_read(connection, **selection)
            assert found == num_shown, selection
            assert num_removed < 100, selection
