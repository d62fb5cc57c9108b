"""Every statement about sources and pushes finds its rows by an index, on tables that are worth one."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

from sqlalchemy import Connection, Engine, TextClause, text

from vectormill.collections.generations import LIST_GENERATIONS
from vectormill.search.matches import walk_plan
from vectormill.sources import pushes, sources

FILL = (
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
KEPT = {"collection": "c77", "kind": "push", "options": "{}", "split": "{}", "name": "c77"}


# In one test, as filling the tables takes longer than all of them.
STATEMENTS: Final[Mapping[str, tuple[TextClause, dict[str, Any]]]] = {
    "save": (sources.SAVE_SOURCE, KEPT),
    "find": (sources.FIND_SOURCE, KEPT),
    "delete": (sources.DELETE_SOURCE, KEPT),
    "find the spec": (LIST_GENERATIONS, KEPT | {"states": ["live"]}),
    "begin a push": (pushes.BEGIN_RUN, RUN | KEPT),
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
        for statement in FILL:
            connection.execute(text(statement))
    with engine.connect() as connection:
        read = {
            name: find_tables_read(connection, statement, values)
            for name, (statement, values) in STATEMENTS.items()
        }
    assert read == {name: [] for name in STATEMENTS}


def find_tables_read(connection: Connection, statement: TextClause, values: dict[str, Any]) -> list[str]:
    named = {name: value for name, value in values.items() if f":{name}" in statement.text}
    explained = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement.text}"), named)
    plan = explained.scalar_one()[0]["Plan"]
    return [node["Relation Name"] for node in walk_plan(plan) if node["Node Type"] == "Seq Scan"]
