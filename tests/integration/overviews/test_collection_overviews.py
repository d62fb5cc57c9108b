"""How collections stand in a list, what is built in one, and rows of it by chance, on a real Postgres."""

import pytest
from sqlalchemy import Connection, Engine, text

from tests.database import ask
from tests.indexed import draw_vectors, execute, make_collection
from tests.protocol import make_items, submit
from tests.schedules import add_source
from vectormill.collections.descriptions import CollectionSummary, list_open_runs, list_summaries
from vectormill.runs.runs import create_run


def standing_of(connection: Connection, collection_id: int) -> CollectionSummary:
    return list_summaries(connection, [collection_id])[collection_id]


def test_a_collection_that_follows_nothing_has_neither_coverage_nor_run(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(20))
    found = ask(engine, standing_of, generation.collection_id)
    assert found == CollectionSummary(
        generation.collection_id, None, None, None, None, None, None, None, False, None, None
    )
    assert found.coverage is None


def test_a_list_tells_coverage_lag_index_and_what_goes_on(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(20))
    add_source(engine, "docs")
    with engine.begin() as connection:
        ended = create_run(connection, "docs", "reindex")
        assert ended is not None
        connection.execute(
            text("""
                UPDATE vectormill.runs SET state = 'completed_with_errors', num_seen = 200, num_failed = 3,
                       finished_at = now() WHERE id = :id
            """),
            {"id": ended.id},
        )
    with engine.begin() as connection:
        create_run(connection, "docs", "check")
        for key in ("a", "b"):
            connection.execute(
                text("INSERT INTO vectormill.source_changes (collection_id, key) VALUES (:id, :key)"),
                {"id": generation.collection_id, "key": key},
            )
    execute(
        engine,
        f"CREATE INDEX ON vectormill.{generation.table_name} USING hnsw (embedding halfvec_cosine_ops)",
    )
    with engine.connect() as connection:
        found = standing_of(connection, generation.collection_id)
        (open_run,) = list_open_runs(connection, generation.collection_id)
        oldest = connection.execute(
            text("SELECT min(changed_at) FROM vectormill.source_changes")
        ).scalar_one()
    assert found.coverage == pytest.approx(0.985)
    assert found.oldest_change_at == oldest
    assert (found.run_id, found.run_kind, found.run_state) == (open_run.id, "check", "queued")
    assert (found.index_state, found.source_kind, found.is_building) == ("ready", "sql", False)
    assert open_run.share is None


def test_an_open_run_tells_how_far_its_job_is(engine: Engine) -> None:
    job = submit(engine, make_items(8), collection="docs")
    with engine.begin() as connection:
        run = create_run(connection, "docs", "reindex")
        assert run is not None
        connection.execute(
            text("UPDATE vectormill.runs SET job_id = :job WHERE id = :id"), {"job": job.id, "id": run.id}
        )
        connection.execute(text("UPDATE vectormill.jobs SET num_done = 1, num_failed = 1"))
        (found,) = list_open_runs(connection, run.collection_id)
    assert (found.num_items, found.num_ended, found.share) == (8, 2, 0.25)
