"""Objects that take longer than a request should are read by an indexer, which queues their job or says why not."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from api.intake import submissions
from indexer.loops import InputLoop
from tests.api_server import SMALL, assert_problem, count_jobs, delete
from tests.commands import run
from tests.database import ask, execute
from tests.indexers import KeptSource, indexing
from tests.integration.jobs.test_uploads import lose_commit_reply
from tests.integration.objects.conftest import ROWS, post
from tests.outputs import encode_waiting, keep_outputs
from tests.protocol import SPEC
from tests.s3_double import Double
from tests.services import connected_engine
from tests.waiting import wait_for
from vectormill import read_table
from vectormill.jobs import upload
from vectormill.jobs.deletion import discard_stale_uploads
from vectormill.jobs.job import NewJob
from vectormill.jobs.jobs import find_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.submission import JobWriter
from vectormill.objects import store
from vectormill.objects.input import HeldInput, claim_input
from vectormill.objects.reading import read_input
from vectormill.settings import Settings
from vectormill.work.work import handing_back
from vectormill.workers.workers import beat_indexer


@pytest.fixture(autouse=True)
def _without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give requests no time to read objects."""
    monkeypatch.setattr(submissions, "READING_SECONDS", 0.0)


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


def read_inputs(engine: Engine, **settings: Any) -> int:
    """Read inputs as an indexer does; return their number."""
    keeper, number = InputLoop(url_of(engine), Settings(chunk_max_items=2, **settings), "test"), 0
    while keeper.step():
        number += 1
    keeper.close()
    return number


def leave(client: httpx.Client, tmp_path: Path, *names: str, **body: Any) -> str:
    """Submit objects that are left to an indexer, and return the id of their job."""
    answer = post(client, tmp_path, *names, **body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["state"] == "uploading"
    return str(answer.json()["id"])


def list_chunks(engine: Engine) -> list[tuple[int, int, int]]:
    with engine.connect() as connection:
        chunks = text("SELECT seq, first_item, num_items FROM vectormill.chunks ORDER BY seq")
        return [tuple(row) for row in connection.execute(chunks)]


def test_objects_that_take_long_are_read_by_an_indexer_into_the_job_that_the_answer_named(
    engine: Engine, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in" / "all.parquet", row_group_size=4)
    out = f"file://{tmp_path}/out/x"
    request = {
        "input": {"urls": [f"{tmp_path}/in/all.parquet"], "text": "body", "key": "id", "unique": True},
        "to": out,
        "options": SMALL,
    }
    headers = {"Idempotency-Key": "once"}
    first, again = (client.post("/v1/jobs", json=request, headers=headers) for _ in range(2))
    job, waiting = first.json(), {"state": "waiting", "num_items": 0, "num_compared": 0, "error": None}
    assert (first.status_code, again.status_code, again.json()["id"]) == (202, 202, job["id"]), again.text
    assert (job["state"], job["num_items"], job["input"]) == ("uploading", 0, waiting)
    assert "no live indexer" in job["waiting_because"]
    assert_problem(client.get(f"/v1/jobs/{job['id']}/vectors"), 409, "wrong-job-state", "is uploading")
    ask(engine, beat_indexer)
    assert ask(engine, discard_stale_uploads, 0) == 0, "nobody sends anything for it"
    assert client.get(f"/v1/jobs/{job['id']}").json()["waiting_because"] is None

    (tmp_path / "in" / "0.jsonl").unlink()  # of no importance to it
    assert read_inputs(engine) == 1
    job = client.get(f"/v1/jobs/{job['id']}").json()
    assert (job["state"], job["num_items"], job["num_chunks"]) == ("queued", 6, 3)
    assert job["input"] == {"state": "read", "num_items": 6, "num_compared": 6, "error": None}
    assert list_chunks(engine) == [(0, 0, 2), (1, 2, 2), (2, 4, 2)]
    again = client.post("/v1/jobs", json=request, headers=headers)
    assert (again.status_code, again.json()["id"]) == (202, job["id"])
    request["input"]["unique"] = False  # type: ignore[index]
    assert_problem(client.post("/v1/jobs", json=request, headers=headers), 422, "idempotency-mismatch")
    encode_waiting(engine)
    keep_outputs(engine)
    assert read_table(out).column("key").to_pylist() == [row["id"] for row in ROWS]


def test_whatever_a_request_has_read_when_its_time_is_over_no_chunk_is_there_twice(
    engine: Engine, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "REFERENCES_PER_PART", 1)
    states: list[str] = []
    ticks = 0
    while not states or states[-1] == "uploading":
        ticks += 1
        monkeypatch.setattr(submissions, "time", SimpleNamespace(monotonic=count().__next__))
        monkeypatch.setattr(submissions, "READING_SECONDS", float(ticks))
        answer = post(client, tmp_path, "in/*.jsonl", collection="docs", input={"unique": True}).json()
        states.append(answer["state"])
        read_inputs(engine)
        job = find(engine, answer["id"])
        assert (job.state, job.num_items) == ("queued", 6)
        with engine.begin() as connection:
            items = text("SELECT sum(num_items) FROM vectormill.chunks WHERE job_id = :id")
            assert connection.execute(items, {"id": job.id}).scalar_one() == 6
    assert len(states) > 6
    assert states[-1] == "queued"


def write_broken(folder: Path) -> None:
    (folder / "broken.parquet").write_bytes(b"PAR1 this is no table PAR1")


def write_torn(folder: Path) -> None:
    """Write a file whose footer is whole, and no page is."""
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "torn.parquet")
    content = bytearray((folder / "torn.parquet").read_bytes())
    content[4:40] = b"\xff" * 36
    (folder / "torn.parquet").write_bytes(content)


def write_twice(folder: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS[3:5]), folder / "twice.parquet")


@pytest.mark.parametrize(
    ("prepare", "names", "settings", "said"),
    [
        (
            write_twice,
            ("in/*.jsonl", "in/twice.parquet"),
            {},
            ("in/1.jsonl#0 and ", "in/twice.parquet#0:0 have the same key, 'k3'"),
        ),
        (
            write_broken,
            ("in/0.jsonl", "in/broken.parquet"),
            {},
            ("in/broken.parquet cannot be read as Parquet",),
        ),
        (write_torn, ("in/0.jsonl", "in/torn.parquet"), {}, ("in/torn.parquet cannot be read as Parquet",)),
        (lambda folder: (folder / "0.jsonl").unlink(), ("in/0.jsonl",), {}, ("in/0.jsonl does not exist",)),
        (None, ("in/*.jsonl",), {"max_job_items": 5}, ("more than 5 rows", "VECTORMILL_MAX_JOB_ITEMS")),
        (
            None,
            ("in/*.jsonl",),
            {"max_pending_items": 5},
            ("6 items would wait", "VECTORMILL_MAX_PENDING_ITEMS"),
        ),
    ],
    ids=["duplicate", "broken", "torn", "gone", "too many", "too many waiting"],
)
def test_objects_that_cannot_become_a_job_fail_it_by_name_and_leave_nothing(
    engine: Engine,
    client: httpx.Client,
    tmp_path: Path,
    prepare: Callable[[Path], object] | None,
    names: tuple[str, ...],
    settings: dict[str, int],
    said: tuple[str, ...],
) -> None:
    out = f"{tmp_path}/out/x"
    job_id = leave(client, tmp_path, *names, to=out, input={"unique": True})
    if prepare is not None:
        prepare(tmp_path / "in")
    assert read_inputs(engine, **settings) == 1
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["num_items"], job["output"]) == ("failed", 0, None)
    assert job["finished_at"] is not None
    assert job["input"]["state"] == "failed"
    assert all(part in job["input"]["error"] for part in said), job["input"]
    assert list_chunks(engine) == []
    assert not [*tmp_path.glob("out/**/*.json")]
    assert_problem(client.post(f"/v1/jobs/{job_id}/retry"), 409, "wrong-job-state", "The job is failed")
    leave(client, tmp_path, "in/1.jsonl", to=out)  # the folder is free again
    assert delete(client, f"/v1/jobs/{job_id}").status_code == 204


def test_addresses_that_are_not_allowed_are_refused_by_the_request_however_little_time_it_has(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    for name, said in (("elsewhere/1.jsonl", "VECTORMILL_SOURCE_ROOT"), ("in/../x", "'..'")):
        assert_problem(post(client, tmp_path, "in/0.jsonl", name), 422, "invalid-option", said)
    assert count_jobs(engine) == 0


def test_a_disk_without_room_for_the_keys_fails_the_job_before_it_reads_them(
    engine: Engine, client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "READING_SECONDS", 60.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
    # The disk of the API has no room either, which does not matter: it is that of the indexer.
    job_id = leave(client, tmp_path, "in/*.jsonl", collection="docs", input={"unique": True})
    assert read_inputs(engine) == 1
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert job["state"] == "failed"
    assert "6 keys takes 144 bytes" in job["input"]["error"]
    assert "100 are free" in job["input"]["error"]
    assert job["input"]["num_compared"] == 0
    monkeypatch.undo()
    job_id = leave_long(client, tmp_path, monkeypatch)
    assert read_inputs(engine) == 1
    assert client.get(f"/v1/jobs/{job_id}").json()["collection"] == "docs"


def leave_long(client: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(submissions, "READING_SECONDS", 0.0)
    return leave(client, tmp_path, "in/*.jsonl", collection="docs", input={"unique": True})


def test_a_store_that_is_away_is_asked_again_and_the_job_says_so(
    engine: Engine, client: httpx.Client, tmp_path: Path, bucket: Double
) -> None:
    bucket.put("bucket/in.jsonl", b'{"text": "a text"}')
    bucket.fault = lambda method, path: 403 if method == "GET" else None
    answer = client.post("/v1/jobs", json={"input": {"urls": ["s3://bucket/in.jsonl"]}, "options": SMALL})
    job_id = answer.json()["id"]
    ask(engine, beat_indexer)
    for _ in range(Settings().max_attempts + 2):
        assert read_inputs(engine) == 1
        job = client.get(f"/v1/jobs/{job_id}").json()
        assert job["state"] == "uploading"
        assert (
            "could not be read and are tried again: StorageUnavailable: s3://bucket" in job["waiting_because"]
        )
        make_due(engine)
    bucket.fault = lambda method, path: None
    assert read_inputs(engine) == 1
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["num_items"], job["input"]["error"]) == ("queued", 1, None)


def test_a_reading_that_is_interrupted_anywhere_goes_on_with_the_next_chunk(
    engine: Engine, client: httpx.Client, tmp_path: Path, bucket: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "REFERENCES_PER_PART", 1)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=4)
    bucket.put("bucket/a.parquet", (tmp_path / "a.parquet").read_bytes())
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    for name in ("b", "c"):
        bucket.put(f"bucket/{name}.jsonl", lines.encode())
    settings = Settings(chunk_max_items=3)
    payloads = text("""
        SELECT chunks.id, chunks.seq, first_item, num_items, estimated_tokens, items
          FROM vectormill.chunks JOIN vectormill.chunk_payloads ON chunk_id = chunks.id
         WHERE job_id = :job_id ORDER BY seq
    """)

    def read(steps: float) -> list[Any]:
        """Submit the objects, read them with interruptions after so many steps, and return the chunks."""
        wanted = {"urls": ["s3://bucket/*"], "text": "body", "key": "id"}
        job_id = client.post("/v1/jobs", json={"input": wanted, "options": SMALL}).json()["id"]
        chunks: list[Any] = []
        while find(engine, job_id).state == "uploading":
            make_due(engine)
            taken = count()
            stopping: Callable[[], bool] = lambda: next(taken) >= steps  # noqa: B023, E731
            with engine.begin() as connection:
                claimed = claim_input(connection, "test", 30)
            assert claimed is not None
            held = HeldInput(
                engine=engine, lease=claimed[0], is_stopping=stopping, wanted=claimed[1],
                collection=None, error=None, settings=settings,
            )  # fmt: skip
            bucket.requests.clear()
            with handing_back(engine, claimed[0]):
                read_input(held)
            if len(chunks) > 3:
                assert ("GET", "bucket/a.parquet") not in bucket.requests, "its rows are written"
            found = list(execute(engine, payloads, job_id=job_id))
            assert found[: len(chunks)] == chunks, "what was written stays"
            chunks = found
            steps += 1  # so that it ends
        assert find(engine, job_id).num_items == 18
        return [tuple(row)[1:] for row in chunks]

    undisturbed = read(1e9)
    for steps in range(1, 12):
        assert read(steps) == undisturbed
    job_id = client.post(
        "/v1/jobs", json={"input": {"urls": ["s3://bucket/*"], "text": "body"}, "options": SMALL}
    ).json()["id"]
    execute(engine, "UPDATE vectormill.job_inputs SET attempt = 99 WHERE state = 'waiting'")
    assert read_inputs(engine) == 1
    assert find(engine, job_id).state == "failed"


def test_a_list_that_takes_long_is_left_to_an_indexer_which_keeps_its_lease_meanwhile(
    engine: Engine, client: httpx.Client, bucket: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LISTED_AT_ONCE", 3)
    for number in range(30):
        bucket.put(f"bucket/logs/{number}.jsonl", b'{"text": "a text"}')
    request = {"input": {"urls": ["s3://bucket/logs/*.jsonl"]}, "options": SMALL}
    assert_problem(
        client.post("/v1/jobs", json=request | {"dry_run": True}),
        422,
        "invalid-option",
        "Listing the objects",
    )
    assert client.post("/v1/jobs", json=request).json()["state"] == "uploading"
    assert len(bucket.requests) <= 4, "a list has ten pages"
    with engine.begin() as connection:
        claimed = claim_input(connection, "test", 30)
    assert claimed is not None
    lease, wanted, collection, error = claimed
    kept = []

    class Counted(HeldInput):
        def keep(self) -> None:
            kept.append(len(bucket.requests))

    read_input(
        Counted(
            engine=engine, lease=lease, is_stopping=lambda: False, wanted=wanted, collection=collection,
            error=error, settings=Settings(),
        )
    )  # fmt: skip
    assert all(later - earlier <= 2 for earlier, later in pairwise(kept))
    assert list_chunks(engine)[-1] == (29, 29, 1)


def make_due(engine: Engine) -> None:
    """As if the lease or the pause of an input was over."""
    execute(engine, "UPDATE vectormill.job_inputs SET available_at = now(), lease_until = now()")


def test_a_job_is_cancelled_while_its_objects_are_not_read_yet(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    job_id = leave(client, tmp_path, "in/*.jsonl", to=f"{tmp_path}/out/x")
    assert_problem(client.post(f"/v1/jobs/{job_id}/pause"), 409, "wrong-job-state", "still uploading")
    for _ in range(2):
        job = client.post(f"/v1/jobs/{job_id}/cancel").json()
        assert (job["state"], job["input"]["state"]) == ("cancelled", "cancelled")
    assert read_inputs(engine) == 0
    keep_outputs(engine)
    assert client.get(f"/v1/jobs/{job_id}").json()["output"]["state"] == "swept"
    assert delete(client, f"/v1/jobs/{job_id}").status_code == 204


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_job_left_to_an_indexer_survives_the_loss_of_its_commit_s_reply(
    engine: Engine, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    wanted = InputBody([f"file://{tmp_path}/in.jsonl"])
    with connected_engine(database_url) as other_api, ExitStack() as stack:
        new_job = NewJob(SPEC, idempotency_key="once")
        first, repeated = (JobWriter(each, new_job, Settings()) for each in (engine, other_api))
        stack.enter_context(first).add_content(b"same")
        with monkeypatch.context() as network:
            lose_commit_reply(engine, network, is_cut=is_cut)
            with pytest.raises(OperationalError) if is_cut else nullcontext():
                assert first.hand_over(wanted, lambda *_: None)[0].state == "uploading"
        stack.enter_context(repeated).add_content(b"same")
        answered = repeated.finish()
    assert (find(engine, str(answered.id)).state, count_jobs(engine)) == ("uploading", 1)


def test_the_command_line_follows_a_job_whose_objects_are_read_by_the_indexer(
    engine: Engine,
    client: httpx.Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VECTORMILL_API_URL", str(client.base_url))

    def command(*arguments: str) -> tuple[int, str, str]:
        return run(*arguments), *capsys.readouterr()

    (tmp_path / "in" / "twice.jsonl").write_text(json.dumps(ROWS[0]))
    fields = ["--text-field", "body", "--key-field", "id", "--dimensions", "8", "--unique"]
    status, job_id, told = command("submit", f"file://{tmp_path}/in/*.jsonl", *fields)
    assert status == 0
    assert "Its objects are being read. Watch it with `vectormill status " in told
    with indexing(engine, KeptSource()):
        status, shown, told = command("status", job_id.strip(), "--watch")
    assert status != 0
    assert "have the same key, 'k0'" in told
    assert "have the same key, 'k0'" in shown
    status, job_id, _ = command("submit", f"file://{tmp_path}/in/[01].jsonl", *fields)
    with indexing(engine, KeptSource()):
        wait_for(lambda: find(engine, job_id.strip()).state == "queued", 20, "the objects were read")
    assert count_jobs(engine) == 2


def find(engine: Engine, job_id: str) -> Any:
    return ask(engine, find_job, job_id)  # type: ignore[arg-type]
