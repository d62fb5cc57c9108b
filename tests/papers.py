"""A table of papers and a collection `docs` that follows it, for tests that run the follower stepwise."""

from typing import Any

from sqlalchemy import Engine, text

from indexer.follower import follow_collection
from tests.api_server import encode_waiting
from tests.database import ask, execute
from tests.protocol import SPEC, make_items, submit
from vectormill.db.parameters import to_jsonb
from vectormill.domain.encoding import EncodingSpec
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.sources.following import FollowedTable, follow_table

SET_SOURCE = text("""
    INSERT INTO vectormill.sources (collection_id, kind, options, split)
    SELECT id, 'sql', CAST(:options AS jsonb), CAST(:split AS jsonb) FROM vectormill.collections WHERE name = 'docs'
    ON CONFLICT (collection_id) DO UPDATE SET options = excluded.options, split = excluded.split
""")

QUERY = "SELECT id, body, lang FROM papers WHERE NOT is_hidden"


def run(engine: Engine, *statements: str) -> None:
    """Execute the statements in one transaction."""
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def set_source(
    engine: Engine, query: str = QUERY, split: dict[str, Any] | None = None, **options: Any
) -> None:
    values = {"query": query, "key": "id", "text": "body", "metadata": ["lang"]} | options
    execute(engine, SET_SOURCE, options=to_jsonb(values), split=to_jsonb(split or {}))


def follow(engine: Engine, **named: str) -> FollowedTable:
    return ask(engine, follow_table, "docs", **named)


def collection_id(engine: Engine) -> int:
    with engine.connect() as connection:
        found: int = connection.execute(
            text("SELECT id FROM vectormill.collections WHERE name = 'docs'")
        ).scalar_one()
        return found


def settle(engine: Engine) -> None:
    """Run the follower and encode waiting chunks until nothing is left to do."""
    for _ in range(20):
        has_more = follow_collection(engine, Settings(), Registry({}), collection_id(engine))
        if not encode_waiting(engine) and not has_more:
            return
    raise AssertionError("it never comes to rest")


def content(engine: Engine) -> dict[str, Any]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT key, metadata FROM docs"))
        return {row.key: row.metadata for row in rows}


def count_changes(engine: Engine) -> int:
    with engine.connect() as connection:
        number: int = connection.execute(text("SELECT count(*) FROM vectormill.source_changes")).scalar_one()
        return number


def make_papers(engine: Engine, spec: EncodingSpec = SPEC) -> None:
    """Make the table and a collection `docs` whose source queries it; the table is not followed yet."""
    run(
        engine,
        "CREATE TABLE public.papers"
        " (id bigint PRIMARY KEY, body text, lang text, is_hidden boolean NOT NULL DEFAULT false)",
    )
    submit(engine, make_items(1), collection="docs", spec=spec)
    encode_waiting(engine)
    run(engine, "DELETE FROM vectormill.generation_1")
    set_source(engine)
