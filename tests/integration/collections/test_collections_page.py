"""The joins that the pages show, run as they stand there; and what a scrape says of collections."""

import re
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, encode_waiting, submit
from tests.building import encode_all
from tests.database import ask, execute
from tests.docs.pages import find_blocks, find_pages
from tests.kinds import RECORDS, SCORES
from tests.protocol import SPEC
from tests.protocol import submit as submit_items
from vectormill.collections.descriptions import list_collection_rows, list_summaries
from vectormill.jobs.item import Item
from vectormill.runs.runs import prune_runs

JOINS = [
    pytest.param(statement, id=f"{block.place}, {number}")
    for page in find_pages()
    for block in find_blocks(page)
    if block.language == "sql"
    for number, statement in enumerate(block.code.split(";"), start=1)
    if " JOIN " in statement and "LATERAL" not in statement
]
ITEMS = [
    {"key": str(number), "text": f"about {number}", "metadata": {"lang": "en"}} for number in range(41, 45)
]
# The tables of an application whose rows 41 to 44 have results, and row 45 none.
TABLES = """
CREATE SCHEMA app;
CREATE TABLE app.articles AS SELECT id::{kind}, 'title ' || id AS title, DATE '2026-02-01' AS published
  FROM generate_series(41, 45) AS id;
CREATE TABLE app.tickets AS SELECT id, 'question' AS question, 'answer' AS answer FROM app.articles;
CREATE TABLE app.news AS SELECT id, 'body' AS body, 'sport' AS section FROM app.articles;
SET LOCAL search_path = app, public;
"""


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        submit(client, ITEMS, collection="docs")
        encode_waiting(engine)
        yield client


@pytest.mark.parametrize("statement", JOINS)
def test_a_join_of_a_page_finds_rows_of_a_table_with_numeric_ids_and_with_ids_of_text(
    statement: str, engine: Engine
) -> None:
    items = [Item(str(number), b"text", b'{"lang": "en"}') for number in range(41, 45)]
    for name, spec in (("docs", SPEC), ("tickets", SPEC), ("answers", SCORES), ("entities", RECORDS)):
        submit_items(engine, items, collection=name, spec=spec)
    encode_all(engine)
    for kind in ("bigint", "text"):
        with engine.connect() as connection:  # rolled back at the end
            connection.exec_driver_sql(TABLES.format(kind=kind))
            shown = statement if kind == "bigint" else statement.replace("::bigint", "")
            shown = shown.replace("机构", "人物")  # a type that every text has here
            found = connection.exec_driver_sql(shown, execution_options={"no_parameters": True}).all()
        ids = {str(value) for row in found for value in row} & {str(number) for number in range(41, 46)}
        if "LEFT JOIN" in statement:
            assert ids == {"45"}, kind
        else:
            assert 3 <= len(found) <= 4, kind


def test_a_scrape_tells_rows_bytes_and_staleness_of_collections(api: httpx.Client, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    scraped = api.get("/metrics").text
    assert 'vectormill_collection_rows{collection="docs"} 4.0' in scraped
    assert 'vectormill_collection_bytes{collection="docs"}' in scraped
    assert "vectormill_collection_stale_seconds{" not in scraped
    execute(
        engine,
        "INSERT INTO vectormill.runs (id, collection_id, kind, state, finished_at)"
        " SELECT gen_random_uuid(), id, 'reindex', 'completed', now() - interval '1 hour'"
        " FROM vectormill.collections",
    )
    staleness = re.search(r'stale_seconds{collection="docs"} (\S+)', api.get("/metrics").text)
    assert staleness is not None
    assert 3600 <= float(staleness[1]) < 3700
    found = api.get("/v1/collections/docs").json()
    assert found["coverage"]["share"] == 1.0
    assert 3600 <= found["staleness"]["stale_seconds"] < 3700


def test_coverage_names_what_failed_in_the_last_complete_run(api: httpx.Client, engine: Engine) -> None:
    job = submit(api, [*ITEMS, {"key": "blank", "text": " "}], collection="docs")
    encode_waiting(engine)
    execute(
        engine,
        "INSERT INTO vectormill.runs"
        " (id, collection_id, kind, state, finished_at, num_seen, num_failed, job_id)"
        " SELECT gen_random_uuid(), id, 'reindex', 'completed_with_errors', now(), 5, 1, :job"
        " FROM vectormill.collections",
        job=job["id"],
    )
    coverage = api.get("/v1/collections/docs").json()["coverage"]
    assert (coverage["num_seen"], coverage["num_failed"], coverage["share"]) == (5, 1, 0.8)
    assert coverage["failed_keys"] == ["blank"]


def test_the_run_of_a_rollback_counts_neither_as_coverage_nor_as_a_re_index(
    api: httpx.Client, engine: Engine
) -> None:
    add = (
        "INSERT INTO vectormill.runs (id, collection_id, kind, state, finished_at, num_seen, options)"
        " SELECT gen_random_uuid(), id, 'reindex', 'completed', now() - make_interval(secs => :age), :seen,"
        " CAST(:options AS jsonb) FROM vectormill.collections"
    )
    execute(engine, add, age=3600, seen=5, options="{}")
    execute(engine, add, age=60, seen=2, options='{"carry_from": 1}')
    found = api.get("/v1/collections/docs").json()
    assert found["coverage"]["num_seen"] == 5
    assert found["staleness"]["stale_seconds"] >= 3600
    with engine.connect() as connection:
        (row,) = list_collection_rows(connection, after=None, limit=10)
        assert list_summaries(connection, [row.id])[row.id].num_seen == 5
    assert ask(engine, prune_runs, 0.0, 10) == 0  # both are the newest of their kind
