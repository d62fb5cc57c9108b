"""How collections stand in a list, what is built in one, and rows of it by chance, on a real Postgres."""

from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, text

from tests.indexed import draw_vectors, execute, make_collection
from tests.kinds import LABELS, SCORES
from tests.protocol import SPEC, make_items, submit
from tests.schedules import add_source
from vectormill.db.collections.collections import find_generation
from vectormill.db.measures.row_samples import choose_percent, sample_rows
from vectormill.db.overviews.collections import Standing, list_open_runs, list_standings
from vectormill.db.runs.runs import create_run
from vectormill.domain.collection import Generation
from vectormill.domain.encoding import BINARY
from vectormill.domain.errors import SearchTimeout


def standing_of(connection: Connection, collection_id: int) -> Standing:
    return list_standings(connection, [collection_id])[collection_id]


def test_a_collection_that_follows_nothing_has_neither_coverage_nor_run(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(20))
    with engine.connect() as connection:
        found = standing_of(connection, generation.collection_id)
    assert found == Standing(
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


def draw(
    engine: Engine, generation: Generation, size: int, field: str | None = None
) -> tuple[list[str], list[str | None], np.ndarray, list[str], float]:
    with engine.connect() as connection:
        found = sample_rows(connection, generation, size, field, 30)
    return found.keys, found.values, found.results, found.fields, found.share


def test_a_sample_has_the_rows_as_they_are_kept_with_what_was_asked_of_their_metadata(engine: Engine) -> None:
    vectors = draw_vectors(50)
    generation = make_collection(
        engine, vectors, lambda number: b'{"half": %d, "lang": "de"}' % (number % 2) if number else b""
    )
    keys, values, results, fields, share = draw(engine, generation, 100, "half")
    assert share == 1
    assert sorted(map(int, keys)) == list(range(50))
    assert fields == ["half", "lang"]
    for key, value, row in zip(keys, values, results, strict=True):
        assert value == (str(int(key) % 2) if int(key) else None)
        assert row == pytest.approx(vectors[int(key)], abs=1e-3)


def test_a_large_table_is_read_in_part(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(20_000))
    execute(engine, f"ANALYZE vectormill.{generation.table_name}")
    keys, values, results, fields, share = draw(engine, generation, 100)
    assert share < 0.5
    assert len(set(keys)) == 100
    assert values == [None] * len(keys)
    assert fields == []
    assert results.shape == (len(keys), 8)


def test_a_sample_that_takes_too_long_is_ended(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(20_000))
    with engine.connect() as connection, pytest.raises(SearchTimeout):
        sample_rows(connection, generation, 20_000, None, 0.001)


@pytest.mark.parametrize(
    ("num_blocks", "num_rows", "percent"),
    [
        (0, 0, 100),  # empty
        (100, 500, 100),  # all of a small table
        (250, 20_000, 20),  # thirty would hold them, and chance may take far fewer than it is asked for
        (1_000_000, 10_000_000, 0.026),
        (1_000_000, 0, 0.26),  # never counted: a block a row
    ],
)
def test_the_share_of_blocks_is_that_which_holds_the_rows(
    num_blocks: int, num_rows: float, percent: float
) -> None:
    assert choose_percent(num_blocks, num_rows, 2000) == pytest.approx(percent)


def test_rows_of_bits_and_of_scores_are_sampled_too(engine: Engine) -> None:
    bits = make_collection(engine, draw_vectors(30), spec=replace(SPEC, vector_type=BINARY), name="bits")
    _, _, rows, _, _ = draw(engine, bits, 10)
    assert rows.shape == (10, 1)
    assert rows.dtype == np.uint8
    submit(engine, make_items(3), collection="scored", spec=SCORES)
    with engine.connect() as connection:
        scored = find_generation(connection, "scored")
    _, _, numbers, _, _ = draw(engine, scored, 10)
    assert numbers.shape == (0, len(LABELS))
