import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.unit.fake_api import FakeApi, serving_fake_api
from vectormill.cli.app import main
from vectormill.cli.service import REPORT_COLUMNS, describe_plan, summarize_worker
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.described import describe_inventory
from worker.placement.placement import part_json
from worker.plan import plan_worker
from worker.settings import load_worker_settings

LINES = '{"key": "a", "text": "one"}\n{"key": "b", "text": " "}\n'


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with serving_fake_api() as fake:
        monkeypatch.setenv("VECTORMILL_API_URL", fake.url)
        yield fake


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "in.jsonl"
    path.write_text(LINES)
    return str(path)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def read_json(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_submit_prints_the_id_alone_so_that_a_script_can_take_it(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run("submit", texts, "--collection", "docs", "--priority", "0", "--metadata", '{"a": 1}', "--gzip")
        == 0
    )
    shown = capsys.readouterr()
    assert shown.out == "job-1\n"
    assert "2 items" in shown.err
    assert api.jobs["job-1"]["collection"] == "docs"
    assert api.jobs["job-1"]["metadata"] == {"a": 1}
    assert api.headers[-1]["Content-Encoding"] == "gzip"


def test_submit_reads_standard_input(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stdin:
        buffer = io.BytesIO(LINES.encode())

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert run("submit", "-", "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["num_items"] == 2


def test_a_second_text_goes_along_whatever_its_field_is_called(api: FakeApi, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"key": "a", "text": "x", "text_pair": "y", "answer": "z"}\n{"key": "b", "text": "w"}'
    )
    assert run("submit", str(tmp_path / "in.jsonl")) == 0
    assert run("submit", str(tmp_path / "in.jsonl"), "--pair-field", "answer") == 0
    found = [[item.get("text_pair") for item in api.items[job]] for job in ("job-1", "job-2")]
    assert found == [["y", None], ["z", None]]


def test_the_same_idempotency_key_makes_one_job(api: FakeApi, texts: str) -> None:
    for _ in range(2):
        run("submit", texts, "--idempotency-key", "nightly")
    assert list(api.jobs) == ["job-1"]


@pytest.mark.parametrize("metadata", ["[1]", "{"])
def test_metadata_that_is_no_object_is_refused(
    api: FakeApi, texts: str, metadata: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("submit", texts, "--metadata", metadata) == 2
    assert "--metadata" in capsys.readouterr().err
    assert not api.jobs


def test_a_broken_line_names_file_and_line_and_leaves_no_job(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(LINES + "oops\n")
    assert run("submit", str(tmp_path / "in.jsonl")) == 2
    assert "in.jsonl, line 3: it is not JSON" in capsys.readouterr().err
    assert not api.jobs


def test_jobs_are_listed_newest_first_up_to_a_limit(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(4):
        run("submit", texts)
    capsys.readouterr()
    assert run("jobs", "--limit", "3") == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == [
        "job-4",
        "job-3",
        "job-2",
    ]
    assert run("jobs", "--state", "queued", "--json") == 0
    assert [job["id"] for job in read_json(capsys.readouterr().out)] == ["job-4", "job-3", "job-2", "job-1"]


def test_status_shows_the_job_as_it_stands(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("submit", texts)
    capsys.readouterr()
    assert run("status", "job-1") == 0
    assert "state\trunning" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "code"), [("completed", 0), ("completed_with_errors", 1), ("failed", 4), ("cancelled", 4)]
)
def test_a_watched_job_tells_by_the_exit_code_how_it_ended(
    api: FakeApi, texts: str, state: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    api.final_state = state
    run("submit", texts)
    capsys.readouterr()
    assert run("status", "job-1", "--watch", "--json") == code
    shown = capsys.readouterr()
    assert read_json(shown.out)[0]["state"] == state
    assert shown.err.splitlines() == ["running: 0 of 2 items", f"{state}: 2 of 2 items · 1 failed"]


def test_a_job_that_is_not_there_is_bad_input(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "job-9") == 2
    assert capsys.readouterr().err == "vectormill: There is no job job-9.\n"


def test_what_a_job_waits_for_is_told_when_it_is_submitted_and_in_its_status(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.waiting_because = "No live worker serves mini; start one with `vectormill worker --model mini`."
    assert run("submit", texts) == 0
    shown = capsys.readouterr()
    assert shown.out == "job-1\n"
    assert api.waiting_because in shown.err.splitlines()
    assert run("status", "job-1") == 0
    assert f"waiting_because\t{api.waiting_because}" in capsys.readouterr().out.splitlines()


def test_jobs_are_paused_and_resumed(api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("submit", texts)
    assert run("pause", "job-1") == 0
    assert "state\tpaused" in capsys.readouterr().out
    assert run("resume", "job-1", "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["state"] == "queued"


def test_jobs_are_cancelled_and_retried(api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    run("submit", texts)
    assert run("cancel", "job-1") == 0
    assert "state\tcancelled" in capsys.readouterr().out
    assert run("retry", "job-1", "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["state"] == "queued"


def test_a_job_is_deleted_once_and_only_when_it_has_ended(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("submit", texts)
    assert run("delete", "job-1") == 2
    assert "cancel it first" in capsys.readouterr().err
    api.jobs["job-1"] |= {"state": "cancelling", "_is_new": True}  # a worker has not heard of it yet
    assert run("delete", "job-1") == 0
    assert "Deleted job job-1." in capsys.readouterr().err
    assert run("delete", "job-1") == 2
    assert "There is no job job-1" in capsys.readouterr().err


def test_texts_that_were_cut_are_told_and_their_keys_listed(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"key": key, "text": key * 101}) + "\n" for key in "abc"))
    run("submit", str(path))
    capsys.readouterr()
    assert run("status", "job-1") == 0
    shown = capsys.readouterr()
    assert "3 texts were longer than 256 tokens and cut there" in shown.err
    assert "3 texts were" not in shown.out  # that is for programs
    assert run("truncated", "job-1") == 0
    assert capsys.readouterr().out == "a\nb\nc\n"
    assert run("truncated", "job-1", "--json") == 0
    assert read_json(capsys.readouterr().out) == [{"key": "a"}, {"key": "b"}, {"key": "c"}]


def test_what_becomes_of_long_texts_is_asked_of_the_api(api: FakeApi, texts: str) -> None:
    assert run("submit", texts, "--long-texts", "passages", "--passage-overlap", "16") == 0
    assert run("submit", texts, "--long-texts", "summarize") == 2
    assert run("submit", texts, "--no-truncate") == 0
    sent = [parameters for method, path, parameters in api.requests if method == "POST"]
    assert [parameters.get("long_texts") for parameters in sent] == ["passages", None]
    assert (sent[0]["passage_overlap"], sent[1]["truncate"]) == ("16", "false")


def test_errors_are_listed_with_code_and_reason(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("submit", texts)
    capsys.readouterr()
    assert run("errors", "job-1") == 0
    assert capsys.readouterr().out == "b\tempty_text\tthe text is empty or only white space\n"
    assert run("errors", "job-1", "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["key"] == "b"


def test_vectors_are_exported_in_the_format_of_the_name(api: FakeApi, texts: str, tmp_path: Path) -> None:
    run("submit", texts)
    for name in ("out.jsonl", "out.parquet", "out.npy"):
        assert run("export", "job-1", "-o", str(tmp_path / name)) == 0
    assert read_json((tmp_path / "out.jsonl").read_text()) == [{"key": "a", "embedding": [3.0, 1.0]}]
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [{"key": "a", "embedding": [3.0, 1.0]}]
    assert (tmp_path / "out.npy.keys.txt").read_text() == '"a"\n'


def test_vectors_can_be_piped(api: FakeApi, texts: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run("submit", texts)
    capfdbinary.readouterr()
    assert run("export", "job-1", "-o", "-") == 0
    assert json.loads(capfdbinary.readouterr().out) == {"key": "a", "embedding": [3.0, 1.0]}


def test_a_matrix_is_not_piped_because_its_keys_would_be_lost(api: FakeApi, texts: str) -> None:
    run("submit", texts)
    assert run("export", "job-1", "-o", "-", "--format", "npy") == 2


def test_a_search_prints_the_nearest_keys(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("submit", texts)
    capsys.readouterr()
    assert run("search", "docs", "how to", "--limit", "1") == 0
    printed = capsys.readouterr()
    assert printed.out == "0.5000\ta\t\n"
    assert "all of about 12,345 rows of docs were read" in printed.err
    assert run("search", "indexed", "how to", "--json") == 0
    assert "index" not in capsys.readouterr().err
    assert run("search", "nowhere", "how to", "--json") == 2


def test_status_without_a_job_shows_what_the_workers_do(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("status") == 0
    cells = capsys.readouterr().out.rstrip("\n").split("\t")
    assert cells == [
        "mini-cpu0@host", "mini", "running", "cpu:0", "replicate: layers 0-5", "0.16 GB in 1.5 s", "7,400", "2.1%",
        "1.5 of 24 GiB", "-", "run",
    ]  # fmt: skip
    assert run("status", "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["report"]["padding_waste"] == 0.021
    assert run("status", "--watch") == 2
    assert "--watch needs a JOB" in capsys.readouterr().err


def test_status_of_a_job_says_what_bounded_it_in_words(
    api: FakeApi, texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run("submit", texts)
    capsys.readouterr()
    assert run("status", "job-1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bound by\trun (the model: the device was computing in 90% of the time)" in lines
    assert any(line.startswith("stages\ttokenize 12% · run 90% (") for line in lines)
    assert not any("{'seconds'" in line for line in lines)


@pytest.mark.parametrize("report", [{}, {"device": "cpu"}])
def test_a_worker_that_says_little_is_shown_all_the_same(report: dict[str, Any]) -> None:
    row = summarize_worker({"name": "w", "model": "m", "report": report})
    assert set(row) == {"name", "model", *REPORT_COLUMNS}
    assert (row["memory"], row["tokens/s"], row["bound by"], row["plan"], row["loaded"]) == ("-",) * 5


@pytest.mark.parametrize(
    ("devices", "strategy", "expected"),
    [
        ("1x24GiB", "auto", "replicate: layers 0-5"),
        ("2x24GiB", "pipeline", "pipeline: layers 0-2 | 3-5"),
        ("2x24GiB", "fully_sharded", "fully sharded: layers 0-5, each over 2 devices"),
    ],
)
def test_a_worker_s_part_of_the_plan_is_shown_in_few_words(
    devices: str, strategy: str, expected: str
) -> None:
    inventory = describe_inventory(devices)
    card = Registry({}).card(DEFAULT_MODEL)
    placement = plan_worker(card, inventory, load_worker_settings(strategy=strategy))
    part = part_json(placement, placement.replicas[0])
    assert describe_plan({"placement": part}) == expected
    # What a worker of the release before reported, of its own part alone, and shared ones only.
    older = {name: value for name, value in part.items() if name != "plan"}
    assert describe_plan({"placement": older}) == expected


def test_models_and_workers_are_listed_with_what_they_chose_and_why(
    api: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("models") == 0
    assert capsys.readouterr().out.startswith("mini\tembed\t2\t256\t")
    assert run("workers") == 0
    assert "\topenvino (the faster backend on CPUs)\t" in capsys.readouterr().out
    assert run("workers", "--json") == 0
    assert read_json(capsys.readouterr().out)[0]["name"] == "mini-cpu0@host"
