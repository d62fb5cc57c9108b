"""The SQL of docs/COLLECTIONS.md, run as it stands there; and what a scrape says of collections."""

import re
from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, encode_waiting, submit
from tests.architecture.sources import DOCS

STATEMENT = re.compile(r"^```sql\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ITEMS = [
    {"key": name, "text": f"about {name}", "metadata": {"lang": "en"}}
    for name in ("time-zones", "dates", "files", "drafts")
]


@pytest.fixture
def api(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        submit(client, ITEMS, collection="docs")
        encode_waiting(engine)
        yield client


def test_the_statements_of_the_page_join_a_table_with_a_collection(api: httpx.Client, engine: Engine) -> None:
    nearest, missing = STATEMENT.findall((DOCS / "COLLECTIONS.md").read_text(encoding="utf-8"))
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE articles (slug text PRIMARY KEY, title text, published boolean)")
        )
        connection.execute(
            text(
                "INSERT INTO articles SELECT slug, upper(slug), slug <> 'drafts'"
                " FROM unnest(ARRAY['time-zones', 'dates', 'files', 'drafts', 'new']) AS slug"
            )
        )
        rows = connection.execute(text(nearest)).all()
        assert tuple(rows[0]) == ("TIME-ZONES", "en")
        assert {row.title for row in rows} == {"TIME-ZONES", "DATES", "FILES"}
        assert [row.slug for row in connection.execute(text(missing))] == ["new"]


def test_a_scrape_tells_rows_bytes_and_staleness_of_collections(api: httpx.Client, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT").execute(text("ANALYZE"))
    scraped = api.get("/metrics").text
    assert 'vectormill_collection_rows{collection="docs"} 4.0' in scraped
    assert 'vectormill_collection_bytes{collection="docs"}' in scraped
    assert "vectormill_collection_stale_seconds{" not in scraped
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO vectormill.runs (id, collection_id, kind, state, finished_at)"
                " SELECT gen_random_uuid(), id, 'reindex', 'completed', now() - interval '1 hour'"
                " FROM vectormill.collections"
            )
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
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO vectormill.runs"
                " (id, collection_id, kind, state, finished_at, num_seen, num_failed, job_id)"
                " SELECT gen_random_uuid(), id, 'reindex', 'completed_with_errors', now(), 5, 1, :job"
                " FROM vectormill.collections"
            ),
            {"job": job["id"]},
        )
    coverage = api.get("/v1/collections/docs").json()["coverage"]
    assert (coverage["num_seen"], coverage["num_failed"], coverage["share"]) == (5, 1, 0.8)
    assert coverage["failed_keys"] == ["blank"]
