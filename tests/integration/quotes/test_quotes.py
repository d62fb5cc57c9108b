"""A quote tells what a job would take, refuses what a submission refuses, and stores nothing."""

import csv
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text
from tokenizers import Tokenizer

from tests.api_server import (
    NDJSON,
    SMALL,
    api_client,
    assert_problem,
    count_jobs,
    encode_waiting,
    lines,
    submit,
)
from tests.commands import run as run_command
from tests.database import ask, execute
from vectormill.collections.sizing import estimate_row_bytes
from vectormill.domain.encoding import DEFAULT_MODEL
from vectormill.models.registry import Registry
from vectormill.quotes import sampling
from vectormill.quotes.quote import FEW_POWER, LEAST_FACTOR
from vectormill.rows.decoding import DELIMITERS
from vectormill.workers.workers import beat_worker

SENTENCES = ["one", "The second of four texts.", "one", "long " * 400]


@pytest.fixture
def client(engine: Engine, tmp_path: Path) -> Iterator[httpx.Client]:
    (tmp_path / "in").mkdir()
    with api_client(engine, source_root=tmp_path / "in") as client:
        yield client


def make_rows(texts: list[str]) -> list[dict[str, Any]]:
    return [{"key": f"k{number}", "text": each} for number, each in enumerate(texts)]


def quote(client: httpx.Client, items: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/jobs", json={"items": items, "options": SMALL, "dry_run": True, **body})
    assert answer.status_code == 200, answer.text
    assert "location" not in answer.headers
    told: dict[str, Any] = answer.json()
    return told


def measure(engine: Engine, tokens: int, seconds: float) -> None:
    """Register a worker with a measured rate."""
    report = {"num_sequences": tokens // 20, "num_tokens": tokens, "stage_seconds": {"held": seconds}}
    assert ask(engine, beat_worker, "w", uuid4(), DEFAULT_MODEL, 4, report)


def count_tokens(texts: list[str]) -> list[int]:
    tokenizer = Tokenizer.from_file(str(Registry({}).card(DEFAULT_MODEL).path / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [min(256, len(each)) for each in tokenizer.encode_batch(texts)]


def exact(value: float) -> dict[str, float]:
    return {"value": value, "least": value, "most": value}


def test_a_dry_run_counts_what_the_model_reads_and_stores_nothing(
    engine: Engine, client: httpx.Client
) -> None:
    told = quote(client, make_rows(SENTENCES), collection="new")
    counted = count_tokens(SENTENCES)
    assert counted[3] == 256
    assert (told["rows"], told["num_sampled"], told["kept"]) == (exact(4), 4, None)
    assert told["tokens_per_row"] == exact(sum(counted) / 4)
    assert (told["truncated"], told["repeated"]) == (exact(0.25), exact(0.25))
    assert told["tokens"]["value"] == pytest.approx(sum(counted) * 0.75)
    assert told["seconds"] is told["queue_seconds"] is told["ends_at"] is None
    assert told["rows_bytes"]["least"] == pytest.approx(4 * estimate_row_bytes(2 * 8, key_bytes=2) * 0.9)
    assert count_jobs(engine) == 0
    assert client.get("/v1/collections").json()["data"] == []


def test_a_stream_is_quoted_like_a_document_and_an_idempotency_key_is_not_used(
    engine: Engine, client: httpx.Client
) -> None:
    headers = NDJSON | {"Idempotency-Key": "once"}
    parameters: dict[str, str | int] = {"dry_run": "true", "dimensions": 8}
    body = lines(make_rows(SENTENCES))
    answers = [client.post("/v1/jobs", content=body, headers=headers, params=parameters) for _ in range(2)]
    assert [answer.json() for answer in answers] == [quote(client, make_rows(SENTENCES))] * 2
    del parameters["dry_run"]
    made = client.post("/v1/jobs", content=body, headers=headers, params=parameters)
    assert (made.status_code, count_jobs(engine)) == (202, 1)


def test_what_a_submission_refuses_a_dry_run_refuses(engine: Engine, client: httpx.Client) -> None:
    def post(items: list[dict[str, Any]], **body: Any) -> httpx.Response:
        return client.post("/v1/jobs", json={"items": items, "options": SMALL, "dry_run": True, **body})

    twice = [*make_rows(["a", "b"]), {"key": "k1", "text": "c"}]
    assert_problem(post(twice), 422, "duplicate-key", "item 2 and item 3")
    assert_problem(post([]), 422, "empty-job")
    assert_problem(post(make_rows(["a"]), model="nothing"), 422, "unknown-model")
    assert_problem(post(make_rows(["a"]), collection="No name"), 422, "invalid-option")
    submit(client, make_rows(["a"]), collection="docs")
    other = post(make_rows(["a"]), collection="docs", options={"dimensions": 16})
    assert_problem(other, 409, "spec-mismatch")
    assert count_jobs(engine) == 1


def test_a_dry_run_is_refused_if_no_worker_could_load_the_model_as_a_submission_is(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    with engine.begin() as connection:
        report = {"state": "dead", "state_reason": "openvino was killed by SIGFPE"}
        assert beat_worker(connection, "w", uuid4(), DEFAULT_MODEL, 0, report)
    path = tmp_path / "in" / "a.jsonl"
    path.write_bytes(lines(make_rows(["a"])))
    bodies: list[dict[str, Any]] = [{"items": make_rows(["a"])}, {"input": {"urls": [path.as_uri()]}}]
    for dry_run in (False, True):
        for body in bodies:
            answer = client.post("/v1/jobs", json={**body, "options": SMALL, "dry_run": dry_run})
            assert_problem(answer, 409, "model-not-served", "SIGFPE")
    assert (
        client.post("/v1/jobs", json={**bodies[0], "dry_run": True, "wait_for_worker": True}).status_code
        == 200
    )
    assert count_jobs(engine) == 0


def test_time_and_end_follow_from_the_measured_rate_and_the_queue(
    engine: Engine, client: httpx.Client
) -> None:
    measure(engine, tokens=1000, seconds=10)
    rows = make_rows(["one two three"] * 1)
    alone = quote(client, rows)
    assert alone["tokens_per_second"]["value"] == pytest.approx(100)
    assert alone["tokens"] == exact(5)
    assert alone["queue_seconds"] == exact(0)
    assert alone["seconds"]["least"] < 5 / 100 + 0.7 < alone["seconds"]["most"]
    submit(client, make_rows([f"word {number} " * 50 for number in range(20)]), priority=3)
    behind = quote(client, rows)
    ahead = quote(client, rows, priority=1)
    assert ahead["queue_seconds"] == exact(0)
    # Twenty texts of some 100 to 150 tokens, by their bytes.
    assert 15 < behind["queue_seconds"]["value"] < 40
    assert behind["ends_at"][1] < behind["ends_at"][0] < behind["ends_at"][2]
    assert behind["ends_at"][1] > alone["ends_at"][2]


def test_the_time_in_which_workers_held_several_jobs_is_shared_between_them(
    engine: Engine, client: httpx.Client
) -> None:
    measure(engine, tokens=1000, seconds=0)  # only jobs have measured
    for share in (1.0, 0.25):
        submit(client, make_rows([f"word {number}" for number in range(20)]))
        encode_waiting(engine)
        stage_seconds = json.dumps({"held": 10 / share, "device": 8 / share, "run": 8})
        execute(engine, "UPDATE vectormill.jobs SET num_tokens = 1000, stage_seconds = CAST(:spent AS jsonb)"
                     " WHERE seq = (SELECT max(seq) FROM vectormill.jobs)", spent=stage_seconds)  # fmt: skip
    rate = quote(client, make_rows(["word"] * 20))["tokens_per_second"]
    assert rate["value"] / rate["least"] == pytest.approx(LEAST_FACTOR**FEW_POWER), "both took the same time"


def test_rows_of_which_the_model_reads_nothing_take_no_time_and_the_least_number_of_tokens_may_be_none(
    engine: Engine, client: httpx.Client
) -> None:
    measure(engine, tokens=1000, seconds=10)
    none = quote(client, make_rows(["long " * 400]), options=SMALL | {"long_texts": "fail"})
    assert (none["tokens"], none["truncated"]) == (exact(0), exact(1))
    assert none["seconds"]["most"] < 10
    books = make_rows(["word " * 10, "word " * 900_000, "word " * 20])
    told = quote(client, books, options=SMALL | {"long_texts": "passages"})
    assert 0 < told["host_cores"]["least"] <= told["host_cores"]["most"]
    assert told["tokens"]["least"] < 900_000 < told["tokens"]["most"]


def test_rows_that_the_collection_has_are_counted_and_only_a_reindex_leaves_them_out(
    engine: Engine, client: httpx.Client
) -> None:
    texts = [f"text {number}" for number in range(8)]
    submit(client, make_rows(texts), collection="docs")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE public.source AS SELECT 'k' || i AS key, 'text ' || i AS text "
                                "FROM generate_series(0, 7) AS i"))  # fmt: skip
        connection.execute(text("UPDATE public.source SET text = 'changed' WHERE key = 'k7'"))
    encode_waiting(engine)
    told = quote(client, make_rows([*texts[:6], "new", "another"]), collection="docs")
    assert told["kept"] == exact(0.75)
    assert told["tokens"]["value"] == told["rows"]["value"] * told["tokens_per_row"]["value"]
    options = {"query": "SELECT key, text FROM public.source"}
    client.put("/v1/collections/docs/source", json={"kind": "sql", "options": options}).raise_for_status()
    answer = client.post("/v1/collections/docs/runs", json={"dry_run": True})
    assert (answer.status_code, client.get("/v1/runs").json()["data"]) == (200, [])
    again = answer.json()
    assert (again["rows"], again["kept"]) == (exact(8), exact(7 / 8))
    assert again["tokens"]["value"] == pytest.approx(again["tokens_per_row"]["value"])
    new = client.post(
        "/v1/collections/docs/runs", json={"dry_run": True, "options": {"dimensions": 16}}
    ).json()
    assert (new["kept"], new["tokens"]["value"]) == (None, 8 * new["tokens_per_row"]["value"])
    refused = client.post("/v1/collections/docs/runs", json={"dry_run": True, "kind": "check"})
    assert_problem(refused, 422, "invalid-option", "Only a run of kind reindex")


def test_of_a_query_postgres_counts_all_rows_and_draws_some(engine: Engine, client: httpx.Client) -> None:
    execute(engine, "CREATE TABLE public.many AS SELECT i AS id, 'word ' || i % 6000 || ' 100%' AS body "
                                "FROM generate_series(1, 30000) AS i")  # fmt: skip
    options = {"query": "SELECT id, body FROM public.many;", "key": "id", "text": "body"}
    answer = client.post("/v1/quotes", json={"kind": "sql", "options": options})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert (told["rows"], told["repeated"]) == (exact(30_000), exact(0.8))
    assert 1700 < told["num_sampled"] <= 2000
    assert told["tokens_per_row"]["least"] < told["tokens_per_row"]["value"] < told["tokens_per_row"]["most"]
    wrong = client.post("/v1/quotes", json={"kind": "sql", "options": options | {"text": "bodies"}})
    assert_problem(wrong, 422, "source-failed", "bodies")


def test_a_query_that_takes_too_long_is_counted_by_the_planner(
    engine: Engine, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "PATIENCE_SECONDS", 1.0)
    # 30,000 rows take half a minute, and the first 256 a quarter of a second.
    query = (
        "SELECT i AS key, 'text ' || i AS text, pg_sleep(0.001) FROM generate_series(1, 30000) AS i OFFSET 0"
    )
    options = {"query": query}
    answer = client.post("/v1/quotes", json={"kind": "sql", "options": options})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["rows"]["value"] == 30_000
    assert told["rows"]["least"] < 30_000 < told["rows"]["most"]
    assert any("planner" in note for note in told["notes"])


@pytest.mark.parametrize("format", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("whole_bytes", [sampling.WHOLE_BYTES, 0])
def test_objects_are_read_whole_if_they_are_small_and_else_in_parts(
    client: httpx.Client,
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    whole_bytes: int,
) -> None:
    monkeypatch.setattr("api.intake.submissions.WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(sampling, "PART_BYTES", 5000)
    texts = ["word " * (1 + number % 9) for number in range(20_000)]
    for part in range(40):
        path, some = tmp_path / "in" / f"{part}.{format}", texts[500 * part : 500 * part + 500]
        if format == "parquet":
            pq.write_table(pa.table({"body": some}), path)
        elif format == "csv":
            path.write_text("id,body\n" + "".join(f"{row},{each}\n" for row, each in enumerate(some)))
        else:
            path.write_text("".join(json.dumps({"body": each}) + "\n" for each in some))
    wanted = {"urls": [f"file://{tmp_path}/in/*.{format}"], "text": "body"}
    body = {"input": wanted, "dry_run": True, "options": SMALL}
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 200, answer.text
    told, mean = answer.json(), sum(count_tokens(texts)) / len(texts)
    assert told["rows"]["least"] <= 20_000 <= told["rows"]["most"]
    assert told["rows"]["most"] < 22_000
    assert math.isclose(told["tokens_per_row"]["value"], mean, rel_tol=0.1)
    assert told["tokens_per_row"]["least"] <= mean <= told["tokens_per_row"]["most"]
    assert (told["rows"] == exact(20_000)) or not whole_bytes
    body["input"] = wanted | {"text": "nothing"}
    assert_problem(client.post("/v1/jobs", json=body), 422, "invalid-option", "nothing")
    assert count_jobs(engine) == 0


def test_of_many_small_objects_those_are_read_for_which_there_is_time(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are listed in no time, and then it is over.
    monkeypatch.setattr("api.intake.submissions.time", SimpleNamespace(monotonic=lambda: -9.0))
    for number in range(200):
        rows = ({"text": "word " * (1 + number // 20)} for _ in range(1 + number // 2))
        (tmp_path / "in" / f"{number:03}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {"urls": [f"file://{tmp_path}/in/*.jsonl"]}
    told = client.post("/v1/jobs", json={"input": wanted, "dry_run": True, "options": SMALL}).json()
    num_all = sum(1 + number // 2 for number in range(200))
    assert told["num_sampled"] < num_all / 5
    assert told["rows"]["least"] < num_all < told["rows"]["most"] < 3 * num_all
    assert any("16 of 200 objects" in note for note in told["notes"])


def test_a_dry_run_of_large_objects_refuses_too_many_rows_where_their_number_is_known(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.intake.submissions.WHOLE_BYTES", 0)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a"] * 1001}), path)
    with api_client(engine, source_root=tmp_path, max_job_items=1000) as client:
        for dry_run in (True, False):
            body = {"input": {"urls": [path.as_uri()]}, "options": SMALL, "dry_run": dry_run}
            assert_problem(client.post("/v1/jobs", json=body), 413, "submission-too-large", "MAX_JOB_ITEMS")


def test_of_one_large_row_group_rows_of_all_its_parts_are_read_each_once(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.intake.submissions.WHOLE_BYTES", 0)
    for num_rows in (20_000, 600):
        texts = [f"{number} " + "word " * (200 * number // num_rows) for number in range(num_rows)]
        path = tmp_path / "in" / f"{num_rows}.parquet"
        pq.write_table(pa.table({"body": texts}), path)
        wanted = {"urls": [path.as_uri()], "text": "body"}
        told = client.post("/v1/jobs", json={"input": wanted, "dry_run": True, "options": SMALL}).json()
        mean = sum(count_tokens(texts)) / num_rows
        assert told["tokens_per_row"]["value"] == pytest.approx(mean, rel=0.05)
        assert (told["rows"], told["repeated"]) == (exact(num_rows), exact(0))


@pytest.mark.parametrize(
    ("format", "names", "num_lines"),
    [
        ("jsonl", ("id", "body"), 5),
        ("jsonl", ("id", "body"), 150),  # rows that are longer than a part
        ("csv", ("body",), 5),
        ("csv", ("id", "body"), 5),
        ("csv", ("body", "id"), 5),
        ("csv", ("id", "body"), 150),
        ("tsv", ("body", "id"), 5),
        ("tsv", ("id", "body"), 150),
    ],
)
def test_parts_begin_within_quotes_and_rows_are_longer_than_a_part(
    client: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,
    names: tuple[str, ...],
    num_lines: int,
) -> None:
    monkeypatch.setattr("api.intake.submissions.WHOLE_BYTES", 0)
    monkeypatch.setattr(sampling, "PART_BYTES", 5000)
    body = "\n".join(['said, "so" it, is', "some\twords of\ta line, of a ticket,"] * num_lines)
    path, num_rows = tmp_path / "in" / f"rows.{format}", 4000 // num_lines
    rows = [{"id": number, "body": body} for number in range(num_rows)]
    with path.open("w", newline="") as file:
        if format == "jsonl":
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            writer = csv.writer(file, delimiter=DELIMITERS[format], lineterminator="\n")
            writer.writerows([names, *([row[name] for name in names] for row in rows)])
    wanted = {"urls": [path.as_uri()], "text": "body"}
    answer = client.post("/v1/jobs", json={"input": wanted, "dry_run": True, "options": SMALL})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["rows"]["least"] <= num_rows <= told["rows"]["most"] <= 1.1 * num_rows
    assert told["tokens_per_row"]["value"] == count_tokens([body])[0]


def test_objects_of_one_row_without_a_line_break_are_no_empty_job(
    client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.intake.submissions.WHOLE_BYTES", 0)
    for number in range(40):
        (tmp_path / "in" / f"{number}.jsonl").write_text(json.dumps({"text": "The mill grinds."}))
    wanted = {"urls": [f"file://{tmp_path}/in/*.jsonl"]}
    answer = client.post("/v1/jobs", json={"input": wanted, "dry_run": True, "options": SMALL})
    assert answer.json()["rows"]["value"] == pytest.approx(40), answer.text


def test_the_command_leaves_times_out_if_only_the_service_knows_the_model(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(lines(make_rows(SENTENCES)))
    models = {"mine": {"path": str(Registry({}).card(DEFAULT_MODEL).path)}}
    with api_client(engine, models=models) as api:
        arguments = ("--model", "mine", "--price", "2", "--api-url", str(api.base_url), "--json")
        code = run_command("quote", str(path), *arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    told = json.loads(out)
    assert (told["rows"], told["seconds"], told["price"]) == (exact(4), None, None)
    assert "does not know mine" in told["notes"][-1]


def test_a_query_with_two_columns_of_a_name_is_refused_as_by_a_reindex(client: httpx.Client) -> None:
    options = {"query": "SELECT 'a' AS key, 'one two three' AS text, 'one' AS text"}
    answer = client.post("/v1/quotes", json={"kind": "sql", "options": options})
    assert answer.status_code == 422
    assert "several columns 'text'" in answer.json()["detail"]


def test_the_command_quotes_a_file_and_a_query_and_estimates_without_workers(
    engine: Engine, client: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(lines(make_rows(SENTENCES)))

    def run(*arguments: str) -> dict[str, Any]:
        code = run_command("quote", *arguments, "--api-url", str(client.base_url), "--json")
        out, err = capsys.readouterr()
        assert code == 0, err
        told: dict[str, Any] = json.loads(out)
        return told

    told = run(str(path), "--devices", "1x80GiB@sm_90", "--price", "3600", "--dimensions", "8")
    assert told["rows"] == exact(4)
    assert told["price"]["value"] == pytest.approx(told["seconds"]["value"])
    assert "replicate" in told["reasons"]["placement"]
    measure(engine, tokens=1000, seconds=10)
    told = run("--sql", "SELECT i AS key, 'x ' || i AS text FROM generate_series(1, 50) AS i")
    assert (told["rows"], round(told["tokens_per_second"]["value"]), told["price"]) == (exact(50), 100, None)
    run_command("quote", str(path), "--api-url", str(client.base_url))
    shown = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert shown["tokens/s"] == "100 (70 to 143)", "the likely value comes first"
    assert re.fullmatch(r"\S+ \(\S+ to \S+\)", shown["ends at"])
    assert run_command("quote", str(path), "--sql", "SELECT 1", "--api-url", str(client.base_url)) == 2
    assert "Name one of" in capsys.readouterr().err
