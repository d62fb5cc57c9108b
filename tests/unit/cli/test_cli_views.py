"""Tests of how commands print jobs, runs, workers and texts, and of how they parse their arguments."""

import io
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from vectormill.cli.encode import mark_spans, show_texts
from vectormill.cli.jobs import Fact, describe_missing_prompt, summarize_job
from vectormill.cli.printing import print_table
from vectormill.cli.runs import look_at_run
from vectormill.cli.service import REPORT_COLUMNS, summarize_worker
from vectormill.cli.sources import read_source
from vectormill.client.progress import Progress, ProgressView, describe_counts, look_at_job

JOB: dict[str, Any] = {
    "id": "x",
    "state": "running",
    "model": "mini",
    "num_items": 8000,
    "num_done": 1990,
    "num_failed": 10,
    "num_retried_chunks": 1,
    "num_tokens": 100_000,
    "truncated_items": 3,
    "num_passages": 0,
    "options": {"max_tokens": 256},
    "items_per_second": 512.4,
    "eta_seconds": 75.2,
    "padding_waste": 0.0312,
    "created_at": "2026-11-01T02:00:00Z",
    "finished_at": "2026-11-01T02:00:10Z",
}


def test_counts_tell_items_failures_retries_rate_and_remaining_time() -> None:
    expected = (
        "2,000 of 8,000 items · 10 failed · 1 chunks retried · 80/s · 1:15 min left"  # not the mean of 512/s
    )
    assert describe_counts(JOB) == expected


def test_without_a_terminal_a_line_is_written_when_something_changes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(look_at_job, Console(file=io.StringIO(), force_terminal=False)) as progress:
        for state in ("queued", "queued", "running", "running", "completed"):
            progress(JOB | {"state": state})
    states = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert states == ["queued", "running", "completed"]


def test_what_a_job_waits_for_is_told_once_until_it_is_something_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = io.StringIO()
    for console in (
        Console(file=io.StringIO(), force_terminal=False),
        Console(file=screen, force_terminal=True, width=120),
    ):
        with Progress(look_at_job, console) as progress:
            for reason in (None, "busy [1]", None, "busy [1]", "gone", None):
                progress(JOB | {"waiting_because": reason})
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if not line.startswith("running: ")] == ["busy [1]", "gone"]
    assert len(lines) == 5  # the counts at first, and before each reason
    assert screen.getvalue().count("busy [1]") == screen.getvalue().count("gone") == 1


def test_a_job_whose_objects_are_read_shows_how_far_that_is_and_why_it_failed() -> None:
    job = JOB | {
        "state": "uploading",
        "num_items": 0,
        "num_done": 0,
        "num_failed": 0,
        "waiting_because": None,
    }
    for reading, look in [
        ({"num_items": 0, "num_compared": 0}, ("0 rows found", None)),
        ({"num_items": 5000, "num_compared": 0}, ("5,000 rows found", None)),
        ({"num_items": 5000, "num_compared": 1250}, ("1,250 of 5,000 keys compared", 0.25)),
    ]:
        assert look_at_job(job | {"input": {**reading, "error": None}}) == ProgressView("uploading", *look)
    failed = {"num_items": 2, "num_compared": 0, "error": "a.parquet does not exist."}
    assert look_at_job(job | {"input": failed}).reason == "a.parquet does not exist."


RUN: dict[str, Any] = {"state": "running", "phase": "reading", "counts": {"num_read": 1200, "num_new": 0}}


def test_a_run_is_shown_by_its_phase_and_while_it_encodes_by_its_job() -> None:
    for run, look in [
        (RUN, ProgressView("reading", "1,200 read")),
        (RUN | {"counts": {}}, ProgressView("reading", "nothing read yet")),
        (RUN | {"state": "completed"}, ProgressView("completed", "1,200 read")),
        (
            RUN | {"state": "completed", "counts": {}, "finished_at": "2026-01-01T00:00:00Z"},
            ProgressView("completed", "no rows read"),
        ),
        (
            RUN | {"phase": "encoding", "encoding": {"num_items": 40, "num_done": 9, "num_failed": 1}},
            ProgressView("encoding", "10 of 40 items · 1 failed", 0.25),
        ),
        (
            RUN | {"phase": "encoding", "encoding": {"num_items": 0, "num_done": 0, "num_failed": 0}},
            ProgressView("encoding", "0 of 0 items"),
        ),
    ]:
        assert look_at_run(run) == look


def test_a_summary_measures_from_submission_to_the_last_commit() -> None:
    lines = {line.name: line for line in summarize_job(JOB, [])}
    assert lines["seconds"].value == "10.0"
    assert lines["texts/s"].value == "199"
    assert lines["tokens/s"].value == "10,000"
    assert lines["padding waste"].value == "3.1%"


def test_a_summary_tells_each_different_choice_of_the_workers_of_this_model() -> None:
    def worker(model: str, device: str) -> dict[str, Any]:
        return {"model": model, "report": {"device": {"value": device, "reason": "free"}}}

    workers = [
        worker("mini", "cuda:0"),
        worker("mini", "cuda:1"),
        worker("mini", "cuda:0"),
        worker("big", "cpu"),
    ]
    devices = [line for line in summarize_job(JOB, workers) if line.name == "device"]
    assert devices == [Fact("device", "cuda:0", "free"), Fact("device", "cuda:1", "free")]


def test_a_cell_that_looks_like_markup_or_has_tabs_stays_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("[red]", "x\ty\nz"), (None, 3)])
    assert capsys.readouterr().out == "a\tb\n[red]\tx y z\n\t3\n"


def test_no_table_cuts_an_id_or_any_other_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    job_id, key = str(UUID(int=7)), "a-key-" * 30
    cells = ["completed_with_errors", "tickets", "999,988 of 1,000,000", "12", "2026-11-23 10:00"]
    print_table(("id", "state", "collection", "items", "failed", "created"), [[job_id, *cells]])
    shown = capsys.readouterr().out
    print_table(("key", "code", "detail"), [(key, "empty_text", "The text is empty.")])
    assert capsys.readouterr().out.count("k") == 31, "a long key is folded"
    assert "…" not in shown
    assert job_id in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_prompt_that_the_authors_want_and_nobody_gave_is_told() -> None:
    models = [{"name": "mini", "unprompted": 'The authors have each text begin with "query: ".'}]
    (said,) = describe_missing_prompt(JOB, models)
    assert said == 'The texts were encoded without a prompt. The authors have each text begin with "query: ".'
    assert describe_missing_prompt(JOB | {"options": {"prompt": "query: "}}, models) == []
    assert describe_missing_prompt(JOB, [{"name": "other", "unprompted": "x"}]) == []


def test_a_worker_that_says_little_is_shown_all_the_same() -> None:
    for report in [{}, {"device": "cpu"}]:
        row = summarize_worker({"name": "w", "model": "m", "report": report})
        assert set(row) == {"name", "model", *REPORT_COLUMNS}
        assert (row["memory"], row["tokens/s"], row["bottleneck"], row["plan"], row["loaded"]) == ("-",) * 5


def step(text: str, span: str, kind: str) -> dict[str, Any]:
    start = text.index(span)
    return {"type": kind, "span": span, "offset": [start, start + len(span)]}


def test_spans_are_marked_where_they_stand() -> None:
    for text, records, expected in [
        ("Ada wrote to Bob.", [[("Ada", "x")], [("Bob", "y")]], "[Ada](x) wrote to [Bob](y)."),
        ("ab", [[("a", "x")], [("b", "y")]], "[a](x)[b](y)"),
        # A span within another, and one of two types.
        ("a mill of London", [[("mill of London", "o"), ("London", "p")], [("London", "s")]],
         "a [mill of [London](p, s)](o)"),
    ]:  # fmt: skip
        steps = [[step(text, span, kind) for span, kind in record] for record in records]
        assert mark_spans(text, steps) == expected
    label = {"type": "sport", "span": "[CLASSIFY]", "offset": [0, 10]}  # of the whole text
    assert mark_spans("a match", [[label]]) == "(sport) a match"


def test_texts_are_found_by_their_keys_and_only_so_many_are_shown() -> None:
    items = [{"key": f"k{number}", "text": f"t{number}"} for number in range(4)]
    rows: list[dict[str, Any]] = [{"key": key, "output": []} for key in ("k1", "k2", "k3")]  # k0 has failed
    assert show_texts(items, rows, 2) == ["k1: t1", "k2: t2"]


def test_a_query_a_folder_and_files_are_told_apart() -> None:
    for where, kind in [
        ("SELECT id, body FROM articles", "sql"),
        ("with some as (select 1) select * from some", "sql"),
        ("select", "files"),  # a file of this name
        ("s3://bucket/articles/*.parquet", "files"),
        ("articles.jsonl", "files"),
        ("docs/", "tree"),
        ("my notes/", "tree"),
    ]:
        assert read_source(where, key=None, text=None, metadata=None)[0] == kind
