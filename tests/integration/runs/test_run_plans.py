"""Plans of statements about runs, sources and pushes on tables of real size: rows are looked up by an index."""

import re
from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from psycopg import sql
from sqlalchemy import Connection, Engine, TextClause, text

from tests.database import ask, execute
from tests.indexers import make_collection
from vectormill.collections.collections import LIST_GENERATIONS, find_generation
from vectormill.db.parameters import accept_arrays
from vectormill.db.session import driver_of, walk_plan
from vectormill.jobs.item import Item
from vectormill.runs.differences import (
    CLEAR_ATTRIBUTES,
    COMPARE_BATCH,
    COUNT_PAGES,
    LIST_MOVED,
    LIST_STAGED,
    LOAD_CHANGES,
    LOOK_UP_BY_INDEX,
    NOTE_VANISHED,
    WRITE_ATTRIBUTES,
    WRITE_MOVED,
    RunTables,
    make_moved,
    make_stage,
    note_moved,
    pack_rows,
)
from vectormill.runs.runs import (
    CLAIM_RUN,
    CREATE_RUN,
    FIRST_PHASES,
    LIST_RUNS_OF_COLLECTION,
    LIST_RUNS_OF_SCHEDULE,
    prune_runs,
)
from vectormill.schedules.schedules import COUNT_SCHEDULES
from vectormill.sources import pushes, sources

NUM_ROWS = 20_000
NUM_CHANGES = 5_000

FILL = """
    INSERT INTO {table} (key, content_hash, embedding, job_seq)
    SELECT 'k' || n, decode(md5(CAST(n AS text)), 'hex'), array_fill(0.5::real, ARRAY[8])::vector(8), 0
      FROM generate_series(1, %(rows)s::int) AS n
"""
FILL_ATTRIBUTES = """
    INSERT INTO {attributes} (key, metadata, metadata_hash, job_seq)
    SELECT 'k' || n, '{{}}', decode(md5(CAST(n AS text)), 'hex'), 0 FROM generate_series(1, %(rows)s::int) AS n
"""
FILL_SEEN = "INSERT INTO {seen} SELECT 'k' || n FROM generate_series(1, %(rows)s::int) AS n"
FILL_CHANGES = """
    INSERT INTO {changes} SELECT n, (ARRAY['n', 'c', 'm', 'v'])[1 + n %% 4], 'k' || n, 'text', '',
                                 decode(md5(CAST(n + 7 AS text)), 'hex')
      FROM generate_series(1, %(changes)s::int) AS n
"""


def plan_of(connection: Connection, stage: RunTables, statement: str, values: dict[str, object]) -> str:
    filled = sql.SQL("EXPLAIN (COSTS OFF) ") + stage.fill_in(statement)
    return "\n".join(row[0] for row in driver_of(connection).execute(filled, values))


def test_a_run_looks_rows_up_by_their_indexes(engine: Engine) -> None:
    make_collection(engine)
    with engine.begin() as connection:
        stage = RunTables(uuid4(), find_generation(connection, "docs"))
        make_stage(connection, stage)
        driver = driver_of(connection)
        for statement in (FILL, FILL_ATTRIBUTES, FILL_SEEN, FILL_CHANGES):
            driver.execute(stage.fill_in(statement), {"rows": NUM_ROWS, "changes": NUM_CHANGES})
        for name in ("table", "attributes", "seen", "changes"):
            driver.execute(stage.fill_in(f"ANALYZE {{{name}}}"))
        note_moved(connection, stage, NUM_CHANGES)
        driver.execute(stage.fill_in("ANALYZE {moved}"))
    table, attributes = stage.generation.table_name, f"{stage.generation.table_name}_attributes"
    ordinals = {
        "seq": 7,
        "ordinals": list(range(1, 400)),
        "collection_id": stage.generation.collection_id,
        "keep_text": True,
    }
    page = {"after": 100, "limit": 200, "kind": "m", "kinds": ["n", "c"], "seq": 7}
    with engine.connect() as connection:
        for statement in (LIST_STAGED, LOAD_CHANGES, LIST_MOVED):
            plan = plan_of(connection, stage, statement, page)
            assert "Index" in plan, plan
            assert "Seq Scan" not in plan, plan
            assert "Sort" not in plan, plan
        # The one statement that reads everything reads each table once.
        plan = plan_of(connection, stage, NOTE_VANISHED, {"num_seen": NUM_ROWS})
        assert "Anti Join" in plan, plan
        assert "Nested Loop" not in plan, plan
        driver_of(connection).execute(LOOK_UP_BY_INDEX)
        for statement in (WRITE_ATTRIBUTES, CLEAR_ATTRIBUTES, WRITE_MOVED):
            plan = plan_of(connection, stage, statement, ordinals)
            assert f"Seq Scan on {table}" not in plan, plan
            assert "Seq Scan on run_" not in plan, plan
        items = [Item(f"k{number}", b"text") for number in range(0, NUM_ROWS, 3)]
        accept_arrays(driver_of(connection))
        values = pack_rows(1, items).compared(7, keep_text=False)
        plan = plan_of(connection, stage, COMPARE_BATCH, values)
        assert f"Index Scan using {table}_pkey" in plan, plan
        assert f"Index Scan using {attributes}_pkey" in plan, plan
        assert "Seq Scan" not in plan, plan


# One of the 20,000 rows has vanished, and another one gets a changed text. Two rows are new: one has the text of the
# vanished row, the other that of a row that stays.
FEW_CHANGES = """
    INSERT INTO {changes} (ordinal, kind, key, content_hash, place)
    SELECT ordinal, kind, key, decode(md5(content), 'hex'), 7
      FROM (VALUES (1, 'n', 'renamed', '500'), (2, 'c', 'k600', '700'), (3, 'c', 'k700', '600'),
                   (4, 'n', 'copy', '800'), (5, 'v', 'k500', NULL)) AS change (ordinal, kind, key, content)
"""


def test_few_changes_find_their_vectors_without_reading_the_generation(engine: Engine) -> None:
    make_collection(engine)
    with engine.begin() as connection:
        stage = RunTables(uuid4(), find_generation(connection, "docs"))
        make_stage(connection, stage)
        driver = driver_of(connection)
        driver.execute(stage.fill_in(FILL), {"rows": NUM_ROWS})
        driver.execute(stage.fill_in("ANALYZE {table}"))
        driver.execute(stage.fill_in(FEW_CHANGES))
    table = stage.generation.table_name
    with engine.connect() as connection:
        driver = driver_of(connection)
        num_pages = driver.execute(COUNT_PAGES, {"name": f"vectormill.{table}"}).fetchone()
        assert num_pages is not None
        assert num_pages[0] > 200
        with connection.begin():
            note_moved(connection, stage, 4)
            moved = driver.execute(stage.fill_in("SELECT key FROM {moved} ORDER BY key")).fetchall()
            assert [row[0] for row in moved] == ["k600", "k700", "renamed"]
            driver.execute(stage.fill_in("DROP TABLE {moved}"))
            explained = sql.SQL("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) ") + stage.fill_in(
                make_moved(4, num_pages[0])
            )
            plan = "\n".join(row[0] for row in driver.execute(explained))
            assert f"Seq Scan on {table}" not in plan, plan
            buffers = re.search(r"Buffers: shared hit=(\d+)(?: read=(\d+))?", plan)
            assert buffers is not None, plan
            assert sum(int(number or 0) for number in buffers.groups()) < 60, plan
            # For as many texts as the pass over all rows is worth, copies of rows that stay are found too.
            driver.execute(stage.fill_in("DROP TABLE {moved}"))
            note_moved(connection, stage, -(-num_pages[0] // 16))
            moved = driver.execute(stage.fill_in("SELECT key FROM {moved} ORDER BY key")).fetchall()
            assert [row[0] for row in moved] == ["copy", "k600", "k700", "renamed"]


MAKE_RUNS = text("""
    INSERT INTO vectormill.runs (id, collection_id, kind, state, created_at, finished_at)
    SELECT gen_random_uuid(), collections.id, 'reindex', 'completed', now() - make_interval(secs => n), now()
      FROM vectormill.collections, generate_series(1, 5000) AS n
""")


def test_to_find_work_costs_nothing_however_many_runs_have_ended(engine: Engine) -> None:
    make_collection(engine)
    execute(engine, MAKE_RUNS)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE vectormill.runs"))
    with engine.connect() as connection:
        collection_id = find_generation(connection, "docs").collection_id
        claim = {"owner": "me", "lease_seconds": 30.0, "first_phases": FIRST_PHASES}
        plan = "\n".join(connection.execute(text(f"EXPLAIN (COSTS OFF) {CLAIM_RUN.text}"), claim).scalars())
        assert "ix_runs_open" in plan, plan
        assert "Seq Scan on runs" not in plan, plan
        page = {"before": "2100-01-01", "limit": 10, "collection_id": collection_id}
        listed = text(f"EXPLAIN (COSTS OFF) {LIST_RUNS_OF_COLLECTION.text}")
        plan = "\n".join(connection.execute(listed, page).scalars())
        assert "ix_runs_collection_id" in plan, plan
        assert "Sort" not in plan, plan


MAKE_SCHEDULED = text("""
    WITH made AS (
        INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap)
        SELECT 's' || n, (SELECT min(id) FROM vectormill.collections), '0 2 * * *', 'UTC', 'skip'
          FROM generate_series(1, 3) AS n
        RETURNING id, collection_id)
    INSERT INTO vectormill.runs (id, collection_id, kind, state, schedule_id, due_at, created_at, finished_at)
    SELECT gen_random_uuid(), made.collection_id, 'reindex', CASE WHEN n % 1000 = 0 THEN 'completed' ELSE 'skipped' END,
           made.id, now() - make_interval(mins => n), now() - make_interval(mins => n), now() - make_interval(mins => n)
      FROM made, generate_series(1, 5000) AS n
""")


def plan_among_many_runs(engine: Engine, statement: str, values: dict[str, object]) -> str:
    """How a statement is carried out where three schedules have made 5,000 runs each."""
    make_collection(engine)
    with engine.begin() as connection:
        connection.execute(MAKE_SCHEDULED)
        connection.execute(text("ANALYZE vectormill.runs"))
        return "\n".join(connection.execute(text(f"EXPLAIN (COSTS OFF) {statement}"), values).scalars())


def test_what_a_schedule_did_last_is_found_by_an_index_and_sorted_nowhere(engine: Engine) -> None:
    plan = plan_among_many_runs(engine, COUNT_SCHEDULES.text, {})
    assert "Index Scan Backward using ix_runs_schedule_id" in plan, plan
    assert "Sort" not in plan, plan


def test_the_runs_of_a_schedule_are_listed_by_an_index(engine: Engine) -> None:
    values: dict[str, object] = {"schedule_id": 1, "before": "2100-01-01", "limit": 10}
    plan = plan_among_many_runs(engine, LIST_RUNS_OF_SCHEDULE.text, values)
    assert "Index Scan Backward using ix_runs_schedule_id" in plan, plan
    assert "Sort" not in plan, plan


def test_runs_go_after_their_time_but_for_the_newest_and_the_newest_good_one(engine: Engine) -> None:
    make_collection(engine)
    execute(engine, MAKE_SCHEDULED)
    execute(engine, "UPDATE vectormill.runs SET state = 'failed' WHERE state = 'skipped'")
    execute(engine, "UPDATE vectormill.runs SET created_at = created_at - interval '1 year'")
    execute(engine, "UPDATE vectormill.runs SET finished_at = created_at")
    assert ask(engine, prune_runs, 366 * 86400, 20_000) < 15_000 - 6
    ask(engine, prune_runs, 300 * 86400, 20_000)
    kept = execute(engine, "SELECT schedule_id, state FROM vectormill.runs ORDER BY 1, 2").all()
    assert [tuple(row) for row in kept] == [
        (n, state) for n in (1, 2, 3) for state in ("completed", "failed")
    ]


FILL_SOURCES = (
    "INSERT INTO vectormill.collections (name) SELECT 'c' || n FROM generate_series(1, 20000) AS n",
    """
    INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state)
    SELECT id, '{"model": "m"}', '', 'live' FROM vectormill.collections
    """,
    "INSERT INTO vectormill.sources (collection_id, kind) SELECT id, 'push' FROM vectormill.collections",
    """
    INSERT INTO vectormill.runs (id, collection_id, kind, state)
    SELECT gen_random_uuid(), id, 'reindex', 'completed' FROM vectormill.collections
    """,
    """
    INSERT INTO vectormill.run_parts (run_id, seq, num_items, items)
    SELECT id, n, 1, '' FROM vectormill.runs, generate_series(1, 2) AS n
    """,
    "ANALYZE vectormill.collections, vectormill.generations, vectormill.sources, vectormill.runs, vectormill.run_parts",
)
RUN = {
    "id": str(uuid4()),
    "run_id": str(uuid4()),
    "after": 1,
    "seq": 1,
    "num_items": 1,
    "items": b"",
    "num_parts": 1,
}
NEW_RUN = {"state": "uploading", "spec": None, "schedule_id": None, "due_at": None, "error": None}
KEPT = {"collection": "c77", "kind": "push", "options": "{}", "split": "{}", "name": "c77"}


# In one test, as filling the tables takes longer than all of them.
SOURCE_STATEMENTS: Final[Mapping[str, tuple[TextClause, dict[str, Any]]]] = {
    "save": (sources.SAVE_SOURCE, KEPT),
    "find": (sources.FIND_SOURCE, KEPT),
    "delete": (sources.DELETE_SOURCE, KEPT),
    "find the spec": (LIST_GENERATIONS, KEPT | {"states": ["live"]}),
    "begin a push": (CREATE_RUN, RUN | KEPT | NEW_RUN),
    "give a sign of life": (pushes.GIVE_SIGN_OF_LIFE, RUN),
    "queue": (pushes.QUEUE_RUN, RUN),
    "fail": (pushes.FAIL_RUN, RUN | {"error": ""}),
    "delete parts": (pushes.DELETE_PARTS, RUN),
    "load a part": (pushes.LOAD_PART, RUN),
    "count items": (pushes.COUNT_ITEMS, RUN),
    "fail silent pushes": (pushes.FAIL_SILENT_PUSHES, {"timeout_seconds": 1, "error": ""}),
}


def test_no_statement_reads_a_table_from_end_to_end(engine: Engine) -> None:
    with engine.begin() as connection:
        for statement in FILL_SOURCES:
            connection.execute(text(statement))
    read = {
        name: ask(engine, find_tables_read, statement, values)
        for name, (statement, values) in SOURCE_STATEMENTS.items()
    }
    assert read == {name: [] for name in SOURCE_STATEMENTS}


def find_tables_read(connection: Connection, statement: TextClause, values: dict[str, Any]) -> list[str]:
    named = {name: value for name, value in values.items() if f":{name}" in statement.text}
    explained = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement.text}"), named)
    plan = explained.scalar_one()[0]["Plan"]
    return [node["Relation Name"] for node in walk_plan(plan) if node["Node Type"] == "Seq Scan"]
