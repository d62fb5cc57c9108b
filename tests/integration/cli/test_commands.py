"""The commands of jobs, models and workers against a real API, whose workers are stood in for."""

import asyncio
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, encode_waiting, encoding_meanwhile
from tests.architecture.test_extras import command
from tests.architecture.test_extras import run as run_with_the_base_alone
from tests.commands import run
from tests.database import ask, execute, load_payload
from tests.services import connected_engine, migrated_database
from tests.unit.deployment.test_registry import write_model
from vectormill.cli import jobs
from vectormill.client import AsyncClient, Client
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.problems import ApiError
from vectormill.workers.workers import beat_worker

LINES = '{"key": "a", "text": "one"}\n{"key": "b", "text": " "}\n'
# The stand-in worker makes vectors of this width.
SMALL = ("--dimensions", "8")


@pytest.fixture(scope="module")
def engine(postgres_url: str) -> Iterator[Engine]:
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with api_client(engine) as client:
        yield str(client.base_url)


@pytest.fixture(autouse=True)
def _named_api(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VECTORMILL_API_KEY", raising=False)
    monkeypatch.setenv("VECTORMILL_API_URL", url)
    execute(engine, "DELETE FROM vectormill.workers")


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as client:
        yield client


@pytest.fixture
def texts(tmp_path: Path) -> str:
    (tmp_path / "in.jsonl").write_text(LINES)
    return str(tmp_path / "in.jsonl")


@pytest.fixture
def job(client: Client) -> str:
    """A job of one text that can be encoded, and one that cannot."""
    return client.submit(map(json.loads, LINES.splitlines()), dimensions=8)["id"]


def read_json(lines: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.splitlines()]


def beat(engine: Engine, slots: int = 6, name: str = "cpu0@host", **report: Any) -> None:
    ask(engine, beat_worker, name, uuid4(), DEFAULT_MODEL, slots, {"state": "running"} | report)


def test_submit_prints_the_id_alone_and_sends_what_was_asked_for(
    client: Client, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--priority", "0", "--metadata", '{"a": 1}', "--gzip", "--long-texts", "passages")
    assert run("submit", texts, *SMALL, *more) == 0
    shown = capsys.readouterr()
    found = client.job(shown.out.rstrip("\n"))
    assert (found["priority"], found["metadata"], found["num_items"]) == (0, {"a": 1, "file": "in.jsonl"}, 2)
    assert found["options"]["long_texts"] == "passages"
    assert "2 items submitted" in shown.err
    assert "No live worker serves" in shown.err  # what it waits for
    assert run("submit", texts, "--long-texts", "summarize") == 2


def test_submit_reads_standard_input_and_repeats_no_job_under_one_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = set()
    for _ in range(2):
        stdin = type("Stdin", (), {"buffer": io.BytesIO(LINES.encode())})
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("submit", "-", "--json", "--idempotency-key", "nightly", *SMALL) == 0
        (submitted,) = read_json(capsys.readouterr().out)
        ids.add(submitted["id"])
    assert len(ids) == 1


def test_columns_of_a_file_become_metadata_of_items_and_its_format_can_be_named(
    tmp_path: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.data"
    path.write_text("id,text,page\na,one,1\nb,two,2\n")
    named = ("--format", "csv", "--metadata-field", "page")
    assert run("submit", str(path), *named, "--collection", "paged", *SMALL) == 0
    job = capsys.readouterr().out.strip()
    ((chunk,),) = execute(engine, "SELECT id FROM vectormill.chunks WHERE job_id = :job", job=job)
    items = ask(engine, load_payload, chunk)
    assert dict(zip(items.keys, map(json.loads, items.metadata), strict=True)) == {
        "a": {"page": "1"},
        "b": {"page": "2"},
    }
    (tmp_path / "texts").mkdir()
    for wrong in ((str(tmp_path / "texts"), *named), ("s3://nowhere/x.csv", "--strict")):
        assert run("submit", *wrong) == 2
        told = capsys.readouterr().err
        assert "leave out the format" in told or "files that this command sends" in told


def test_what_is_wrong_with_a_submission_is_told_and_leaves_no_job(
    client: Client, tmp_path: Path, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(list(client.jobs()))
    for metadata in ("[1]", "{", '{"a": NaN}'):
        assert run("submit", texts, "--metadata", metadata) == 2
        assert "--metadata" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text(LINES + "oops\n")
    assert run("submit", texts) == 2
    assert "in.jsonl, line 3: not valid JSON" in capsys.readouterr().err
    assert len(list(client.jobs())) == before


def test_jobs_are_selected_by_collection_and_days(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    made = client.submit(["one"], dimensions=8, collection="days")

    def list_ids(*options: str) -> list[str]:
        assert run("jobs", "--collection", "days", *options, "--json") == 0
        return [job["id"] for job in read_json(capsys.readouterr().out)]

    assert list_ids() == list_ids("--since", made["created_at"]) == [made["id"]]
    assert list_ids("--since", "2026-01-01", "--until", "2026-01-02") == []
    assert run("jobs", "--until", "tomorrow") == 2
    assert "--until expects an ISO 8601 moment" in capsys.readouterr().err


def test_jobs_are_listed_newest_first_up_to_a_limit(
    client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [client.submit(["one"], dimensions=8)["id"] for _ in range(4)]
    assert run("jobs", "--limit", "3") == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == ["id", *ids[:0:-1]]
    assert run("jobs", "--state", "queued", "--limit", "4", "--json") == 0
    assert [each["id"] for each in read_json(capsys.readouterr().out)] == ids[::-1]


def test_a_job_is_steered_to_its_end_and_deleted_only_then(
    job: str, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pause", job) == 0
    assert "state\tpaused" in capsys.readouterr().out
    assert run("resume", job, "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["state"] == "queued"
    assert run("delete", job) == 2
    assert "cancel it first" in capsys.readouterr().err
    assert run("cancel", job) == 0
    assert "state\tcancelled" in capsys.readouterr().out
    assert run("status", job, "--watch", "--json") == 4
    assert run("delete", job) == 0
    assert f"Deleted job {job}." in capsys.readouterr().err
    assert run("status", job) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_job_that_is_watched_tells_by_line_and_code_how_it_ended(
    job: str, client: Client, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    with encoding_meanwhile(engine):
        assert run("status", job, "--watch", "--json") == 1
        shown = capsys.readouterr()
        assert read_json(shown.out)[0]["state"] == "completed_with_errors"
        assert shown.err.splitlines()[-1].startswith("completed_with_errors: 2 of 2 items · 1 failed")
        sound = client.submit(["one"], dimensions=8)["id"]
        assert run("status", sound, "--watch") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "state\tcompleted" in lines
    assert any(line.startswith("bottleneck\t") for line in lines)
    assert not any("{'seconds'" in line for line in lines)


def test_failed_and_cut_items_are_listed(
    client: Client, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    items = [{"key": "a", "text": "long text"}, {"key": "b", "text": " "}]
    job = client.submit(items, dimensions=8)["id"]
    encode_waiting(engine)
    assert run("errors", job) == 0
    assert capsys.readouterr().out.startswith("key\tcode\tdetail\nb\tempty_text\t")
    assert run("errors", job, "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["key"] == "b"
    assert run("truncated", job) == 0
    assert capsys.readouterr().out == "a\n"
    assert run("status", job) == 0
    assert "1 text was longer than" in capsys.readouterr().err
    assert run("retry", job, "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["state"] in ("queued", "running")
    encode_waiting(engine)


def test_vectors_are_exported_in_the_format_of_the_name_or_piped(
    job: str, engine: Engine, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    encode_waiting(engine)
    for name in ("out.jsonl", "out.parquet", "out.npy"):
        assert run("export", job, "-o", str(tmp_path / name)) == 0
    (row,) = read_json((tmp_path / "out.jsonl").read_text())
    assert (row["key"], len(row["embedding"])) == ("a", 8)
    (exported,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert exported["embedding"] == pytest.approx(row["embedding"])
    assert (tmp_path / "out.npy.keys.txt").read_text() == '"a"\n'
    capfdbinary.readouterr()
    assert run("export", job, "-o", "-") == 0
    assert json.loads(capfdbinary.readouterr().out) == row
    assert run("export", job, "-o", "-", "--format", "npy") == 2  # its keys would be lost


def encode(texts: list[str], directory: Path, *more: str) -> int:
    rows = [{"key": str(index), "text": text} for index, text in enumerate(texts)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run("encode", str(directory / "in.jsonl"), "-o", str(directory / "out.parquet"), *SMALL, *more)


def test_texts_go_in_vectors_come_out_and_failed_items_are_told_and_kept(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = tmp_path / "failed.jsonl"
    with encoding_meanwhile(engine):
        assert encode(["one", "four"], tmp_path, "--errors", str(errors)) == 0
        assert capsys.readouterr().out.startswith("2 vectors in ")
        assert pq.read_table(tmp_path / "out.parquet").column("key").to_pylist() == ["0", "1"]
        assert errors.read_bytes() == b""
        texts = ["one", *[""] * 12]
        assert encode(texts, tmp_path, "--errors", str(errors), "--json") == 1
        shown = capsys.readouterr()
        assert json.loads(shown.out)["num_failed"] == shown.err.count("failed: ") + 2 == 12
        assert len(errors.read_text().splitlines()) == 12
        assert pq.read_table(tmp_path / "out.parquet").num_rows == 1
        assert encode(texts, tmp_path) == 1
    assert "… and 2 more; --errors FILE lists all." in capsys.readouterr().err


def test_what_cannot_be_written_or_read_is_refused_before_anything_is_submitted(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = len(list(client.jobs()))
    for out, words in (
        ("out.txt", "Cannot tell the format"),
        ("missing/out.npy", "does not exist; create it first"),
        (".", "Cannot tell the format"),
    ):
        assert encode(["one"], tmp_path, "-o", str(tmp_path / out)) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run("encode", str(tmp_path / "empty"), "-o", str(tmp_path / "out.npy")) == 2
    assert "contains no files" in capsys.readouterr().err
    (tmp_path / "empty" / "photo.png").write_bytes(b"\x89PNG")
    assert run("encode", str(tmp_path / "empty"), "-o", str(tmp_path / "out.npy"), "--strict") == 2
    assert "photo.png is not UTF-8" in capsys.readouterr().err
    assert len(list(client.jobs())) == before
    assert encode(["one"], tmp_path, "--api-url", "http://127.0.0.1:1") == 3


def test_an_interrupted_job_is_cancelled_and_writes_nothing(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for interruption, code in ((KeyboardInterrupt(), 130), (SystemExit(143), 143)):

        def interrupted(*_: Any, error: BaseException = interruption, **__: Any) -> dict[str, Any]:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(Client, "wait", interrupted)
            assert encode(["one"], tmp_path) == code
        assert next(client.jobs())["state"] == "cancelled"
        assert "cancelled, and nothing was written" in capsys.readouterr().err
    monkeypatch.setattr(jobs, "watch_job", lambda client, job, **_: client.cancel(job["id"]))
    monkeypatch.setattr("vectormill.cli.encode.watch_job", jobs.watch_job)
    assert encode(["one"], tmp_path) == 4  # somebody else has cancelled it
    assert "cancelled" in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


def test_a_model_that_no_worker_loads_ends_the_command_with_the_reason_and_leaves_the_job(
    client: Client, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.0)
    beat(engine, slots=0, state="dead", state_reason="openvino was killed by SIGFPE")
    assert encode(["one"], tmp_path) == 3
    said = capsys.readouterr().err
    waiting = next(client.jobs())
    assert "killed by SIGFPE" in said
    assert f"`vectormill status {waiting['id']} --watch`" in said
    assert waiting["state"] == "queued"
    assert not (tmp_path / "out.parquet").exists()
    with encoding_meanwhile(engine):  # who wishes it waits
        assert encode(["one"], tmp_path, "--wait") == 0


def test_a_job_that_every_live_worker_has_failed_to_load_is_refused_unless_it_may_wait(
    client: Client, engine: Engine, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--idempotency-key", "before")
    assert run("submit", texts, *SMALL, *key) == 0, "no worker is up, which is told and refused to nobody"
    before = len(list(client.jobs()))
    beat(engine, slots=0, state="dead", state_reason="openvino was killed by SIGFPE")
    try:
        capsys.readouterr()
        assert run("submit", texts, *SMALL) == 2
        said = capsys.readouterr().err
        assert "killed by SIGFPE" in said
        assert "--wait-for-worker" in said
        with pytest.raises(ApiError) as refused:
            client.submit([{"key": "a", "text": "one"}], dimensions=8)
        assert (refused.value.status, refused.value.title) == (409, "Model not served")
        assert len(list(client.jobs())) == before
        assert run("submit", texts, *SMALL, *key) == 0, "the job that is there already is not refused"
        assert run("submit", texts, *SMALL, "--wait-for-worker") == 0
        assert "killed by SIGFPE" in capsys.readouterr().err, "what it waits for"
        assert (
            client.submit([{"key": "a", "text": "one"}], dimensions=8, wait_for_worker=True)["state"]
            == "queued"
        )
        beat(engine, name="cpu1@host")
        assert run("submit", texts, *SMALL) == 0, "one of two can"
    finally:
        execute(engine, "DELETE FROM vectormill.workers")


def test_a_model_that_cannot_encode_is_told_before_a_stack_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VECTORMILL_API_URL")
    data = ("--data-dir", str(tmp_path / "data"))
    assert encode(["one"], tmp_path, *data, "--model", "all-MiniLM-L6") == 2
    assert "Did you mean 'all-MiniLM-L6-v2'?" in capsys.readouterr().err
    for architecture, words in (
        ("BertForMaskedLM", "a masked language model"),
        ("Qwen2ForCausalLM", "a causal language model"),
        ("BertForTokenClassification", "a model that labels tokens"),
    ):
        config = {"model_type": "bert", "hidden_size": 4, "max_position_embeddings": 64}
        model = write_model(tmp_path / architecture, config=config | {"architectures": [architecture]})
        monkeypatch.setenv("VECTORMILL_MODELS", json.dumps({"mine": {"path": str(model)}}))
        assert encode(["one"], tmp_path, *data, "--model", "mine") == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_job_is_submitted_and_watched_with_the_packages_of_the_base_alone(
    url: str, engine: Engine, tmp_path: Path, texts: str
) -> None:
    vectors = tmp_path / "vectors.jsonl"
    with encoding_meanwhile(engine):
        told = run_with_the_base_alone(command("encode", texts, "-o", str(vectors), *SMALL, "--api-url", url))
    assert told.returncode == 1, told.stderr  # one of the two texts is empty
    assert len(vectors.read_text(encoding="utf-8").splitlines()) == 1


def test_vectors_come_out_in_the_shape_that_is_asked_for_of_either_client(
    url: str, client: Client, engine: Engine
) -> None:
    items = [{"key": f"{number}", "text": "x" * (1 + number)} for number in range(600)]

    async def give() -> Any:
        for item in items:
            yield item

    async def ask() -> tuple[list[str], list[str]]:
        async with AsyncClient(url) as asking:
            job = await asking.submit(give(), gzip=True, dimensions=8)
            await asking.wait(job["id"])
            keys, _ = await asking.vectors(job["id"]).to_numpy()
            return keys, [row["key"] async for row in asking.vectors(job["id"])]

    with encoding_meanwhile(engine):
        keys, streamed = asyncio.run(ask())
    assert keys == streamed == [item["key"] for item in items]
    results = client.vectors(next(client.jobs())["id"])
    keys, matrix = results.to_numpy()
    assert (matrix.dtype, matrix.shape) == (np.float32, (600, 8))
    assert results.to_arrow()["key"].to_pylist() == results.to_pandas()["key"].tolist() == keys
    assert results.to_polars()["embedding"].to_numpy().tolist() == matrix.tolist()
    assert [row["key"] for row in results] == keys, "and row by row after all"
