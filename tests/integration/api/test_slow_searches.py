"""Searches that wait for Postgres hold up nothing else, and take no more connections than they are given."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from sqlalchemy import Engine, event, text

from api.searches import SEARCH_CONNECTIONS, SearchPool
from tests.api_server import ITEMS, api_client, assert_problem, delete, encode_waiting, many, submit
from tests.database import ask
from tests.protocol import vector_of
from tests.searched import make_search_pool
from tests.waiting import wait_for
from vectormill.collections.collections import find_generation
from vectormill.search.matches import MOST_ROWS
from vectormill.search.search import Deadline, Search

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
            # So many rows that each is run by itself.
            wide = {**QUERY, "limit": MOST_ROWS + 1}
            answers = list(threads.map(lambda _: client.post(SEARCH, json=wide), range(NUM_SEARCHES)))
        finally:
            let_go()
    for answer in answers:
        assert_problem(answer, 503, "search-timeout", "0.5 s")
        assert answer.headers["retry-after"]
    assert any("because of earlier searches" in answer.json()["detail"] for answer in answers)


def test_a_client_that_leaves_ends_its_search(engine: Engine) -> None:
    with api_client(engine) as client:
        submit(client, many(10), collection="docs")
        encode_waiting(engine)
        let_go = lock(engine)
        try:
            patience = httpx.Timeout(30, read=0.3)
            with httpx.Client(base_url=client.base_url, timeout=patience, trust_env=False) as leaving:
                for _ in range(SEARCH_CONNECTIONS + 1):  # more than run at once
                    with pytest.raises(httpx.ReadTimeout):
                        leaving.post(SEARCH, json=QUERY)
            wait_for(lambda: count_waiting(engine) == 0, because="the statements are cancelled")
        finally:
            let_go()
        assert client.post(SEARCH, json=QUERY).json()["data"][0]["key"] == "k4"


def test_a_search_sees_the_generation_that_is_live_when_it_comes(engine: Engine) -> None:
    with api_client(engine) as client:
        for key in ("before", "after"):
            submit(client, [{"key": key, "text": "text 4"}], collection="docs")
            encode_waiting(engine)
            assert client.post(SEARCH, json=QUERY).json()["data"][0]["key"] == key
            assert delete(client, "/v1/collections/docs").status_code == 204
            assert_problem(client.post(SEARCH, json=QUERY), 404, "collection-not-found")


def test_searches_that_come_together_and_cost_alike_share_a_statement(engine: Engine) -> None:
    with api_client(engine) as client:
        submit(client, many(30), collection="docs")
        encode_waiting(engine)
    generation = ask(engine, find_generation, "docs")
    texts = [f"text {number}" for number in range(30)]
    wanted = [(Search(limit=1 if number % 2 else 200), text) for number, text in enumerate(texts)]
    statements: list[str] = []
    num_begun = 0

    def count(connection: object) -> None:
        nonlocal num_begun
        num_begun += 1

    async def find_all(pool: SearchPool) -> list[str]:
        gone = asyncio.ensure_future(pool.find(generation, [(Search(), vector_of(b"gone"))], Deadline(30)))
        found = [
            pool.find(generation, [(search, vector_of(text.encode()))], Deadline(30))
            for search, text in wanted
        ]
        gathered = asyncio.gather(*found)
        await asyncio.sleep(0)
        gone.cancel()
        return [nearest["data"][0]["key"] for (nearest,) in await gathered]

    pool = make_search_pool(engine)
    event.listen(engine, "begin", count)
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    assert asyncio.run(find_all(pool)) == [f"k{number}" for number in range(30)]
    assert 15 < num_begun < 15 + 10  # the 15 with long pages each by itself, the others together
    own = [
        statement for statement in statements if "nullif(current_setting('hnsw.ef_search'" not in statement
    ]
    assert len(statements) - len(own) <= SEARCH_CONNECTIONS, "a setting is read more than once per connection"
    assert len(own) <= 4 * num_begun  # settings, generation, plan and rows, of however many searches
    pool.close()


def test_what_cheap_searches_take_is_learned_and_more_of_them_are_run_together(engine: Engine) -> None:
    with api_client(engine) as client:
        submit(client, many(10), collection="docs")
        encode_waiting(engine)
    generation = ask(engine, find_generation, "docs")
    num_begun = 0

    def count(connection: object) -> None:
        nonlocal num_begun
        num_begun += 1

    async def count_begun(pool: SearchPool, num_searches: int, seconds_each: float) -> int:
        nonlocal num_begun
        num_begun = 0
        pool.seconds_each[generation.id] = seconds_each
        asked = [
            pool.find(generation, [(Search(), vector_of(b"text 4"))], Deadline(30))
            for _ in range(num_searches)
        ]
        found = await asyncio.gather(*asked)
        assert all(nearest["data"][0]["key"] == "k4" for (nearest,) in found)
        return num_begun

    async def count_twice(pool: SearchPool) -> tuple[int, int]:
        return await count_begun(pool, 30, 10.0), await count_begun(pool, 30, 0.0001)

    pool = make_search_pool(engine)
    event.listen(engine, "begin", count)
    num_slow, num_fast = asyncio.run(count_twice(pool))
    pool.close()
    assert num_slow >= SEARCH_CONNECTIONS  # a share for each connection
    assert num_fast == 1
    assert pool.seconds_each[generation.id] < 10
