"""Other programs read the parts of an output, or get its rows by `vectormill load`: real packages, pinned."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars
import pyarrow.dataset
import pytest
from sqlalchemy import Engine

from tests.environments import CLUSTERS, find_packages, make_cluster_variables, make_environment
from tests.http_server import QuietHandler, serving_http
from tests.kinds import RECORDS, SCORES, records_of
from tests.outputs import add_output, encode, keep_outputs
from tests.protocol import SPEC, make_items, submit, vector_of
from vectormill.jobs.item import Item
from vectormill.objects.manifest import read_table

SCRIPT: Final = Path(__file__).with_name("read_elsewhere.py")
PINS: Final = (
    "qdrant-client==1.20.0",
    "lancedb==0.40.0",
    "duckdb==2.0.1",
    "polars==2.1.0",
    "pyarrow==26.0.1",
)
READERS: Final = ("duckdb", "polars", "spark", "ray", "daft", "parts into lancedb")
# Our own packages come first: only what is not installed here is taken from the other environment.
COMMAND: Final = "import sys; sys.path.append({!r}); from vectormill.cli import main; main(sys.argv[1:])"
ITEMS: Final = [Item("k'ü", b"one", b'{"lang": "de", "key": "no"}'), *make_items(10, "m")]

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def python() -> Path:
    return make_environment("objects", PINS)


@pytest.fixture
def out(engine: Engine, tmp_path: Path) -> Path:
    """A swept output of eleven items, in three parts."""
    add_output(engine, f"file://{tmp_path}/out", ITEMS)
    return tmp_path / "out"


def read(python: Path, program: str, *arguments: str) -> Rows:
    done = subprocess.run(
        (python, SCRIPT, program, *arguments), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: Rows = json.loads(done.stdout)
    return rows


def load(python: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    program = COMMAND.format(str(find_packages(python)))
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        (sys.executable, "-c", program, "load", *arguments),
        capture_output=True, text=True, timeout=120, env=environment, check=False,
    )  # fmt: skip


def assert_rows(rows: Rows, expected: dict[str, Any]) -> None:
    assert sorted(row["key"] for row in rows) == sorted(expected)
    for row in rows:
        np.testing.assert_allclose(np.array(row["embedding"], np.float32), expected[row["key"]], rtol=1e-6)


def vectors_of(items: list[Item]) -> dict[str, Any]:
    return {item.key: vector_of(item.text) for item in items}


# -- readers --------------------------------------------------------------------------------------------------------


def test_polars_and_datasets_of_arrow_read_the_parts_of_an_output_as_we_do(out: Path) -> None:
    expected = read_table(str(out)).sort_by("key")
    files = [str(path) for path in out.glob("*.parquet")]
    assert len(files) == 3
    for source in (files, str(out)):
        assert pyarrow.dataset.dataset(source).to_table().sort_by("key").equals(expected)
    frame = polars.scan_parquet(f"{out}/*.parquet").sort("key").collect()
    assert frame["key"].to_list() == expected.column("key").to_pylist()
    assert frame["metadata"].to_list() == expected.column("metadata").to_pylist()
    np.testing.assert_array_equal(
        frame["embedding"].to_numpy(), np.array(expected.column("embedding").to_pylist(), np.float32)
    )


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first run installs the packages
@pytest.mark.parametrize("program", READERS)
def test_another_program_reads_a_closed_output_by_the_examples_of_the_docs(
    engine: Engine, tmp_path: Path, program: str
) -> None:
    for kind in ("float32", "float16", "int8", "binary"):
        folder = tmp_path / kind / "vectors"
        encode(
            engine, submit(engine, ITEMS, spec=replace(SPEC, vector_type=kind), output_url=f"file://{folder}")
        )
        keep_outputs(engine, grace_seconds=3600)
        assert len([*folder.glob("*.parquet")]) == len([*folder.glob("_staged/*")]) == 3
        done = run_reader(program, folder.parent)
        if (program, kind) == ("spark", "float16"):
            assert "PARQUET_TYPE_ILLEGAL" in done.stderr
            continue
        assert done.returncode == 0, done.stderr
        rows = sorted(json.loads(done.stdout.splitlines()[-1]), key=lambda row: str(row["key"]))
        expected = sorted(read_table(str(folder)).to_pylist(), key=lambda row: str(row["key"]))
        # A number of 32 bits or less, and its text in JSON, are exact: equal numbers are equal bits.
        assert rows == [{**row, "content_hash": list(row["content_hash"])} for row in expected], kind


def run_reader(program: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Read `vectors` by a program in its environment, or in ours with the packages of a cluster behind."""
    python, environment = sys.executable, None
    if program in CLUSTERS:
        environment = make_cluster_variables(program)
    else:
        python = str(make_environment("objects", PINS))
    return subprocess.run(
        (python, SCRIPT, program, ITEMS[0].key),
        cwd=folder, capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_duckdb_compares_the_vectors_of_an_output(engine: Engine, tmp_path: Path) -> None:
    add_output(engine, f"file://{tmp_path}/vectors", ITEMS)
    expected = vectors_of(ITEMS)
    first = expected[ITEMS[0].key]
    done = run_reader("search with duckdb", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["key"] for row in rows] == sorted(expected, key=lambda key: -float(expected[key] @ first))[:5]
    for row in rows:
        assert row["distance"] == pytest.approx(1 - float(expected[row["key"]] @ first), abs=1e-6)


# -- LanceDB --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_table_of_lancedb_gets_every_row_once_however_often_it_is_loaded(
    python: Path, engine: Engine, out: Path, tmp_path: Path
) -> None:
    arguments = ("--uri", str(tmp_path / "lance"), "--table", "papers", "--json")
    rows: Rows = []
    for _ in range(2):
        done = load(python, "lancedb", str(out), *arguments)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["num_rows"] == 11
        rows = read(python, "lancedb", str(tmp_path / "lance"), "papers")
        assert_rows(rows, vectors_of(ITEMS))
    assert {row["key"]: row["metadata"] for row in rows}["k'ü"] == ITEMS[0].metadata.decode()
    later = [Item("m3", b"another"), Item("new", b"text")]
    add_output(engine, f"file://{tmp_path}/later", later)
    assert load(python, "lancedb", str(tmp_path / "later"), *arguments).returncode == 0
    rows = read(python, "lancedb", str(tmp_path / "lance"), "papers")
    assert_rows(rows, vectors_of(ITEMS) | vectors_of(later))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_lancedb_gets_scores_and_records_as_their_columns_and_refuses_other_columns(
    python: Path, engine: Engine, tmp_path: Path
) -> None:
    items, uri = make_items(5), str(tmp_path / "lance")
    rows: Rows = []
    for name, spec in (("scores", SCORES), ("records", RECORDS)):
        add_output(engine, f"file://{tmp_path}/{name}", items, spec)
        done = load(python, "lancedb", str(tmp_path / name), "--uri", uri, "--table", name)
        assert done.returncode == 0, done.stderr
        expected = read_table(f"{tmp_path}/{name}").drop_columns("content_hash").to_pylist()
        rows = sorted(read(python, "lancedb", uri, name), key=lambda row: str(row["key"]))
        assert [{**row, "content_hash": None} for row in rows] == [
            {**row, "content_hash": None} for row in expected
        ]
    assert [json.loads(row["output"]) for row in rows] == [records_of(item.text) for item in items]
    done = load(python, "lancedb", str(tmp_path / "records"), "--uri", uri, "--table", "scores")
    assert done.returncode == 2
    assert "The table scores of" in done.stderr
    assert "has nothing in the column output" in done.stderr
    read(python, "create lancedb", uri, "papers")
    add_output(engine, f"file://{tmp_path}/vectors", items)
    done = load(python, "lancedb", str(tmp_path / "vectors"), "--uri", uri, "--table", "papers")
    assert done.returncode == 2
    assert "Load into another one." in done.stderr


# -- Qdrant ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_collection_of_qdrant_gets_every_row_once_however_often_it_is_loaded(
    python: Path, engine: Engine, out: Path, tmp_path: Path
) -> None:
    arguments = ("--path", str(tmp_path / "qdrant"), "--collection", "papers")
    rows: Rows = []
    for _ in range(2):
        done = load(python, "qdrant", str(out), *arguments)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("11 rows of ")
        rows = read(python, "qdrant", str(tmp_path / "qdrant"), "papers")
        assert_rows(rows, vectors_of(ITEMS))
    for row in rows:
        assert row["id"] == str(uuid.uuid5(uuid.NAMESPACE_URL, row["key"]))
        assert row["distance"] == "Cosine"
    assert {row["key"]: row.get("lang") for row in rows}["k'ü"] == "de"
    later = [Item("m3", b"another"), Item("new", b"text")]
    add_output(engine, f"file://{tmp_path}/later", later)
    assert load(python, "qdrant", str(tmp_path / "later"), *arguments).returncode == 0
    rows = read(python, "qdrant", str(tmp_path / "qdrant"), "papers")
    assert_rows(rows, vectors_of(ITEMS) | vectors_of(later))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qdrant_keeps_the_length_of_vectors_that_are_not_normalized(
    python: Path, engine: Engine, tmp_path: Path
) -> None:
    add_output(engine, f"file://{tmp_path}/out", ITEMS, replace(SPEC, normalize=False, vector_type="float16"))
    done = load(python, "qdrant", str(tmp_path / "out"), "--path", str(tmp_path / "q"), "--collection", "a")
    assert done.returncode == 0, done.stderr
    table = read_table(f"{tmp_path}/out")
    vectors = np.array(table.column("embedding").to_pylist(), np.float32)
    rows = read(python, "qdrant", str(tmp_path / "q"), "a")
    assert rows[0]["distance"] == "Dot"
    assert_rows(rows, dict(zip(table.column("key").to_pylist(), vectors, strict=True)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_qdrant_refuses_a_collection_of_another_kind_and_results_without_vectors(
    python: Path, engine: Engine, out: Path, tmp_path: Path
) -> None:
    path = str(tmp_path / "qdrant")
    read(python, "create qdrant", path, "papers")
    add_output(engine, f"file://{tmp_path}/scores", make_items(2), SCORES)
    for folder, collection, sentence in (
        (str(out), "papers", "has vectors of 5 dimensions, and this output has 8."),
        (str(out), "papers-named", "has no unnamed vector."),
        (f"{tmp_path}/scores", "scores", "This output has scores and no vectors"),
    ):
        done = load(python, "qdrant", folder, "--path", path, "--collection", collection)
        assert done.returncode == 2, done.stderr
        assert sentence in done.stderr
    done = load(python, "qdrant", str(out), "--url", "http://127.0.0.1:1", "--collection", "papers")
    assert done.returncode == 3
    assert "Qdrant at http://127.0.0.1:1 cannot be used" in done.stderr
    done = load(python, "qdrant", str(out), "--collection", "papers")
    assert done.returncode == 2
    assert "Give either --url" in done.stderr


@contextmanager
def qdrant_double() -> Iterator[tuple[str, list[tuple[str, str, str | None, Any]]]]:
    """Answer as a server of Qdrant without collections would, and keep (method, path, key, body) of each request."""
    asked: list[tuple[str, str, str | None, Any]] = []

    class Answers(QuietHandler):
        def answer(self) -> None:
            key = self.headers["api-key"]
            asked.append((self.command, self.path, key, json.loads(self.read_body() or "null")))
            is_allowed = key == "secret"
            result: Any = {"operation_id": 1, "status": "completed"} if "/points" in self.path else True
            result = {"exists": False} if self.path.endswith("/exists") else result
            content = {"result": result, "status": "ok", "time": 0} if is_allowed else {"status": "no key"}
            kind = {"Content-Type": "application/json"}
            self.reply(200 if is_allowed else 403, json.dumps(content).encode(), kind)

    with serving_http(Answers) as url:
        yield url, asked


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_server_of_qdrant_gets_a_request_for_each_batch_with_the_key_and_waits_for_it(
    python: Path, out: Path, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with qdrant_double() as (url, asked):
        arguments = ("qdrant", str(out), "--url", url, "--collection", "papers", "--distance", "euclid")
        refused = load(python, *arguments)
        assert refused.returncode == 3
        assert f"Qdrant at {url} answers 403" in refused.stderr
        asked.clear()
        done = load(python, *arguments, "--api-key-file", str(key))
    assert done.returncode == 0, done.stderr
    (_, exists, _, _), (_, created, _, params), *uploads = asked
    assert (exists, created) == ("/collections/papers/exists", "/collections/papers")
    assert (params["vectors"]["size"], params["vectors"]["distance"]) == (8, "Euclid")
    assert [path for _, path, _, _ in uploads] == ["/collections/papers/points?wait=true"] * 3
    points = [point for *_, body in uploads for point in body["points"]]
    assert [point["id"] for point in points] == [
        str(uuid.uuid5(uuid.NAMESPACE_URL, item.key)) for item in ITEMS
    ]
    assert points[0]["payload"] == {"lang": "de", "key": ITEMS[0].key}
    np.testing.assert_allclose(points[-1]["vector"], vector_of(ITEMS[-1].text), rtol=1e-6)
