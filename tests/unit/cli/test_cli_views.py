"""Tests of how commands print jobs, runs, workers and texts, and of how they parse their arguments."""

import io
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from rich.console import Console

from vectormill.cli.collections import describe_results
from vectormill.cli.jobs import Fact, describe_long_texts, describe_missing_prompt, summarize_job
from vectormill.cli.printing import print_facts, print_table
from vectormill.cli.runs import describe_report, look_at_indexing, look_at_run, show_reindexed
from vectormill.cli.service import REPORT_COLUMNS, describe_choice, describe_plan, summarize_worker
from vectormill.cli.sources import read_source
from vectormill.cli.spans import mark_spans, show_texts
from vectormill.client.progress import Progress
from vectormill.client.views import ProgressView, describe_counts, describe_seconds, look_at_job
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.devices.described import describe_inventory
from worker.placement.placement import part_json
from worker.plan import plan_worker
from worker.settings import load_worker_settings

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


def test_counts_say_nothing_of_what_is_not_known_yet() -> None:
    job = JOB | {"num_done": 0, "num_failed": 0, "num_retried_chunks": 0, "items_per_second": 0.0}
    assert describe_counts(job | {"eta_seconds": None}) == "0 of 8,000 items"


def test_seconds_are_told_as_people_do() -> None:
    for seconds, words in [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1:00 min"),
        (3599.4, "59:59 min"),
        (14_700, "4:05 h"),
    ]:
        assert describe_seconds(seconds) == words


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


def test_a_paused_job_shows_no_rate() -> None:
    assert describe_counts(JOB | {"state": "paused", "eta_seconds": None}) == (
        "2,000 of 8,000 items · 10 failed · 1 chunks retried"
    )


RUN: dict[str, Any] = {"state": "running", "phase": "reading", "counts": {"num_read": 1200, "num_new": 0}}
BUILD = {"indexing": {"progress": {"index": "hnsw", "phase": "loading tuples", "share": 0.25}}}


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


def test_what_the_phases_of_a_run_found_is_told_in_words() -> None:
    report = {
        "reading": {"tells_what_vanished": True, "complaints": []},
        "encoding": {"num_encoded": 1200, "num_failed": 0, "job": "6d23"},
        "indexing": {
            "progress": None,
            "plan": {"m": 16, "reasons": ["1,200 rows: few.", "Named by you."]},
            "built": [{"name": "one", "seconds": 0.5}],
        },
        "swapping": {},
    }
    assert list(describe_report(report)) == [
        ("reading found", "tells what vanished"),
        ("encoding found", "1,200 encoded · job 6d23"),
        (
            "indexing found",
            "plan: m 16, reasons: 1,200 rows: few.; Named by you. · built: name one, seconds 0.5",
        ),
    ]


def test_a_good_reindex_is_told_in_short_with_what_it_could_not_find(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = {"id": "r1", "state": "completed", "counts": {"num_seen": 18, "num_unchanged": 18, "num_new": 0}}
    for mark, told in (({"since": 1722}, "since 1722 were read"), ({"since": None}, ""), (None, "")):
        reading = {"tells_what_vanished": True} if mark is None else {"changed": mark}
        show_reindexed(run | {"report": {"reading": reading, "indexing": {"built": []}}})
        shown = capsys.readouterr()
        assert shown.out.splitlines() == ["id\tr1", "state\tcompleted", "rows\t18 seen · 18 unchanged"]
        assert (told in shown.err, bool(shown.err)) == (True, bool(told))


def test_a_build_of_an_index_is_shown_by_its_phase_and_share() -> None:
    for run, look in [
        ({"state": "running", "report": BUILD}, ProgressView("hnsw: loading tuples", "25%", 0.25)),
        ({"state": "running", "report": {"indexing": {"progress": None}}}, ProgressView("running")),
        ({"state": "queued", "report": {}}, ProgressView("queued")),
    ]:
        assert look_at_indexing(run) == look


def test_where_nothing_is_counted_the_line_is_the_stage_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(look_at_indexing, Console(file=io.StringIO(), force_terminal=False)) as progress:
        for state in ("queued", "queued", "completed"):
            progress({"state": state, "report": {}})
    assert capsys.readouterr().err == "queued\ncompleted\n"


def test_a_summary_measures_from_submission_to_the_last_commit() -> None:
    lines = {line.name: line for line in summarize_job(JOB, [])}
    assert lines["seconds"].value == "10.0"
    assert lines["texts/s"].value == "199"
    assert lines["tokens/s"].value == "10,000"
    assert lines["padding waste"].value == "3.1%"


def test_a_summary_tells_of_equal_texts_that_were_not_encoded_again() -> None:
    for num_reused, said in ((1234, ["1,234"]), (0, [])):
        job = JOB | {"num_reused": num_reused}
        assert [line.value for line in summarize_job(job, []) if line.name == "reused"] == said


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


def test_a_summary_tells_of_switches_where_a_worker_uses_any() -> None:
    def switches(*used: list[str]) -> list[str]:
        workers = [{"model": "mini", "report": {"switches": names}} for names in used]
        return [line.value for line in summarize_job(JOB, workers) if line.name == "switches"]

    assert switches([], []) == []
    assert switches(["direct_flash", "compile"], []) == ["direct_flash, compile", "none"]
    assert describe_choice({"switches": []}, "switches") == ("none", "")
    assert describe_choice({}, "switches") == ("not known yet", "")  # the model is being loaded


def test_what_became_of_long_texts_is_told_in_a_sentence() -> None:
    for counts, sentences in [
        (
            {},
            [
                "3 texts were longer than 256 tokens and cut there; list them with `vectormill truncated x`, or"
            ],
        ),
        ({"truncated_items": 1}, ["1 text was longer than 256 tokens and cut there;"]),
        ({"truncated_items": 0}, []),
        (
            {"truncated_items": 0, "num_passages": 12_345},
            ["Texts longer than 256 tokens were read in 12,345 passages."],
        ),
    ]:
        found = describe_long_texts(JOB | counts)
        assert len(found) == len(sentences)
        assert all(full.startswith(start) for full, start in zip(found, sentences, strict=True))
        lines = {line.name: line for line in summarize_job(JOB | counts, [])}
        assert lines["truncated"].reason == "longer than 256 tokens and cut there"
        assert ("passages" in lines) == ("num_passages" in counts)


def test_a_choice_is_read_with_its_reason() -> None:
    cases: list[tuple[dict[str, Any], tuple[str, str]]] = [
        ({"device": {"value": "cpu:0", "reason": "only one"}}, ("cpu:0", "only one")),
        ({"device": {"value": "cpu:0"}}, ("cpu:0", "")),
        ({"device": None}, ("not known yet", "")),  # the model is being loaded
        ({}, ("not known yet", "")),
    ]
    for report, expected in cases:
        assert describe_choice(report, "device") == expected


def test_a_cell_that_looks_like_markup_or_has_tabs_stays_one_cell(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("[red]", "x\ty\nz"), (None, 3)])
    assert capsys.readouterr().out == "a\tb\n[red]\tx y z\n\t3\n"


def test_a_list_of_one_column_and_facts_have_no_titles(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("key",), [("a",), ("b",)])
    print_facts([("state", "running"), ("error", None)])
    assert capsys.readouterr().out == "a\nb\nstate\trunning\n"


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


def test_a_worker_s_part_of_the_plan_is_shown_in_few_words() -> None:
    for devices, strategy, expected in [
        ("1x24GiB", "auto", "replicate: layers 0-5"),
        ("2x24GiB", "pipeline", "pipeline: layers 0-2 | 3-5"),
        ("2x24GiB", "fully_sharded", "fully sharded: layers 0-5, each split over 2 devices"),
    ]:
        inventory = describe_inventory(devices)
        card = Registry({}).card(DEFAULT_MODEL)
        placement = plan_worker(card, inventory, load_worker_settings(strategy=strategy))
        assert describe_plan({"placement": part_json(placement, placement.replicas[0])}) == expected


def step(text: str, span: str, kind: str) -> dict[str, Any]:
    start = text.index(span)
    return {"type": kind, "span": span, "offset": [start, start + len(span)]}


def test_spans_are_marked_where_they_stand() -> None:
    text = "Ada Lovelace wrote to Charles Babbage."
    records = [[step(text, "Ada Lovelace", "person")], [step(text, "Charles Babbage", "person")]]
    assert mark_spans(text, records) == "[Ada Lovelace](person) wrote to [Charles Babbage](person)."


def test_a_span_within_another_and_one_of_two_types() -> None:
    text = "the mill of London"
    records = [
        [step(text, "mill of London", "organization"), step(text, "London", "place")],
        [step(text, "London", "seat")],
    ]
    assert mark_spans(text, records) == "the [mill of [London](place, seat)](organization)"


def test_neighbours_do_not_swallow_one_another() -> None:
    text = "ab"
    assert mark_spans(text, [[step(text, "a", "x")], [step(text, "b", "y")]]) == "[a](x)[b](y)"


def test_a_label_of_the_whole_text_stands_before_it() -> None:
    records = [[{"type": "sport", "span": "[CLASSIFY]", "offset": [0, 10]}]]
    assert mark_spans("a match", records) == "(sport) a match"


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


def test_a_folder_that_is_there_needs_no_slash(tmp_path: Path) -> None:
    found = read_source(str(tmp_path), key="id", text=None, metadata=["lang"])
    assert found == ("tree", {"folder": str(tmp_path)})


def test_columns_go_with_what_has_some() -> None:
    found = read_source("SELECT 1", key="id", text="body", metadata=["lang"])
    assert found == ("sql", {"query": "SELECT 1", "key": "id", "text": "body", "metadata": ["lang"]})


@pytest.mark.parametrize(
    ("dimensions", "options", "described"),
    [
        (384, {}, "m, 384 dimensions"),
        (0, {"outputs": "sparse,multi_vector"}, "m, sparse, multi_vector"),
    ],
)
def test_a_collection_without_dense_vectors_is_described_by_its_outputs(
    dimensions: int, options: dict[str, str], described: str
) -> None:
    collection = {"kind": "vectors", "model": "m", "dimensions": dimensions, "options": options}
    assert describe_results(collection) == described
