"""Searches go on while a generation is built, swapped and rolled back: no error, and never rows of two generations."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, encoding_meanwhile
from tests.building import BITS, NEXT, build, encode_all, put, swap
from tests.database import ask, execute
from tests.indexed import search_collection
from tests.indexers import ListedSource, await_run, indexing, row
from tests.protocol import vector_of
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.collections.collections import find_generation
from vectormill.collections.generations import roll_back
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.encoding import EncodingSpec
from vectormill.runs.run import COMPLETED, REINDEX
from vectormill.runs.runs import create_run

OLD = [f"old{number}" for number in range(10)]
NEW = [f"new{number}" for number in range(10)]
QUERY = vector_of(b"query")
EVERY_SECONDS = 0.005


class Searcher:
    """Asks again and again for ten rows, which must be all of one generation; `found` are the generations in order."""

    def __init__(self, ask_once: Callable[[], list[str]]) -> None:
        self.ask_once = ask_once
        self.found: list[str] = []
        self.errors: list[str] = []
        self.num_asked = 0

    def run(self, is_over: threading.Event) -> None:
        while not is_over.wait(EVERY_SECONDS):
            try:
                keys = self.ask_once()
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                continue
            self.num_asked += 1
            generations = {key[:3] for key in keys}
            if len(keys) != 10 or len(generations) != 1:
                self.errors.append(f"a mixture: {sorted(keys)}")
            elif generations != set(self.found[-1:]):
                self.found += generations


@contextmanager
def searching(*searchers: Searcher) -> Iterator[None]:
    is_over = threading.Event()
    threads = [threading.Thread(target=searcher.run, args=(is_over,)) for searcher in searchers]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("spec", [NEXT, BITS], ids=["same column", "another column"])
def test_searches_and_queries_see_one_generation_whole_during_build_swap_and_rollback(
    engine: Engine, spec: EncodingSpec
) -> None:
    put(engine, *OLD)
    encode_all(engine)
    source = ListedSource([row(key, f"text {key}") for key in NEW], batch=1)

    def ask_api() -> list[str]:
        return [match["key"] for match in client.search("docs", embedding=QUERY.tolist(), limit=10)]

    def ask_view() -> list[str]:
        return list(execute(engine, "SELECT key FROM docs").scalars())

    with (
        api_client(engine) as http,
        Client(str(http.base_url)) as client,
        indexing(engine, source),
        encoding_meanwhile(engine),
    ):
        by_api, by_view = Searcher(ask_api), Searcher(ask_view)
        with searching(by_api, by_view):
            run = ask(engine, create_run, "docs", REINDEX, spec=spec)
            assert run is not None
            assert await_run(engine, run.id).state == COMPLETED
            wait_for(
                lambda: "new" in by_api.found and "new" in by_view.found, because="both found the new one"
            )
            for _ in range(4):
                act_in_short_locks(engine, lambda connection: roll_back(connection, "docs"))
                for searcher in (by_api, by_view):
                    enough = searcher.num_asked + 2  # one of them began after the swap
                    wait_for(lambda one=searcher, enough=enough: one.num_asked >= enough)  # type: ignore[misc]
    for searcher in (by_api, by_view):
        assert searcher.errors == []
        assert searcher.found[:2] == ["old", "new"]


def test_a_search_that_began_before_the_swap_ends_in_the_old_generation(engine: Engine) -> None:
    put(engine, *OLD)
    encode_all(engine)
    building = build(engine)
    before = ask(engine, find_generation, "docs")
    swap(engine, building)
    found = ask(engine, search_collection, before, QUERY, 10)
    assert {match["key"] for match in found["data"]} == set(OLD)
