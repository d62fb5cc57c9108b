"""Following a table over HTTP and by the client, on a real API and a real Postgres."""

from collections.abc import Iterator

import httpx
import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, assert_problem
from tests.schedules import make_collection
from vectormill.client import Client


@pytest.fixture
def http(engine: Engine) -> Iterator[httpx.Client]:
    make_collection(engine, "docs")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE public.papers (id bigint, body text)"))
        connection.execute(
            text("""
            UPDATE vectormill.sources
               SET options = '{"query": "SELECT id, body FROM papers", "key": "id", "text": "body"}'""")
        )
    with api_client(engine) as client:
        yield client


def test_a_table_is_followed_looked_at_and_let_go(engine: Engine, http: httpx.Client) -> None:
    with Client(str(http.base_url)) as client:
        assert client.following("docs")["table"] is None
        followed = client.follow("docs")
        assert (followed["table"], followed["key_column"], followed["waiting_changes"]) == (
            "public.papers",
            "id",
            0,
        )
        with engine.begin() as connection:
            connection.execute(text("INSERT INTO papers VALUES (1, 'one'), (2, 'two')"))
        assert client.following("docs")["waiting_changes"] == 2
        assert client.unfollow("docs") == {
            "collection": "docs", "table": None, "key_column": None, "waiting_changes": 0, "lag_seconds": 0.0
        }  # fmt: skip


def test_what_cannot_be_followed_is_a_problem(engine: Engine, http: httpx.Client) -> None:
    path = "/v1/collections/docs/source/follow"
    assert_problem(http.post(path, json={"table": "nothing"}), 422, "invalid-option", "no table 'nothing'")
    assert_problem(http.post(path, json={"table": "a\x00"}), 422, "invalid-option", "is no name")
    assert_problem(http.post(path, json={"key_column": "x"}), 422, "invalid-option", "no column 'x'")
    assert_problem(http.post(path, json={"tables": "x"}), 422, "invalid-request", "unknown field `tables`")
    assert_problem(http.get("/v1/collections/none/source/following"), 404, "collection-not-found")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM vectormill.sources"))
    assert_problem(http.post(path, json={}), 404, "source-not-found")


def test_a_table_that_a_long_transaction_holds_is_not_waited_for_long(
    engine: Engine, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.sources.PATIENCE_SECONDS", 0.2)
    with engine.connect() as writing:
        writing.execute(text("INSERT INTO papers VALUES (1, 'one')"))
        answer = http.post("/v1/collections/docs/source/follow", json={})
        assert answer.status_code in (409, 503), answer.text
        writing.commit()
    assert http.post("/v1/collections/docs/source/follow", json={}).status_code == 200
