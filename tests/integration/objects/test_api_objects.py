"""Jobs by reference over HTTP, the client and the command line: what is taken, what is refused and leaves nothing."""

import json
import sys
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import SMALL, api_client, assert_problem, count_jobs
from tests.commands import run
from tests.database import ask, execute
from tests.integration.objects.conftest import ROWS, post
from tests.obedient_engine import encoding_chunks, run_to_end
from tests.protocol import SPEC, vector_of
from vectormill import read_table
from vectormill.client import Client
from vectormill.files.roots import ANYWHERE
from vectormill.jobs import upload
from vectormill.jobs.jobs import find_job
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.objects.output import HeldOutput, claim_output
from vectormill.objects.parts import close_output
from vectormill.problems import ApiError


def encode_all(engine: Engine, job_id: str) -> None:
    """Encode what waits, with a model that is known by the name of the job's, and close outputs."""
    execute(engine, "UPDATE vectormill.jobs SET model = :model", model=SPEC.model)
    job = ask(engine, find_job, job_id)  # type: ignore[arg-type]
    with encoding_chunks(engine) as encoder:
        run_to_end(engine, encoder, job)
    claimed = ask(engine, claim_output, "test", 30)
    if claimed is not None:
        close_output(
            HeldOutput(
                engine=engine, lease=claimed[0], is_stopping=lambda: False, place=claimed[1], roots=ANYWHERE
            )
        )


def test_a_job_by_reference_is_submitted_shown_and_read(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    out = f"file://{tmp_path}/out/vectors"
    answer = post(client, tmp_path, "in/*.jsonl", to=out, input={"metadata": ["page"]})
    assert answer.status_code == 202, answer.text
    job, output = answer.json(), {"url": out, "state": "open", "table": None, "error": None}
    assert (job["num_items"], job["num_chunks"], job["output"]) == (6, 2, output)
    encode_all(engine, job["id"])
    assert client.get(f"/v1/jobs/{job['id']}").json()["output"] == output | {"state": "closed"}
    rows = read_table(out).to_pylist()
    assert [(row["key"], json.loads(row["metadata"])) for row in rows] == [
        (row["id"], {"page": row["page"]}) for row in ROWS
    ]
    assert rows[3]["embedding"] == pytest.approx(vector_of(b"text 3"))
    assert_problem(client.get(f"/v1/jobs/{job['id']}/vectors"), 409, "wrong-job-state", out)


def test_rows_of_objects_go_into_a_collection_too(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    job = post(client, tmp_path, "in/0.jsonl", "in/1.jsonl", "in/*.jsonl", collection="docs").json()
    assert (job["num_items"], job["output"]) == (6, None)
    encode_all(engine, job["id"])
    keys = execute(engine, "SELECT key FROM docs ORDER BY key").scalars().all()
    assert keys == [row["id"] for row in ROWS]
    exported = client.get(f"/v1/jobs/{job['id']}/vectors").text.splitlines()
    assert [json.loads(line)["key"] for line in exported] == keys


def test_items_that_are_sent_may_have_an_output_too(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    out = f"{tmp_path}/out/sent"
    answer = client.post(
        "/v1/jobs",
        params={"to": out, "dimensions": 8},
        content=b'{"key": "a", "text": "one"}\n',
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert answer.status_code == 202, answer.text
    encode_all(engine, answer.json()["id"])
    assert read_table(out).column("key").to_pylist() == ["a"]


def test_what_is_wrong_is_refused_by_name_and_leaves_neither_job_nor_folder(
    engine: Engine, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("pyiceberg", "pyiceberg.catalog"):
        monkeypatch.setitem(sys.modules, package, None)  # as if it was not installed
    out = {"to": f"{tmp_path}/out/x"}
    pairs = {"input": {"text_pair": "other"}}
    refused = [
        (post(client, tmp_path, "in/none.jsonl", **out), 422, "invalid-option", "does not exist"),
        (post(client, tmp_path, "in/*.csv", **out), 422, "invalid-option", "No object matches"),
        (post(client, tmp_path, "elsewhere/0.jsonl", **out), 422, "invalid-option", "VECTORMILL_SOURCE_ROOT"),
        (
            post(client, tmp_path, "in/0.jsonl", to=f"{tmp_path}/x"),
            422,
            "invalid-option",
            "VECTORMILL_OUTPUT_ROOT",
        ),
        (post(client, tmp_path, "in/0.jsonl", to="ftp://x/y"), 422, "invalid-option", "Unknown store"),
        (
            post(client, tmp_path, "in/0.jsonl", to="iceberg://lake/table"),
            422,
            "invalid-option",
            "write iceberg://catalog/namespace.table",
        ),
        (
            post(client, tmp_path, "in/0.jsonl", to="iceberg://lake/papers.vectors"),
            422,
            "invalid-option",
            "[iceberg]'",
        ),
        (
            post(client, tmp_path, "in/0.jsonl", **out, input={"text": "none"}),
            422,
            "invalid-option",
            "no column 'none'",
        ),
        (post(client, tmp_path, "in/0.jsonl", **out, **pairs), 422, "invalid-option", "takes no text_pair"),
        (post(client, tmp_path, "in/0.jsonl", **out, collection="docs"), 422, "invalid-option", "leave out"),
        (
            post(client, tmp_path, "in/0.jsonl", **out, items=[]),
            422,
            "invalid-option",
            "either `items` or `input`",
        ),
        (client.post("/v1/jobs", json={}), 422, "invalid-option", "either `items` or `input`"),
        (post(client, tmp_path, **out), 422, "invalid-request", "input.urls"),
    ]
    for answer, status, code, said in refused:
        assert_problem(answer, status, code, said)
    assert count_jobs(engine) == 0
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").rglob("*.json")]


def test_keys_that_repeat_are_refused_where_asked_by_both_their_places(
    engine: Engine, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"file://{tmp_path}/in"
    others = [{"id": key, "body": "other"} for key in ("a", None, "k4", "k1", "k4")]
    pq.write_table(pa.Table.from_pylist(others), tmp_path / "in" / "2.parquet", row_group_size=2)
    (tmp_path / "in" / "3.csv").write_text("id,body\nb,text\n7,text\nk0,text\n")
    wanted = {"unique": True}
    out = f"{tmp_path}/out/x"
    monkeypatch.setattr(upload, "REFERENCES_PER_PART", 2)
    refused = [
        (("in/*.jsonl", "in/2.parquet"), f"{folder}/1.jsonl#1 and {folder}/2.parquet#1:0 have", "'k4'"),
        (("in/2.parquet", "in/*.jsonl"), f"{folder}/2.parquet#1:0 and {folder}/2.parquet#2:0 have", "'k4'"),
        (("in/3.csv", "in/0.jsonl"), f"{folder}/3.csv#2 and {folder}/0.jsonl#0 have", "'k0'"),
    ]
    for names, *said in refused:
        answer = post(client, tmp_path, *names, to=out, input=wanted)
        assert_problem(answer, 422, "duplicate-key", *said)
    answer = post(client, tmp_path, "in/0.jsonl", to=out, input={"unique": True, "key": None})
    assert_problem(answer, 422, "invalid-option", "needs the column of keys")
    monkeypatch.undo()
    assert count_jobs(engine) == 0
    assert not [*tmp_path.glob("out/**/*.json")]
    headers = {"Idempotency-Key": "once"}
    body = {"urls": [f"{folder}/*.jsonl"], "text": "body", "key": "id", "unique": True}
    request = {"input": body, "options": SMALL, "to": out}
    first, again = (client.post("/v1/jobs", json=request, headers=headers) for _ in range(2))
    assert (first.status_code, again.json()["id"]) == (202, first.json()["id"]), first.text
    del body["unique"]
    assert_problem(client.post("/v1/jobs", json=request, headers=headers), 422, "idempotency-mismatch")
    # Where it is not asked for, keys may repeat.
    assert post(client, tmp_path, "in/3.csv", "in/0.jsonl", collection="docs").json()["num_items"] == 6


def test_an_api_that_others_reach_reads_local_objects_only_below_a_folder_that_is_set(
    engine: Engine, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]))
    secret = make_secret()
    ask(engine, create_key, "admin", secret, "admin")
    for settings, status in ({"source_root": ()}, 422), ({"source_root": tmp_path}, 202):
        with api_client(engine, api_host="0.0.0.0", **settings) as client:
            client.headers["Authorization"] = f"Bearer {secret}"
            answer = post(client, tmp_path, "rows.jsonl", collection="docs")
        assert answer.status_code == status, answer.text
        assert status == 202 or "set VECTORMILL_SOURCE_ROOT" in answer.text


def test_a_key_that_may_only_write_neither_reads_objects_nor_writes_them(
    engine: Engine, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 0.0)
    secrets = {}
    for scope in ("write", "sources"):
        secrets[scope] = make_secret()
        ask(engine, create_key, scope, secrets[scope], scope)
    out = {"to": f"{tmp_path}/out/x"}
    client.headers["Authorization"] = f"Bearer {secrets['write']}"
    lines = {"content": b'{"key": "a", "text": "one"}\n', "headers": {"Content-Type": "application/x-ndjson"}}
    for answer in (
        post(client, tmp_path, "in/0.jsonl", collection="docs"),
        client.post("/v1/jobs", json={"items": [{"key": "a", "text": "one"}], **out}),
        client.post("/v1/jobs", params=out, **lines),  # type: ignore[arg-type]
    ):
        assert_problem(answer, 403, "scope-missing", "scope sources")
    client.headers["Authorization"] = f"Bearer {secrets['sources']}"
    assert post(client, tmp_path, "in/0.jsonl", **out).status_code == 202


def test_the_client_and_the_command_line_submit_objects(
    engine: Engine,
    client: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"file://{tmp_path}/in/[01].jsonl"
    (tmp_path / "in" / "twice.jsonl").write_text(json.dumps(ROWS[0]))
    with Client(str(client.base_url)) as caller:
        job = caller.submit_objects(
            url, text="body", key="id", metadata=["page"], to=f"{tmp_path}/out/1", dimensions=8
        )
        urls = [f"{tmp_path}/in/0.jsonl", f"{tmp_path}/in/twice.jsonl"]
        with pytest.raises(ApiError, match="have the same key, 'k0'"):
            caller.submit_objects(urls, text="body", key="id", unique=True, dimensions=8)
        assert job["num_items"] == 6
        other = caller.submit([{"key": "a", "text": "one"}], to=f"{tmp_path}/out/2", dimensions=8)
        assert other["output"] is not None
        assert other["output"]["url"] == f"file://{tmp_path}/out/2"
    monkeypatch.setenv("VECTORMILL_API_URL", str(client.base_url))
    arguments = [url, "--text-field", "body", "--key-field", "id", "--metadata-field", "page"]
    arguments += ["--to", f"{tmp_path}/out/3", "--dimensions", "8", "--unique"]
    assert run("submit", *arguments) == 0
    printed = capsys.readouterr()
    assert "6 items submitted" in printed.err
    assert "24 bytes of its disk for each row" in printed.err
    encode_all(engine, printed.out.strip())
    assert count_jobs(engine) == 3
