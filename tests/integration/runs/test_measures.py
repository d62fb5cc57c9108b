"""What is measured of a generation: the recall of its index, rows that are no vectors, texts that are encoded again."""

import numpy as np
import pytest
from sqlalchemy import Engine, text

from tests.api_server import encode_waiting, encoding_meanwhile
from tests.database import ask, execute
from tests.kinds import MANY, representations_of
from tests.protocol import SPEC, make_items, submit
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation, open_collection
from vectormill.collections.generation_tables import upsert_rows
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.results.kind import take_objects
from vectormill.runs.checks import measure_recall, scan_results
from vectormill.runs.samples import compare_sample, sample_texts
from vectormill.settings import Settings
from vectormill.vectors.vector_types import make_rows


def nothing() -> None:
    pass


def change(engine: Engine, statement: str) -> None:
    execute(engine, statement.format(table=f"vectormill.{ask(engine, find_generation, 'docs').table_name}"))


@pytest.fixture
def docs(engine: Engine) -> Generation:
    """40 rows that a job has written."""
    submit(engine, make_items(40), collection="docs")
    encode_waiting(engine)
    return ask(engine, find_generation, "docs")


def fill(engine: Engine, spec: EncodingSpec, num_rows: int = 3000) -> Generation:
    drawn = np.random.default_rng(3).standard_normal((num_rows, spec.dimensions)).astype(np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    kind = spec.kept_type
    items = [Item(str(number), b"%d" % number) for number in range(num_rows)]
    with engine.begin() as connection:
        generation = open_collection(connection, "docs", spec)
        rows = make_rows(drawn, kind, None)
        upsert_rows(connection, generation.id, 1, items, rows, spec)
    change(engine, "ANALYZE {table}")
    return generation


@pytest.mark.parametrize(
    ("vector_type", "operators"),
    [(None, "halfvec_cosine_ops"), ("float32", "vector_cosine_ops"), ("binary", "bit_hamming_ops")],
)
def test_recall_is_measured_against_an_exact_search_of_the_same_rows(
    engine: Engine, vector_type: str | None, operators: str
) -> None:
    spec = EncodingSpec("fake", "1", "mean", True, 16, "", 64, vector_type=vector_type)
    generation = fill(engine, spec)
    assert measure_recall(engine, generation, check=nothing) is None  # there is no index
    change(engine, f"CREATE INDEX fine ON {{table}} USING hnsw (embedding {operators})")
    recall = measure_recall(engine, generation, check=nothing)
    assert recall is not None
    assert (recall.index, recall.num_queries, recall.limit) == ("fine", 50, 10)
    assert 0.95 < recall.value <= 1


def test_a_poor_index_is_found_out(engine: Engine) -> None:
    # Lists of which one is looked into: most neighbours are elsewhere.
    generation = fill(engine, EncodingSpec("fake", "1", "mean", True, 16, "", 64))
    change(
        engine, "CREATE INDEX poor ON {table} USING ivfflat (embedding halfvec_cosine_ops) WITH (lists = 100)"
    )
    recall = measure_recall(engine, generation, check=nothing)
    assert recall is not None
    assert recall.value < 0.9


def test_the_index_of_sparse_weights_is_not_taken_for_that_of_dense_vectors(engine: Engine) -> None:
    items = make_items(20)
    generation = ask(engine, open_collection, "docs", MANY)
    rows = take_objects([representations_of(item.text).pack() for item in items])
    ask(engine, upsert_rows, generation.id, 1, items, rows, MANY)
    change(engine, "CREATE INDEX a_sparse ON {table} USING hnsw (sparse sparsevec_ip_ops)")
    assert measure_recall(engine, generation, check=nothing) is None
    change(engine, "CREATE INDEX dense ON {table} USING hnsw (embedding halfvec_cosine_ops)")
    recall = measure_recall(engine, generation, check=nothing)
    assert recall is not None
    assert recall.index == "dense"


def test_codes_have_no_index_that_serves(engine: Engine) -> None:
    spec = EncodingSpec("fake", "1", "mean", True, 8, "", 64, vector_type="int8")
    generation = ask(engine, open_collection, "codes", spec)
    assert measure_recall(engine, generation, check=nothing) is None


def test_every_block_is_scanned_once(
    engine: Engine, docs: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.runs.checks.BLOCKS_PER_SCAN", 1)
    generation = fill(engine, SPEC)
    num_checks = []
    found = scan_results(engine, generation, check=lambda: num_checks.append(1))
    assert found.found["num_rows"] == 3040
    assert len(num_checks) > 10


def test_a_sample_that_is_encoded_again_agrees_unless_a_vector_is_another_s(
    engine: Engine, docs: Generation
) -> None:
    with encoding_meanwhile(engine):
        agreed = compare_sample(engine, Settings(), docs, 20, check=nothing)
    assert (agreed.num_compared, agreed.num_differing) == (20, 0)
    assert agreed.smallest == pytest.approx(1, abs=1e-3)
    change(engine, "UPDATE {table} SET embedding = '[1,0,0,0,0,0,0,0]' WHERE key = 'k5'")
    with encoding_meanwhile(engine):
        differing = compare_sample(engine, Settings(), docs, 40, check=nothing)
    assert differing.differing_keys == ["k5"]
    assert not differing.is_good
    with engine.connect() as connection:  # the job of the sample is gone
        assert connection.execute(text("SELECT count(*) FROM vectormill.jobs")).scalar_one() == 1


def test_without_any_text_a_check_says_that_nothing_was_compared(engine: Engine, docs: Generation) -> None:
    execute(engine, "DELETE FROM vectormill.jobs")
    agreement = compare_sample(engine, Settings(), docs, 20, check=nothing)
    assert agreement.num_compared == 0
    assert "no texts are available" in agreement.reason


def test_kept_texts_come_before_those_of_jobs(engine: Engine, docs: Generation) -> None:
    execute(
        engine,
        f"INSERT INTO vectormill.{docs.table_name}_attributes (key, text, job_seq)"
        " VALUES ('k1', 'text k 1', 1), ('gone', 'x', 1)",
    )
    items, reason = ask(engine, sample_texts, docs, 10)
    assert [item.key for item in items] == ["k1"]
    assert "the collection stores" in reason
