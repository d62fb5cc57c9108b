import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.unit.deployment.test_registry import write_model
from tests.unit.fake_api import FakeApi, serving_fake_api
from vectormill.cli import jobs
from vectormill.cli.app import main
from vectormill.client import Client


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving_fake_api() as fake:
        yield fake


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def encode(api: FakeApi, directory: Path, texts: list[str], *more: str) -> int:
    rows = [{"key": str(index), "text": text} for index, text in enumerate(texts)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = str(directory / "out.parquet")
    return run("encode", str(directory / "in.jsonl"), "-o", out, "--api-url", api.url, *more)


def test_texts_go_in_and_vectors_come_out(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert encode(api, tmp_path, ["one", "four"], "--model", "mini", "--collection", "docs") == 0
    assert pq.read_table(tmp_path / "out.parquet").column("key").to_pylist() == ["0", "1"]
    assert capsys.readouterr().out.startswith("2 vectors in ")
    assert (api.jobs["job-1"]["model"], api.jobs["job-1"]["collection"]) == ("mini", "docs")


def test_failed_items_are_told_and_kept_and_change_the_exit_code(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["one", *[""] * 12]
    assert encode(api, tmp_path, texts, "--errors", str(tmp_path / "failed.jsonl"), "--json") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out)["num_failed"] == 12
    assert shown.err.count("failed: ") == 10
    assert len((tmp_path / "failed.jsonl").read_text().splitlines()) == 12
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 1
    assert encode(api, tmp_path, texts) == 1
    assert "… and 2 more; --errors FILE has all." in capsys.readouterr().err


def test_texts_that_were_cut_are_told_with_the_way_out(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert encode(api, tmp_path, ["one", "long " * 30]) == 0
    assert "1 text was longer than 256 tokens and cut there" in capsys.readouterr().err
    assert encode(api, tmp_path, ["one"]) == 0
    assert "longer than" not in capsys.readouterr().err


def test_a_prompt_that_the_authors_want_and_nobody_gave_is_told(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api.unprompted = 'The authors have each text begin with "query: ".'
    assert encode(api, tmp_path, ["one"]) == 0
    assert run("status", "job-1", "--api-url", api.url) == 0
    assert (
        capsys.readouterr().err.count('without a prompt. The authors have each text begin with "query: "')
        == 2
    )
    assert encode(api, tmp_path, ["one"], "--prompt", "query: ") == 0
    assert "without a prompt" not in capsys.readouterr().err


def test_the_file_of_errors_is_there_and_empty_when_nothing_failed(api: FakeApi, tmp_path: Path) -> None:
    assert encode(api, tmp_path, ["one"], "--errors", str(tmp_path / "failed.jsonl")) == 0
    assert (tmp_path / "failed.jsonl").read_bytes() == b""


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_a_job_that_did_not_complete_writes_nothing(
    api: FakeApi, tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.final_state = state
    assert encode(api, tmp_path, ["one"]) == 4
    assert f"Job job-1 {state}" in capsys.readouterr().err
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("out.txt", "no known extension"),
        ("missing/out.npy", "There is no directory"),
        (".", "no known extension"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_anything_is_submitted(
    api: FakeApi, tmp_path: Path, out: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert encode(api, tmp_path, ["one"], "-o", str(tmp_path / out)) == 2
    assert words in capsys.readouterr().err
    assert not api.requests


@pytest.mark.parametrize(("interruption", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupted_job_is_cancelled(
    api: FakeApi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    interruption: BaseException,
    code: int,
) -> None:
    def interrupted(self: Client, *arguments: Any, **options: Any) -> dict[str, Any]:
        raise interruption

    monkeypatch.setattr(Client, "wait", interrupted)
    assert encode(api, tmp_path, ["one"]) == code
    assert api.jobs["job-1"]["state"] == "cancelled"
    assert "cancelled, nothing was written" in capsys.readouterr().err


def test_a_model_that_no_worker_loads_ends_the_command_with_the_reason_and_leaves_the_job(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.0)
    api.load_failure = "openvino was ended by SIGFPE"
    assert encode(api, tmp_path, ["one"]) == 3
    said = capsys.readouterr().err
    assert "ended by SIGFPE" in said
    assert "`vectormill status job-1 --watch`" in said
    assert api.jobs["job-1"]["state"] == "queued"
    assert not (tmp_path / "out.parquet").exists()


def test_who_wishes_it_waits_until_a_worker_has_loaded_the_model(
    api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.0)
    api.load_failure = "openvino was ended by SIGFPE"
    poll, answers = api.poll, []

    def load_at_the_second(job: dict[str, Any]) -> dict[str, Any]:
        answers.append(job["waiting_because"])
        if len(answers) == 2:
            api.load_failure = None
        return poll(job)

    monkeypatch.setattr(api, "poll", load_at_the_second)
    assert encode(api, tmp_path, ["one"], "--wait") == 0
    assert any("SIGFPE" in (answer or "") for answer in answers)


def test_a_service_that_is_away_has_its_own_code(tmp_path: Path, api: FakeApi) -> None:
    api.url = "http://127.0.0.1:1"
    assert encode(api, tmp_path, ["one"]) == 3


def test_an_unknown_model_is_told_before_a_stack_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VECTORMILL_API_URL", raising=False)
    (tmp_path / "in.jsonl").write_text('{"text": "one"}')
    data, out = str(tmp_path / "data"), str(tmp_path / "out.npy")
    arguments = (
        "encode",
        str(tmp_path / "in.jsonl"),
        "-o",
        out,
        "--data-dir",
        data,
        "--model",
        "all-MiniLM-L6",
    )
    assert run(*arguments) == 2
    assert "Did you mean 'all-MiniLM-L6-v2'?" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("name", "architecture", "words"),
    [
        ("bert-base-uncased", "BertForMaskedLM", "a masked language model"),
        ("qwen2", "Qwen2ForCausalLM", "a causal language model"),
        (
            "colbertv2.0",
            "HF_ColBERT",
            "a late-interaction model (ColBERT), which keeps a vector for each token",
        ),
        ("Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", "a generative reranker"),
    ],
)
def test_a_model_that_nothing_says_how_to_encode_ends_the_command_before_anything_is_started(
    tmp_path: Path, name: str, architecture: str, words: str
) -> None:
    config = {"model_type": "bert", "hidden_size": 4, "max_position_embeddings": 64}
    model = write_model(tmp_path / name, config=config | {"architectures": [architecture]})
    (tmp_path / "in.jsonl").write_text('{"text": "one"}')
    given = [tmp_path / "in.jsonl", "-o", tmp_path / "out.npy", "--data-dir", tmp_path / "data"]
    ended = subprocess.run(
        [sys.executable, "-m", "vectormill.cli", "encode", *map(str, given), "--model", name],
        env={"PATH": os.defpath, "VECTORMILL_MODELS": json.dumps({name: {"path": str(model)}})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert words in ended.stderr
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize("flags", [("--strict",), ()])
def test_input_that_cannot_be_read_ends_the_command_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    (tmp_path / "in").mkdir()
    if flags:
        (tmp_path / "in" / "photo.png").write_bytes(b"\x89PNG")
    out, data_dir = str(tmp_path / "out.npy"), str(tmp_path / "data")
    assert run("encode", str(tmp_path / "in"), "-o", out, "--data-dir", data_dir, *flags) == 2
    shown = capsys.readouterr().err
    assert ("photo.png is not UTF-8" if flags else "holds no files") in shown
    assert "Starting" not in shown
