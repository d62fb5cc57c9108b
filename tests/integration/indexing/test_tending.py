"""The index maintainer: which collections get a run of their index, for which reason, and which are left alone."""

import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, text

from indexer.indexing import build_indexes
from scheduler import index_maintainer
from scheduler.index_maintainer import IndexMaintainer, find_need
from tests.indexed import draw_vectors, execute, indexes_of, make_collection, start_run, wish
from tests.integration.collections.test_representations import SPARSE_ONLY, VECTORS_ONLY
from tests.kinds import MANY
from tests.protocol import SPEC, make_items, submit
from tests.waiting import wait_for
from vectormill.collections.collection import AUTO, HNSW
from vectormill.collections.indexes import LIST_MAINTAINED, MaintainedCollection
from vectormill.db.session import walk_plan
from vectormill.runs.run import INDEX
from vectormill.runs.runs import create_run
from vectormill.settings import Settings

SETTINGS = Settings(index_rows=100)
TENDED = MaintainedCollection("docs", 1, AUTO, SPEC, {}, 1000, 0, 0, (), False, False)
BUILT = {"num_rows": 1000, "num_removed": 50}
INDEXED = replace(TENDED, operator_classes=("halfvec_cosine_ops",), has_own_index=True, record=BUILT)
BOTH = replace(INDEXED, spec=MANY, operator_classes=("halfvec_cosine_ops", "sparsevec_ip_ops"))


@pytest.mark.parametrize(
    ("tended", "said"),
    [
        (TENDED, "no index for 1,000 rows"),
        (replace(TENDED, policy=HNSW), "the policy is hnsw"),
        (replace(TENDED, num_waiting=1000), "no index for"),  # puts
        (replace(TENDED, num_waiting=1001), None),  # a load, behind which it is built
        (replace(TENDED, spec=replace(SPEC, vector_type="int8")), None),
        (INDEXED, None),
        (replace(INDEXED, num_removed=250), None),
        (replace(INDEXED, num_removed=251), "20% of its rows"),
        (replace(INDEXED, num_removed=10), None),  # Postgres counts anew after a crash
        (replace(INDEXED, num_waiting=5000), "5,000 items are waiting"),
        (replace(INDEXED, num_waiting=5000, is_in_use=True), None),
        (replace(INDEXED, num_waiting=5000, policy=HNSW), None),
        (replace(INDEXED, num_waiting=5000, has_own_index=False), None),  # made by hand
        (replace(INDEXED, num_waiting=5000, num_rows=20_000), None),
        (replace(INDEXED, spec=MANY), "no index for 1,000 rows by sparsevec_ip_ops"),
        (BOTH, None),
        (replace(BOTH, spec=VECTORS_ONLY, operator_classes=()), None),
        (replace(BOTH, spec=SPARSE_ONLY, record={"sparse": BUILT}, num_removed=251), "20% of its rows"),
        (replace(INDEXED, wants_index=False, filters=["*"]), "Indexes for filters are missing: generation_1"),
        (replace(INDEXED, filters=["*"], num_waiting=1001, is_in_use=True), None),
        (replace(INDEXED, filters=["*"], attribute_indexes=["generation_1_attributes_on_any"]), None),
    ],
)
def test_what_a_collection_needs_is_decided_from_what_the_catalog_says(
    tended: MaintainedCollection, said: str | None
) -> None:
    need = find_need(tended, SETTINGS)
    assert (need is None) == (said is None)
    if need is not None and said is not None:
        assert said in need["because"]


def runs_of(engine: Engine) -> list[dict[str, Any]]:
    with engine.connect() as connection:
        statement = text("SELECT options FROM vectormill.runs WHERE state = 'queued' ORDER BY created_at")
        return list(connection.execute(statement).scalars())


def end_runs(engine: Engine, state: str) -> None:
    execute(engine, f"UPDATE vectormill.runs SET state = '{state}', finished_at = now()")


def test_a_collection_that_has_grown_gets_a_run_and_one_is_enough(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(200))
    duty = IndexMaintainer(engine, SETTINGS)
    wait_for(lambda: duty.tend() == 1)  # Postgres counts rows with a delay
    assert "no index for 200 rows" in runs_of(engine)[0]["because"]
    assert duty.tend() == 0
    build_indexes(start_run(engine)[0], generation)
    end_runs(engine, "completed")
    assert duty.tend() == 0


def test_an_index_for_filters_that_an_older_release_did_not_build_is_asked_for(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(10))
    wish(engine, filters="""'["year"]'""", index_policy="'none'")
    build_indexes(start_run(engine)[0], generation)
    duty = IndexMaintainer(engine, SETTINGS)
    assert duty.tend() == 0
    (name,) = [index.name for index in indexes_of(engine, generation) if index.name.endswith("_long")]
    execute(engine, f"DROP INDEX vectormill.{name}")
    assert duty.tend() == 1
    assert name in runs_of(engine)[0]["because"]
    build_indexes(start_run(engine)[0], generation)
    end_runs(engine, "completed")
    assert duty.tend() == 0


def test_a_build_that_failed_is_not_asked_for_again_at_once(engine: Engine) -> None:
    make_collection(engine, draw_vectors(200))
    duty = IndexMaintainer(engine, SETTINGS)
    wait_for(lambda: duty.tend() == 1)
    end_runs(engine, "failed")
    assert duty.tend() == 0
    execute(engine, "UPDATE vectormill.runs SET finished_at = now() - interval '2 hours'")
    assert duty.tend() == 1


def test_a_small_collection_and_one_without_wishes_are_left_alone(engine: Engine) -> None:
    make_collection(engine, draw_vectors(200))
    duty, patient = IndexMaintainer(engine, SETTINGS), IndexMaintainer(engine, Settings(index_rows=201))
    wait_for(lambda: duty.tend() == 1)
    end_runs(engine, "completed")
    assert patient.tend() == 0
    wish(engine, index_policy="'none'")
    assert duty.tend() == 0


def test_a_load_is_waited_for(engine: Engine) -> None:
    make_collection(engine, draw_vectors(200))
    job = submit(engine, make_items(1200), collection="docs", chunk_max_items=600)
    duty = IndexMaintainer(engine, SETTINGS)
    time.sleep(1.5)  # as long as Postgres may take to count
    assert duty.tend() == 0
    execute(engine, f"UPDATE vectormill.jobs SET num_done = num_items WHERE id = '{job.id}'")
    wait_for(lambda: duty.tend() == 1)


def test_deletions_have_an_index_built_anew(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(1000))
    build_indexes(start_run(engine)[0], generation)
    duty = IndexMaintainer(engine, SETTINGS)
    assert duty.tend() == 0
    execute(engine, f"DELETE FROM vectormill.{generation.table_name} WHERE CAST(key AS integer) < 300")
    wait_for(lambda: duty.tend() == 1)
    (options,) = runs_of(engine)
    assert options["rebuild"]
    assert options["because"].startswith("30%")


def test_of_many_collections_the_look_reads_no_table_of_jobs_or_runs_whole(engine: Engine) -> None:
    make_collection(engine, draw_vectors(10))
    execute(
        engine,
        """
        INSERT INTO vectormill.jobs (id, state, model, spec, priority)
        SELECT gen_random_uuid(), 'completed', 'm', '{}', 5 FROM generate_series(1, 20000)
        """,
    )
    execute(
        engine,
        """
        INSERT INTO vectormill.runs (id, collection_id, kind, state, finished_at)
        SELECT gen_random_uuid(), id, 'reindex', 'completed', now()
          FROM vectormill.collections, generate_series(1, 20000)
        """,
    )
    execute(engine, "ANALYZE vectormill.jobs")
    execute(engine, "ANALYZE vectormill.runs")
    with engine.begin() as connection:
        create_run(connection, "docs", INDEX, options={"because": str(uuid4())})
        values = {"least_rows": 5, "in_use_seconds": 600, "held_back_seconds": 3600}
        (plan,) = connection.execute(
            text(f"EXPLAIN (FORMAT JSON) {LIST_MAINTAINED.text}"), values
        ).scalar_one()
    nodes = [node for node in walk_plan(plan["Plan"]) if node.get("Relation Name") in ("jobs", "runs")]
    assert nodes
    assert "Seq Scan" not in [node["Node Type"] for node in nodes]


def test_a_collection_that_was_deleted_since_the_look_ends_neither_the_round_nor_the_scheduler(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_collection(engine, draw_vectors(200))
    monkeypatch.setattr(
        index_maintainer, "list_maintained", lambda *_, **__: [replace(TENDED, collection="gone"), TENDED]
    )
    assert IndexMaintainer(engine, SETTINGS).tend() == 1
    assert "no index for 1,000 rows" in runs_of(engine)[0]["because"]
