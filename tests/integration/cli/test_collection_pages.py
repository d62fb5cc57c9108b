"""A collection described: its numbers against what is really there, over HTTP, by the client and for a person."""

from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, encode_waiting, many, submit
from tests.database import execute


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        submit(client, many(300), collection="docs")
        encode_waiting(engine)
        yield client


def test_the_numbers_of_a_collection_are_those_of_its_tables(api: httpx.Client, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
        table = connection.execute(text("SELECT id FROM vectormill.generations")).scalar_one()
        whole = connection.execute(
            text(f"SELECT pg_total_relation_size('vectormill.generation_{table}')")
        ).scalar_one()
    found = api.get("/v1/collections/docs", params={"exact": True}).json()
    assert (found["num_rows"], found["exact_rows"]) == (300, 300)
    assert api.get("/v1/collections/docs").json()["exact_rows"] == 300, "a small table is counted unasked"
    (generation,) = found["generations"]
    assert generation["table_bytes"] + generation["index_bytes"] == whole
    assert found["num_bytes"] == whole + generation["attribute_bytes"]
    assert (generation["state"], generation["num_rows"], found["model"]) == ("live", 300, "all-MiniLM-L6-v2")
    assert generation["fingerprint"] == found["fingerprint"]
    assert (found["keep_text"], found["language"], found["source"], found["runs"]) == (
        False,
        "simple",
        None,
        [],
    )
    (listed,) = api.get("/v1/collections").json()["data"]
    assert listed["num_rows"] == 300
    assert {name: value for name, value in found.items() if name in listed} == listed
    assert listed["kind"] == "vectors"


def test_an_estimate_is_near_before_and_after_postgres_has_counted(api: httpx.Client, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    submit(api, [{"key": f"more{n}", "text": f"more {n}"} for n in range(900)], collection="docs")
    encode_waiting(engine)
    assert api.get("/v1/collections/docs").json()["num_rows"] == pytest.approx(1200, rel=0.25)


def test_a_job_that_writes_into_a_collection_is_on_its_page_until_it_ends(
    api: httpx.Client, engine: Engine
) -> None:
    job = submit(api, [{"key": "late", "text": "late"}], collection="docs")
    (open_job,) = api.get("/v1/collections/docs").json()["open_jobs"]
    assert (open_job["id"], open_job["num_items"], open_job["num_done"]) == (job["id"], 1, 0)
    encode_waiting(engine)
    assert api.get("/v1/collections/docs").json()["open_jobs"] == []


def test_an_index_is_on_the_page_with_its_state_and_bytes(api: httpx.Client, engine: Engine) -> None:
    table = execute(engine, "SELECT id FROM vectormill.generations").scalar_one()
    execute(
        engine,
        f"CREATE INDEX mine ON vectormill.generation_{table} USING hnsw (embedding halfvec_cosine_ops)",
    )
    (generation,) = api.get("/v1/collections/docs").json()["generations"]
    (index,) = [index for index in generation["indexes"] if index["method"] == "hnsw"]
    assert (index["name"], index["state"]) == ("mine", "ready")
    assert 0 < index["num_bytes"] <= generation["index_bytes"]
