"""Searches that wait for Postgres hold up nothing else, and take no more connections than they are given."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from sqlalchemy import Engine, text

from api.app import POOL_OVERFLOW, POOL_SIZE
from api.limits.search_pool import SEARCH_CONNECTIONS
from tests.api_server import ITEMS, api_client, assert_problem, encode_waiting, many, submit
from tests.protocol import vector_of
from tests.waiting import wait_for
from vectormill.db.collections.collections import find_generation

SEARCH = "/v1/collections/docs/search"
NUM_SEARCHES = 20
QUERY = {"embedding": vector_of(b"text 4").tolist()}


def lock(engine: Engine) -> Callable[[], None]:
    """Makes every search of the collection wait, until the function that is given back is called."""
    connection = engine.connect()
    table = find_generation(connection, "docs").table_name
    connection.execute(text(f"LOCK TABLE vectormill.{table} IN ACCESS EXCLUSIVE MODE"))
    return connection.close


def count_waiting(engine: Engine) -> int:
    """Connections that wait for a lock."""
    with engine.connect() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return int(connection.execute(text(query)).scalar_one())


def test_twenty_slow_searches_hold_up_neither_probes_nor_submissions(engine: Engine) -> None:
    with api_client(engine) as client, ThreadPoolExecutor(NUM_SEARCHES) as threads:
        submit(client, many(10), collection="docs")
        encode_waiting(engine)
        let_go = lock(engine)
        try:
            searches = [threads.submit(client.post, SEARCH, json=QUERY) for _ in range(NUM_SEARCHES)]
            wait_for(
                lambda: count_waiting(engine) >= SEARCH_CONNECTIONS, because="the searches wait for the lock"
            )
            # A client of its own: that of the searches has its connections in use.
            with httpx.Client(base_url=client.base_url, timeout=30, trust_env=False) as other:
                assert other.get("/livez").status_code == 200
                assert other.get("/readyz").json()["postgres"] is True
                job = submit(other, ITEMS)
                assert other.get(f"/v1/jobs/{job['id']}").json()["state"] == "queued"
            assert count_waiting(engine) == SEARCH_CONNECTIONS
            assert not any(search.done() for search in searches)
        finally:
            let_go()
        for search in searches:
            assert search.result().json()["data"][0]["key"] == "k4"


def test_a_search_that_waits_too_long_for_others_is_told_so(engine: Engine) -> None:
    with (
        api_client(engine, search_timeout_seconds=0.5) as client,
        ThreadPoolExecutor(NUM_SEARCHES) as threads,
    ):
        submit(client, many(10), collection="docs")
        encode_waiting(engine)
        let_go = lock(engine)
        try:
            answers = list(threads.map(lambda _: client.post(SEARCH, json=QUERY), range(NUM_SEARCHES)))
        finally:
            let_go()
    for answer in answers:
        assert_problem(answer, 503, "search-timeout", "0.5 s")
        assert answer.headers["retry-after"]
    assert any("for those before it" in answer.json()["detail"] for answer in answers)


def test_an_api_process_has_ten_connections_at_the_most() -> None:
    assert POOL_SIZE + POOL_OVERFLOW + SEARCH_CONNECTIONS == 10
