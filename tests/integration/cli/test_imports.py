"""`vectormill collections import`: what enters a collection without being encoded, what is refused, and what follows.

Workers are stood in for; the black box imports with real ones (tests/blackbox/test_pages.py).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import ProgrammingError

from tests.api_server import api_client, encoding_meanwhile
from tests.commands import run as run_command
from tests.database import ask, execute
from tests.indexers import ListedSource, await_run, contents, count_encoded, indexing, row, start_run, wanted
from tests.outputs import finish_all
from tests.protocol import submit, vector_of
from tests.services import connected_engine, migrated_database
from vectormill.cli import keys
from vectormill.client import Client
from vectormill.collections.imports import find_import_target
from vectormill.collections.tombstones import delete_scrubbed
from vectormill.domain.errors import SpecMismatch
from vectormill.jobs.item import Item

NUM_ROWS = 2500  # three batches
KEYS = [f"k{number}" for number in range(NUM_ROWS)]
TEXTS = [f"text {number}" for number in range(NUM_ROWS)]
VECTORS = [vector_of(text.encode()) for text in TEXTS]
STATED = ("--dimensions", "8")


@pytest.fixture(autouse=True)
def client(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Client]:
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        monkeypatch.setenv("VECTORMILL_API_URL", str(api.base_url))
        monkeypatch.setenv("VECTORMILL_DATABASE_URL", engine.url.render_as_string(hide_password=False))
        monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path / "data"))
        yield client


run = partial(run_command, "collections", "import", "docs")


def write(path: Path, **columns: Any) -> str:
    """Write rows as Parquet; `columns` replace those of all rows."""
    embedding = pa.FixedSizeListArray.from_arrays(np.concatenate(VECTORS), 8)
    pq.write_table(pa.table({"key": KEYS, "embedding": embedding, "text": TEXTS} | columns), path)
    return str(path)


def make_table(engine: Engine, kind: str = "halfvec(8)") -> None:
    """Make a table of an application, whose last row has no vector."""
    rows = [
        {"id": number, "body": TEXTS[number], "lang": "en", "vector": str(VECTORS[number].tolist())}
        for number in range(NUM_ROWS)
    ]
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA app"))
        connection.execute(
            text(f"CREATE TABLE app.articles (id bigint PRIMARY KEY, body text, lang text, vector {kind})")
        )
        connection.execute(
            text(
                f"INSERT INTO app.articles VALUES (:id, :body, :lang, CAST(CAST(:vector AS vector) AS {kind}))"
            ),
            [*rows, {"id": NUM_ROWS, "body": "no vector", "lang": None, "vector": None}],
        )


def read_rows(engine: Engine) -> dict[str, Any]:
    """Return the rows by key, and the transaction that wrote each."""
    with engine.connect() as connection:
        number = connection.execute(text("SELECT id FROM vectormill.generations")).scalar_one()
        rows = connection.execute(
            text(f"""
            SELECT docs.key, docs.embedding::text, docs.metadata, docs.text, own.xmin::text
              FROM docs JOIN vectormill.generation_{number} AS own ON own.key = docs.key
        """)
        ).all()
    return {row.key: row for row in rows}


SQL = ("--sql", "SELECT * FROM app.articles", "--key", "id", "--text", "body", "--vector", "vector")


@pytest.mark.parametrize("kind", ["halfvec(8)", "vector(8)", "real[]"])
def test_a_column_of_pgvector_enters_with_texts_and_a_repetition_changes_nothing(
    engine: Engine, client: Client, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    make_table(engine, kind)
    with encoding_meanwhile(engine):
        assert run(*SQL, *STATED, "--metadata", "lang", "--keep-text", "--json") == 0
        imported = json.loads(capsys.readouterr().out)
        assert (imported["num_rows"], imported["num_imported"], imported["num_without_vector"]) == (
            2500,
            2500,
            1,
        )
        assert imported["smallest_cosine"] > 0.999
        before = read_rows(engine)
        assert (before["7"].metadata, before["7"].text) == ({"lang": "en"}, "text 7")
        found = np.array(json.loads(before["7"].embedding))
        np.testing.assert_allclose(found, VECTORS[7], atol=1e-3)
        assert run(*SQL, *STATED, "--metadata", "lang") == 0
        assert "0 of 2,500 rows imported" in capsys.readouterr().out
    assert read_rows(engine) == before, "not even written again"
    assert list(client.jobs()) == [], "those of samples are deleted"


def test_a_later_run_encodes_what_differs_from_the_texts_and_all_rows_that_came_without(
    engine: Engine, tmp_path: Path
) -> None:
    texts: list[str | None] = [*TEXTS]
    texts[2] = None
    with encoding_meanwhile(engine):
        assert run(write(tmp_path / "a.parquet", text=texts), "--text", "text", *STATED) == 0
        source = ListedSource(
            [row(key, content) for key, content in zip(KEYS, TEXTS, strict=True)], batch=500
        )
        source.items[0] = row("k0", "another text")
        source.items[3] = Item("k3", b"")  # an empty text takes no vector over from a row without text
        with indexing(engine, source):
            ended = await_run(engine, start_run(engine, confirm=True))
    assert ended.state == "completed_with_errors"
    assert ended.counts.num_changed == count_encoded(engine) == 3  # k0, k2 and the empty one
    assert contents(engine).keys() == set(KEYS) - {"k3"}
    assert contents(engine)["k2"][0] == Item("k2", b"text 2").content_hash()


def test_rows_of_jobs_and_deletions_are_newer_than_an_import(
    engine: Engine, client: Client, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.parquet")
    with encoding_meanwhile(engine):
        client.wait(client.submit([{"key": "k1", "text": "newer"}], collection="docs", dimensions=8)["id"])
        assert run(file, "--text", "text", *STATED) == 0
        assert contents(engine)["k1"][0] == Item("k1", b"newer").content_hash()
        client.delete_items("docs", ["k2"])
        assert run(file, "--text", "text") == 0
        assert "k2" not in contents(engine), "deleted keys are not brought back"
        client.wait(client.submit([{"key": "k5", "text": "later"}], collection="docs", dimensions=8)["id"])
    assert contents(engine)["k5"][0] == Item("k5", b"later").content_hash()


def test_a_deletion_that_is_forgotten_after_a_day_is_not_undone_without_a_word(
    engine: Engine, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.parquet")

    def forget() -> int:
        execute(engine, "UPDATE vectormill.tombstones SET scrubbed_at = now() - interval '2 hours'")
        return ask(engine, delete_scrubbed)

    assert run(file, "--unchecked", *STATED) == 0
    client.delete_items("docs", ["k2"])
    assert forget() == 0, "all deletions of a collection's first day are remembered"
    assert run(file, "--unchecked") == 0
    assert "k2" not in contents(engine)
    execute(engine, "UPDATE vectormill.collections SET created_at = now() - interval '26 hours'")
    assert forget() == 1
    capsys.readouterr()
    assert run(file, "--unchecked") == 2
    assert "and pass --again" in capsys.readouterr().err
    assert "k2" not in contents(engine)
    assert run(file, "--unchecked", "--again") == 0
    assert "k2" in contents(engine)


def test_nothing_is_written_into_another_database_than_that_of_the_api(
    engine: Engine,
    client: Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    postgres_url: str,
) -> None:
    file = write(tmp_path / "a.parquet")
    with migrated_database(postgres_url) as url, connected_engine(url) as other:
        monkeypatch.setenv("VECTORMILL_DATABASE_URL", url)

        def refused() -> bool:
            is_refused = run(file, "--unchecked", *STATED) == 2
            said = capsys.readouterr().err
            return is_refused and "VECTORMILL_API_URL" in said and "VECTORMILL_DATABASE_URL" in said

        assert refused()
        with api_client(other) as api, Client(str(api.base_url)) as elsewhere:
            elsewhere.create_collection("docs", options={"dimensions": 8})
            assert refused()
            assert list(client.collections()) == [], "the one that was created is deleted"
            client.create_collection("docs", options={"dimensions": 8})
            assert refused()
            assert [len(list(each.collections())) for each in (client, elsewhere)] == [1, 1]
        assert contents(other) == {}


def test_the_output_of_a_job_enters_with_the_hashes_of_its_texts_and_another_spec_is_refused(
    engine: Engine, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.create_collection("docs", options={"dimensions": 8})
    spec = ask(engine, find_import_target, "docs").spec
    items = [row("a", "one", page=1), row("b", "two")]
    outputs = {name: (tmp_path / name).as_uri() for name in ("same", "other", "codes")}
    for name, made_with in (
        ("same", spec),
        ("other", replace(spec, prompt="query: ")),
        ("codes", replace(spec, vector_type="binary")),
    ):
        submit(engine, items, spec=made_with, output_url=outputs[name])
    finish_all(engine)
    client.delete_collection("docs")
    assert run(outputs["same"], "--dimensions", "7") == 2
    assert "vectors of another spec" in capsys.readouterr().err
    assert list(client.collections()) == []
    assert run(outputs["same"]) == 0, "a new collection has the model and the options of the job"
    assert "2 of 2 rows imported" in capsys.readouterr().out
    assert contents(engine) == wanted(items)
    for name, words in (("other", "prompt is '', not 'query: '"), ("codes", "no vectors of float32")):
        assert run(outputs[name]) == 2
        assert words in capsys.readouterr().err


def test_vectors_that_the_model_does_not_give_are_refused_and_leave_no_collection(
    engine: Engine, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = [VECTORS[-1], *VECTORS[:-1]]
    nan = [np.full(8, np.nan, dtype=np.float32), *VECTORS[1:]]
    good = write(tmp_path / "good.parquet")
    damaged = str(tmp_path / "damaged.parquet")
    Path(damaged).write_bytes(b"nonsense")

    def vectors(name: str, rows: list[Any]) -> str:
        return write(tmp_path / f"{name}.parquet", embedding=pa.array([each.tolist() for each in rows]))

    def column(name: str, values: list[Any]) -> str:
        return write(
            tmp_path / f"{name}.parquet", **{name: pa.array(values, None if values[0] else pa.string())}
        )

    compared, unchecked = ("--text", "text", *STATED), ("--unchecked", *STATED)
    sparse = "SELECT 1 AS key, CAST('{1:1}/8' AS sparsevec) AS embedding"
    refused: tuple[tuple[tuple[str, ...], str], ...] = (
        ((vectors("turned", turned), *compared), "agree by a cosine of"),
        ((vectors("nan", nan), *compared), "'k0' has NaN"),
        ((vectors("long", [2 * each for each in VECTORS]), *compared), "state --no-normalize"),
        ((vectors("ragged", [np.ones(3), *VECTORS[1:]]), *compared), "different lengths: 3, 8"),
        ((good, "--text", "text", "--dimensions", "9"), "have 8 dimensions"),
        ((good, *STATED), "pass --unchecked"),
        ((column("text", [None] * NUM_ROWS), *compared), "no text to compare"),
        ((good, "--text", "body", *STATED), "has no column 'body'"),
        ((good, "--vector", "text", *compared), "not lists of numbers"),
        ((str(tmp_path / "none.parquet"), "--text", "text"), "No file matches"),
        (("--text", "text"), "Name one source"),
        (("--sql", sparse, *unchecked), "its type is neither vector"),
        (("--sql", "SELECT 1 AS key, '{{1},{2}}'::real[] AS embedding", *unchecked), "nested"),
        ((damaged, *unchecked), "cannot be read"),
        (
            (column("m", ["{}", "[1]"] * 1250), "--metadata-json", "m", *unchecked),
            "The metadata of the row 'k1'",
        ),
        ((column("h", ["abc"] * NUM_ROWS), "--content-hash", "h", *unchecked), "no hashes of texts"),
        ((column("i", [7] * NUM_ROWS), "--content-hash", "i", *unchecked), "no hashes of texts"),
        (("--sql", "SELECT 1 AS key", *compared), "has no column"),
    )
    with encoding_meanwhile(engine):
        for arguments, words in refused:
            assert run(*arguments) in (2, 4), arguments
            assert words in capsys.readouterr().err, arguments
            assert list(client.collections()) == [], arguments
        assert run(good, "--unchecked", *STATED) == 0
        for stated in (("--dimensions", "7"), ("--no-normalize",), ("--max-tokens", "20")):
            assert run(good, "--unchecked", *stated) == 2
            assert "vectors of another spec" in capsys.readouterr().err
        assert len(contents(engine)) == NUM_ROWS
    execute(engine, "INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state)"
                 " SELECT collection_id, spec, fingerprint, 'retired' FROM vectormill.generations")  # fmt: skip
    assert run(good, "--unchecked") == 2
    assert "would lack the imported rows" in capsys.readouterr().err


def test_vectors_that_differ_at_the_end_are_removed_unless_others_have_written_into_the_collection(
    engine: Engine,
    client: Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = VECTORS[:1024]  # a batch that agrees, and then all others turned
    turned = [each.tolist() for each in [*first, *VECTORS[1025:], VECTORS[1024]]]
    file = write(tmp_path / "a.parquet", embedding=pa.array(turned))

    def put() -> None:
        client.wait(
            client.submit([{"key": "mine", "text": "of others"}], collection="docs", dimensions=8)["id"]
        )

    with encoding_meanwhile(engine):
        assert run(file, "--text", "text", *STATED) == 2
        assert "agree by a cosine of" in capsys.readouterr().err
        assert list(client.collections()) == []
        client.create_collection("docs", options={"dimensions": 8})
        assert run(file, "--text", "text") == 2
        assert "2,500 rows are imported already, and no import replaces them" in capsys.readouterr().err
        client.delete_collection("docs")

        def refuse(*_: object) -> float:
            put()
            raise SpecMismatch("agree by nothing")

        monkeypatch.setattr("vectormill.cli.imports.compare", refuse)
        assert run(file, "--text", "text", *STATED) == 2
        assert contents(engine).keys() == {"mine"}, "what others have written meanwhile stays"
        client.delete_collection("docs")

        def schedule(*_: object) -> float:
            client.set_source("docs", "sql", {"query": "SELECT 'a' AS key, 'b' AS text"})
            client.create_schedule("docs", "*/15 * * * *")
            raise SpecMismatch("agree by nothing")

        monkeypatch.setattr("vectormill.cli.imports.compare", schedule)
        assert run(file, "--text", "text", *STATED) == 2
    assert [found["name"] for found in client.collections()] == ["docs"], "it has a source and a schedule"


def test_values_of_any_type_of_the_database_enter_as_its_texts(engine: Engine) -> None:
    execute(engine, "CREATE TYPE mood AS ENUM ('good', 'bad')")
    columns = "'k' AS key, '[1,0,0,0,0,0,0,0]'::vector AS embedding, ARRAY['good'::mood] AS moods"
    query = (
        f"SELECT {columns}, 'good'::mood AS mood, '1.50'::money AS price, 'infinity'::timestamptz AS until"
    )
    names = ("mood", "moods", "price", "until")
    named = [argument for name in names for argument in ("--metadata", name)]
    assert run("--sql", query, *named, "--unchecked", *STATED) == 0
    values = "good", "{good}", "$1.50", "infinity"
    assert read_rows(engine)["k"].metadata == dict(zip(names, values, strict=True))


def test_a_key_that_occurs_twice_and_an_error_of_the_database_are_told_as_what_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twice = write(tmp_path / "a.parquet", key=[*KEYS[:-1], "k0"])
    assert run(twice, "--unchecked", *STATED) == 0
    assert "1 rows were left out: their keys are in the collection, occur twice" in capsys.readouterr().err
    with pytest.raises(ProgrammingError), keys.connected(None) as (engine, _), engine.connect() as connection:
        connection.execute(text("SELECT nothing"))
