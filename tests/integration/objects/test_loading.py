"""`vectormill load pgvector` into a real Postgres, and what every target gets."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pytest
from psycopg import Connection
from sqlalchemy import Engine

from tests.commands import run as run_command
from tests.database import ask
from tests.integration.objects.conftest import Place
from tests.kinds import MANY, RECORDS, SCORES, numbers_of, records_of
from tests.obedient_engine import encoding_chunks, run_to_end
from tests.outputs import add_output, finish_all, keep_outputs
from tests.protocol import SPEC, make_items, submit, vector_of
from vectormill.addresses import to_libpq
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.jobs.item import Item
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import cancel_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.submission import JobWriter
from vectormill.objects.loading.load import OTHER_BYTES, LoadProgress, count_rows, load_output
from vectormill.objects.loading.pgvector import open_postgres
from vectormill.objects.loading.qdrant import refuse_unfit
from vectormill.objects.manifest import read_table
from vectormill.objects.reading import add_objects
from vectormill.settings import Settings

ITEMS = [
    Item("k'ü\t", b"one"),
    Item("k1", b"two", b'{"lang": "de", "n": {"a": [1, "\xc3\xbc"]}}'),
    Item("", b"three"),
]


@pytest.fixture
def out(engine: Engine, tmp_path: Path) -> str:
    """An output of twelve items, in three parts."""
    url = f"file://{tmp_path}/out"
    add_output(engine, url, [*ITEMS[:2], *make_items(10, "m")])
    return url


@pytest.fixture
def target(database_url: str) -> Any:
    with psycopg.connect(to_libpq(database_url), autocommit=True) as connection:
        yield connection


load = partial(run_command, "load")


def load_table(url: str, database_url: str, table: str = "papers") -> int:
    return load("pgvector", url, "--database-url", database_url, "--table", table)


def fetch(target: Connection[Any], query: str) -> list[Any]:
    return target.execute(query.encode()).fetchall()


def test_rows_reach_postgres_with_their_metadata_and_a_second_load_changes_nothing(
    engine: Engine,
    place: Place,
    database_url: str,
    target: Connection[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    items = [*ITEMS[:2], *make_items(10, "m")]
    add_output(engine, f"{place.url}/out", items)
    for _ in range(2):
        assert load_table(f"{place.url}/out", database_url) == 0
        told = capsys.readouterr()
        assert told.out.startswith("12 rows of ")
        assert "loading: 12 of 12 rows" in told.err or "loading: 0 of 12 rows" in told.err
        rows = fetch(target, "SELECT key, embedding::real[], metadata FROM papers")
        assert {row[0]: row[2] for row in rows} == {
            item.key: json.loads(item.metadata) if item.metadata else None for item in items
        }
        expected = {item.key: vector_of(item.text) for item in items}
        for key, vector, _ in rows:
            np.testing.assert_array_equal(np.array(vector, np.float32), expected[key])
    assert (
        load("pgvector", f"{place.url}/out", "--database-url", database_url, "--table", "papers", "--json")
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["num_rows"], told["num_failed"], told["target"]) == (12, 0, "table papers")


def test_rows_of_a_later_job_replace_those_of_equal_keys_and_leave_the_others(
    engine: Engine, tmp_path: Path, database_url: str, target: Connection[Any]
) -> None:
    add_output(engine, f"file://{tmp_path}/a", [Item("a", b"one", b'{"v": 1}'), Item("b", b"two")])
    add_output(engine, f"file://{tmp_path}/b", [Item("c", b"three"), Item("a", b"four")])
    for name in ("a", "b"):
        assert load_table(f"{tmp_path}/{name}", database_url, "public.papers") == 0
    rows = fetch(target, "SELECT key, embedding::real[], metadata FROM papers ORDER BY key")
    assert [(row[0], row[2]) for row in rows] == [("a", None), ("b", None), ("c", None)]
    for (_, vector, _), text in zip(rows, (b"four", b"two", b"three"), strict=True):
        np.testing.assert_array_equal(np.array(vector, np.float32), vector_of(text))


@pytest.mark.parametrize(
    ("vector_type", "kind"),
    [("float32", "vector(8)"), ("float16", "halfvec(8)"), ("int8", "halfvec(8)"), ("binary", "bit(8)")],
)
def test_every_vector_type_has_its_column(
    engine: Engine, tmp_path: Path, database_url: str, target: Connection[Any], vector_type: str, kind: str
) -> None:
    url = f"file://{tmp_path}/out"
    job = submit(engine, make_items(6), spec=replace(SPEC, vector_type=vector_type), output_url=url)
    with encoding_chunks(engine) as encoder:  # a worker computes the ranges of int8
        run_to_end(engine, encoder, job)
    keep_outputs(engine)
    assert load_table(url, database_url) == 0
    shown = "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid = 'papers'::regclass"
    assert fetch(target, f"{shown} AND attname = 'embedding'") == [(kind,)]
    expected = np.array(read_table(url).column("embedding").to_pylist(), np.float32)
    if vector_type == "binary":
        rows = fetch(target, "SELECT embedding::text FROM papers ORDER BY key")
        found = np.packbits([[int(bit) for bit in row[0]] for row in rows], axis=1).astype(np.float32)
    else:
        found = np.array(
            [row[0] for row in fetch(target, "SELECT embedding::vector::real[] FROM papers ORDER BY key")],
            np.float32,
        )
    np.testing.assert_array_equal(found, expected)


def test_scores_and_records_are_loaded_as_their_columns(
    engine: Engine, tmp_path: Path, database_url: str, target: Connection[Any]
) -> None:
    items = make_items(5)
    for name, spec in (("scores", SCORES), ("records", RECORDS)):
        add_output(engine, f"file://{tmp_path}/{name}", items, spec)
        assert load_table(f"{tmp_path}/{name}", database_url, name) == 0
    scores = fetch(target, "SELECT score, label, probabilities FROM scores ORDER BY key")
    for (score, label, probabilities), item in zip(scores, items, strict=True):
        numbers = numbers_of(item.text)
        assert score == pytest.approx(numbers.max())
        assert label == SCORES.labels[int(numbers.argmax())]
        assert probabilities == pytest.approx(dict(zip(SCORES.labels, numbers.tolist(), strict=True)))
    outputs = [row[0] for row in fetch(target, "SELECT output FROM records ORDER BY key")]
    assert outputs == [records_of(item.text) for item in items]


def test_of_a_key_that_a_job_has_twice_the_last_row_counts(
    engine: Engine, place: Place, database_url: str, target: Connection[Any]
) -> None:
    place.write("in.jsonl", b"".join(b'{"id": "k%d", "text": "t%d"}\n' % (n % 3, n) for n in range(8)))
    settings = Settings(chunk_max_items=4)
    with JobWriter(engine, NewJob(SPEC, to=f"{place.url}/out"), settings) as writer:
        add_objects(writer, InputBody([f"{place.url}/in.jsonl"], "text", "id"), SPEC, settings)
        writer.finish()
    finish_all(engine)
    assert load_table(f"{place.url}/out", database_url) == 0
    rows = fetch(target, "SELECT key, embedding::real[] FROM papers ORDER BY key")
    assert [row[0] for row in rows] == ["k0", "k1", "k2"]
    for (_, vector), text in zip(rows, (b"t6", b"t7", b"t5"), strict=True):
        np.testing.assert_array_equal(np.array(vector, np.float32), vector_of(text))


def test_a_load_that_broke_off_keeps_whole_batches_and_goes_on_when_it_is_repeated(
    out: str, database_url: str, target: Connection[Any]
) -> None:
    shown: list[LoadProgress] = []

    def break_off(done: LoadProgress) -> None:
        shown.append(done)
        if done.num_loaded >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_output(out, lambda spec, schema: open_postgres(database_url, "papers", spec), break_off)
    assert [(done.num_loaded, done.num_rows) for done in shown] == [(0, 12), (4, 12), (8, 12)]
    assert fetch(target, "SELECT count(*) FROM papers") == [(8,)]
    assert load_table(out, database_url) == 0
    assert fetch(target, "SELECT count(*) FROM papers") == [(12,)]


@pytest.mark.parametrize(
    ("made", "code", "sentence"),
    [
        ("CREATE TABLE papers (key text PRIMARY KEY, embedding vector(5), metadata jsonb)", 2,
         "The table papers has vector(5) in the column embedding, and this output has vector(8)."),
        ("CREATE TABLE papers (key text PRIMARY KEY, vector vector(8), metadata jsonb)", 2,
         "has nothing in the column embedding"),
        ("CREATE TABLE papers (key text, embedding vector(8), metadata jsonb)", 2,
         "Postgres refuses: there is no unique or exclusion constraint"),
        ("CREATE VIEW papers AS SELECT 1 AS key", 2, "has integer in the column key"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_refused_in_a_sentence(
    out: str, database_url: str, target: Connection[Any], capsys: pytest.CaptureFixture[str],
    made: str, code: int, sentence: str,
) -> None:  # fmt: skip
    target.execute(b"CREATE EXTENSION IF NOT EXISTS vector")
    target.execute(made.encode())
    assert load_table(out, database_url) == code
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_database_that_does_not_answer_and_a_folder_without_an_output_are_told(
    out: str, tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_table(out, "postgresql+psycopg://127.0.0.1:1/none") == 3
    assert "Postgres cannot be used" in capsys.readouterr().err
    assert load_table(str(tmp_path), database_url) == 2
    assert "has no _manifest.json: it is written when the job has ended." in capsys.readouterr().err


def test_a_package_that_is_not_there_is_named_with_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert load("qdrant", "/tmp", "--path", "/tmp", "--collection", "papers") == 2
    assert "[qdrant]'" in capsys.readouterr().err
    assert load("lancedb", "/tmp", "--uri", "/tmp", "--table", "papers") == 2
    assert "[lancedb]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (SCORES, "has scores and no vectors"),
        (RECORDS, "has records and no vectors"),
        (replace(SPEC, vector_type="int8"), "cannot compare the int8 codes"),
        (replace(SPEC, vector_type="binary"), "cannot compare the binary codes"),
    ],
)
def test_qdrant_is_given_no_results_that_it_cannot_compare(spec: EncodingSpec, sentence: str) -> None:
    with pytest.raises(InvalidOption, match=sentence):
        refuse_unfit(spec)


def test_an_output_of_sparse_weights_is_refused_by_postgres_in_a_sentence(database_url: str) -> None:
    sentence = "has dense,sparse,multi_vector, and a load into Postgres takes dense vectors"
    with pytest.raises(InvalidOption, match=sentence), open_postgres(database_url, "papers", MANY):
        pass


def test_an_output_without_rows_is_no_load(engine: Engine, tmp_path: Path, database_url: str) -> None:
    job = submit(engine, make_items(2), output_url=f"file://{tmp_path}/out")
    ask(engine, cancel_job, job.id)
    finish_all(engine)
    with pytest.raises(VectormillError, match="has no rows"):
        load_output(
            f"file://{tmp_path}/out", lambda spec, schema: open_postgres(database_url, "papers", spec)
        )


def test_a_batch_has_fewer_rows_the_longer_its_vectors_are() -> None:
    schema = pa.schema([pa.field("key", pa.string()), pa.field("embedding", pa.list_(pa.float32(), 4096))])
    assert count_rows(schema, 8 << 20) == (8 << 20) // (4096 * 4 + OTHER_BYTES)
    assert count_rows(schema, 1) == 1
    assert count_rows(pa.schema([pa.field("score", pa.float32())]), 1 << 40) == 1 << 16
