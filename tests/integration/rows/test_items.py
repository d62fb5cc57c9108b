"""Items of a collection in the database: what a deletion takes, and what comes back after it."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from psycopg import sql
from sqlalchemy import Connection, Engine, text

from tests.database import ask, execute
from tests.integration.chunks.test_lock_order import overlap
from tests.kinds import RECORDS, SCORES
from tests.protocol import SPEC, claim_next, complete, complete_on, submit, vector_of
from vectormill.collections.collections import find_generation
from vectormill.collections.generation_tables import UPSERT_ROWS, create_generation, name_parts
from vectormill.collections.items import DELETE_ROWS, delete_items, delete_rows, find_item
from vectormill.db.session import walk_plan
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import CollectionNotFound, ItemNotFound
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import Item
from vectormill.jobs.jobs import draw_seq

METADATA = b'{"page":7}'
OLD, NEW = Item("k", b"an old text", METADATA), Item("k", b"a new text", METADATA)
OTHER = Item("other", b"another text")
KINDS = [SPEC, SCORES, RECORDS]


def write(engine: Engine, *items: Item, spec: EncodingSpec = SPEC) -> None:
    submit(engine, items, collection="docs", spec=spec)
    complete(engine, claim_next(engine))


def hold(engine: Engine, *items: Item, spec: EncodingSpec = SPEC) -> Claim:
    """A job that a worker has in hand."""
    submit(engine, items, collection="docs", spec=spec)
    return claim_next(engine)


def delete(engine: Engine, *keys: str) -> int:
    return ask(engine, delete_items, "docs", keys)


def read_keys(engine: Engine) -> set[str]:
    """Of the rows and of their attributes."""
    with engine.connect() as connection:
        name = find_generation(connection, "docs").table_name
        rows = connection.execute(
            text(
                f"SELECT 'row ' || key FROM vectormill.{name}"
                f" UNION SELECT 'attributes ' || key FROM vectormill.{name}_attributes"
            )
        )
        return set(rows.scalars())


def test_an_item_is_read_with_all_that_is_kept_of_it(engine: Engine) -> None:
    write(engine, NEW, OTHER)
    item = ask(engine, find_item, "docs", "k", has_vector=True)
    other = ask(engine, find_item, "docs", "other")
    assert (item.key, item.metadata, item.content_hash) == ("k", {"page": 7}, NEW.content_hash())
    assert item.results is not None
    assert np.abs(item.results[0] - vector_of(NEW.text)).max() < 1e-3
    assert (other.metadata, other.text, other.results) == (None, None, None)


def test_what_is_not_there_is_not_found(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(CollectionNotFound):
        find_item(connection, "docs", "k")
    with pytest.raises(CollectionNotFound):
        delete(engine, "k")
    write(engine, OTHER)
    with engine.connect() as connection, pytest.raises(ItemNotFound):
        find_item(connection, "docs", "k")


def test_a_deletion_takes_the_row_and_its_attributes_and_nothing_else(engine: Engine) -> None:
    write(engine, NEW, OTHER)
    assert delete(engine, "k", "k", "never there") == 1
    assert read_keys(engine) == {"row other"}
    assert delete(engine, "k") == 0


def test_a_deletion_reaches_every_generation(engine: Engine) -> None:
    write(engine, NEW, OTHER)
    old = ask(engine, find_generation, "docs")
    execute(engine, "UPDATE vectormill.generations SET state = 'retired'")
    write_other_generation(engine)
    write(engine, NEW, OTHER)
    assert delete(engine, "k") == 1
    assert ask(engine, find_generation, "docs").id != old.id
    kept = execute(engine, f"SELECT key FROM vectormill.{old.table_name}").scalars().all()
    assert (list(kept), read_keys(engine)) == (["other"], {"row other"})


def write_other_generation(engine: Engine) -> None:
    with engine.begin() as connection:
        collection_id = connection.execute(text("SELECT id FROM vectormill.collections")).scalar_one()
        create_generation(connection, collection_id, "docs", SPEC, "live", {})


@pytest.mark.parametrize("spec", KINDS, ids=lambda spec: spec.task)
def test_a_job_submitted_before_a_deletion_does_not_bring_the_key_back_and_a_later_one_does(
    engine: Engine, spec: EncodingSpec
) -> None:
    write(engine, OLD, spec=spec)
    earlier = hold(engine, NEW, OTHER, spec=spec)
    assert delete(engine, "k") == 1
    complete(engine, earlier)
    assert read_keys(engine) == {"row other"}
    write(engine, NEW, spec=spec)
    assert read_keys(engine) == {"row other", "row k", "attributes k"}


Step = Callable[[Connection], Any]


@pytest.mark.parametrize("is_commit_first", [True, False])
def test_a_commit_and_a_deletion_that_overlap_leave_nothing_of_the_key(
    engine: Engine, is_commit_first: bool
) -> None:
    write(engine, OTHER)
    earlier = hold(engine, NEW)
    steps: list[Step] = [
        lambda connection: complete_on(connection, earlier),
        lambda connection: delete_items(connection, "docs", ["k"]),
    ]
    assert overlap(engine, *(steps if is_commit_first else steps[::-1]))
    assert read_keys(engine) == {"row other"}


def test_commits_into_one_collection_do_not_wait_for_each_other(engine: Engine) -> None:
    one, other = hold(engine, NEW), hold(engine, OTHER)
    assert not overlap(
        engine,
        lambda connection: complete_on(connection, one),
        lambda connection: complete_on(connection, other),
    )
    assert read_keys(engine) == {"row k", "attributes k", "row other"}


def test_rows_that_a_later_job_wrote_stay_where_those_of_earlier_ones_are_removed(engine: Engine) -> None:
    write(engine, OLD, OTHER)
    seq = ask(engine, draw_seq)
    write(engine, NEW)
    generation = ask(engine, find_generation, "docs")
    assert ask(engine, delete_rows, generation.id, ["k", "other"], [seq, seq]) == 1
    assert read_keys(engine) == {"row k", "attributes k"}


@pytest.mark.parametrize(
    ("spec", "columns", "values"),
    [
        (SPEC, "embedding", {"embedding": ["[0]"] * 100}),
        (
            SCORES,
            "score, label, numbers",
            {"score": [0.5] * 100, "label": ["a"] * 100, "numbers": ["[0]"] * 100},
        ),
        (RECORDS, "output", {"output": ["{}"] * 100}),
    ],
    ids=["vectors", "scores", "records"],
)
def test_deletions_and_commits_look_at_no_more_rows_than_they_have_keys(
    engine: Engine, spec: EncodingSpec, columns: str, values: dict[str, Any]
) -> None:
    write(engine, OTHER, spec=spec)
    with engine.begin() as connection:
        generation = find_generation(connection, "docs")
        connection.execute(
            text(f"""
            INSERT INTO vectormill.{generation.table_name} (key, content_hash, {columns}, job_seq)
            SELECT 'key ' || number, content_hash, {columns}, 1
              FROM vectormill.{generation.table_name}, generate_series(1, 20000) AS number
        """)
        )
        connection.execute(
            text(f"""
            INSERT INTO vectormill.{generation.table_name}_attributes (key, metadata, job_seq)
            SELECT key, '{{}}', 1 FROM vectormill.{generation.table_name}
        """)
        )
        connection.execute(
            text("""
            INSERT INTO vectormill.tombstones (collection_id, key, seq)
            SELECT collection_id, 'gone ' || number, 1 FROM vectormill.generations, generate_series(1, 20000) AS number
        """)
        )
        connection.execute(
            text("CREATE TEMP TABLE stage (ordinal int, content_hash bytea, embedding halfvec(8))")
        )
        for table in (generation.table_name, f"{generation.table_name}_attributes", "tombstones"):
            connection.execute(text(f"ANALYZE vectormill.{table}"))
        names = {"table": generation.table_name, "attributes": f"{generation.table_name}_attributes"}
        keys = [f"key {number}" for number in range(100)]
        deletion = explain(connection, DELETE_ROWS.format(**names), keys=keys, places=[5] * 100)
        composed = sql.SQL(UPSERT_ROWS).format(**name_parts(generation.id, spec))
        upsert = composed.as_string(connection.connection.driver_connection)
        upsert = re.sub(r"%\((\w+)\)s::(\"?\w+\"?(\[\])?)", r"CAST(:\1 AS \2)", upsert)
        values = {"keys": keys, "hashes": [b"hash"] * 100, "places": [5] * 100, **values}
        commit = explain(connection, upsert, first_place=5, collection_id=generation.collection_id, **values)
    for plan in (deletion, commit):
        assert "Seq Scan" not in [node["Node Type"] for node in plan], plan


def explain(connection: Connection, statement: str, **values: Any) -> list[Any]:
    (plan,) = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement}"), values).scalar_one()
    return list(walk_plan(plan["Plan"]))
