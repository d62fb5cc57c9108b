"""Builds of indexes that are killed, cancelled, taken over or in a writer's way."""

import threading
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text

from indexer.indexing import build_indexes
from tests.indexed import (
    draw_vectors,
    execute,
    indexes_of,
    make_collection,
    names_of,
    start_run,
    wish,
)
from tests.waiting import wait_for
from vectormill.collections.collection import BUILDING, Generation
from vectormill.collections.indexes import APPLICATION_NAME, run_build
from vectormill.db.session import make_engine
from vectormill.domain.errors import RunCancelled

NUM_ROWS = 1200


class Slowly:
    """A build that cannot end: a transaction older than it, with a lock that a concurrent build waits for."""

    def __init__(self, engine: Engine, generation: Generation) -> None:
        self._connection = engine.connect()
        self._connection.execute(text(f"LOCK TABLE vectormill.{generation.table_name} IN ROW EXCLUSIVE MODE"))

    def end(self) -> None:
        self._connection.rollback()
        self._connection.close()


def wait_for_build(engine: Engine) -> int:
    """Until a build of ours waits for somebody; its backend."""
    query = text(
        "SELECT pid FROM pg_stat_activity WHERE application_name = :name AND wait_event_type = 'Lock'"
    )

    def pid() -> int | None:
        with engine.connect() as connection:
            return connection.execute(query, {"name": APPLICATION_NAME}).scalar()

    wait_for(lambda: pid() is not None)
    found = pid()
    assert found is not None
    return found


def test_a_build_whose_backend_is_killed_leaves_nothing_that_the_next_attempt_trips_over(
    engine: Engine,
) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    slowly = Slowly(engine, generation)
    failures: list[BaseException] = []

    def build() -> None:
        try:
            build_indexes(start_run(engine)[0], generation)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    pid = wait_for_build(engine)
    (invalid,) = indexes_of(engine, generation)
    assert not invalid.is_valid
    execute(engine, f"SELECT pg_terminate_backend({pid})")
    slowly.end()
    thread.join()
    assert isinstance(failures[0], psycopg.Error)
    build_indexes(start_run(engine)[0], generation)
    (index,) = indexes_of(engine, generation)
    assert index.is_valid


def test_what_a_killed_indexer_left_is_ended_and_removed_by_whoever_takes_the_run_over(
    engine: Engine,
) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    slowly = Slowly(engine, generation)
    url = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True, application_name=APPLICATION_NAME) as former:

        def build() -> None:
            with pytest.raises(psycopg.Error):
                former.execute(
                    f"CREATE INDEX CONCURRENTLY {generation.table_name}_hnsw_1 ON vectormill.{generation.table_name}"
                    " USING hnsw (embedding halfvec_cosine_ops)".encode()
                )

        thread = threading.Thread(target=build)
        thread.start()
        wait_for_build(engine)
        waiting = threading.Thread(target=build_indexes, args=(start_run(engine)[0], generation))
        waiting.start()
        thread.join(timeout=80)
        assert not thread.is_alive(), "the former build goes on"
        slowly.end()
        waiting.join()
    (index,) = indexes_of(engine, generation)
    assert index.is_valid


def test_a_cancelled_run_ends_its_build_at_once_and_leaves_no_index(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    slowly = Slowly(engine, generation)
    is_waiting = threading.Event()

    def check() -> None:
        with engine.connect() as connection:
            query = text("SELECT count(*) FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting%'")
            if connection.execute(query).scalar_one():
                is_waiting.set()
                slowly.end()
                raise RunCancelled

    with pytest.raises(RunCancelled):
        build_indexes(start_run(engine, check=check)[0], generation)
    assert is_waiting.is_set()
    assert names_of(engine, generation) == []


def test_on_a_building_generation_a_plain_build_gives_way_to_a_writer(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.indexing.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("vectormill.collections.indexes.PAUSE_SECONDS", 0.01)
    generation = replace(make_collection(engine, draw_vectors(8000, 128)), state=BUILDING)
    writing: list[threading.Thread] = []

    def check() -> None:  # is called at every look at the build
        if not writing:
            writing.append(threading.Thread(target=execute, args=(engine, delete)))
            writing[0].start()

    delete = f"DELETE FROM vectormill.{generation.table_name} WHERE key = '7'"
    wish(engine, index_options="""'{"ef_construction": 200, "workers": 0}'""")
    context, report = start_run(engine, check=check)
    build_indexes(context, generation)
    writing[0].join()
    assert "concurrently" in report["notices"][0]["notice"]
    (index,) = indexes_of(engine, generation)
    assert index.is_valid


def test_behind_a_pooler_nothing_is_set_in_a_session_that_is_somebody_elses(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    url = engine.url.update_query_dict({"pgbouncer": "true"}).render_as_string(hide_password=False)
    pooled = make_engine(url, application_name="test")
    context, report = start_run(pooled)
    build_indexes(context, generation)
    pooled.dispose()
    assert "a pooler does not let sessions" in report["notices"][0]
    assert indexes_of(engine, generation)[0].is_valid


def test_a_server_without_shared_memory_for_workers_builds_with_one_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    asked: list[str] = []

    def build(*arguments: Any) -> list[str]:
        asked.append(arguments[3].get("max_parallel_maintenance_workers", "-"))
        if len(asked) == 1:
            raise psycopg.errors.DiskFull("could not resize shared memory segment: No space left on device")
        return run_build(*arguments)

    monkeypatch.setattr("indexer.indexing.run_build", build)
    wish(engine, index_options="""'{"workers": 2, "memory_bytes": 134217728}'""")
    context, report = start_run(engine)
    build_indexes(context, generation)
    assert asked == ["2", "0"]
    assert "lacks shared memory" in report["notices"][0]
    assert indexes_of(engine, generation)[0].is_valid
