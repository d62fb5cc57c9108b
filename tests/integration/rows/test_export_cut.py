"""An export whose job is removed meanwhile ends as an error that its client notices, in every format."""

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine, text

import api.routes.results
from tests.api_server import assert_problem, encode_waiting, many, submit
from tests.commands import run
from tests.database import ask
from vectormill.client import Client
from vectormill.domain.errors import JobNotFound
from vectormill.jobs.export import ResultBlock, read_results
from vectormill.jobs.jobs import delete_job
from vectormill.problems import ApiUnreachable

NUM_ITEMS = 40
API_SETTINGS = {"chunk_max_items": 2}


@pytest.fixture
def job_id(client: httpx.Client, engine: Engine) -> UUID:
    job = submit(client, many(NUM_ITEMS))
    encode_waiting(engine)
    return UUID(job["id"])


@pytest.fixture
def losing_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every export's job is removed when its first block has been read."""

    def read_and_lose(engine: Engine, job_id: UUID, after: str | None) -> Iterator[ResultBlock]:
        blocks = read_results(engine, job_id, after)
        yield next(blocks)
        ask(engine, delete_job, job_id)
        yield from blocks

    monkeypatch.setattr(api.routes.results, "read_results", read_and_lose)


@pytest.mark.parametrize("format", ["ndjson", "parquet", "npy"])
@pytest.mark.usefixtures("losing_the_job")
def test_an_export_whose_job_is_removed_breaks_off_and_leaves_the_file_that_was_there(
    client: httpx.Client, job_id: UUID, tmp_path: Path, format: str
) -> None:
    target = tmp_path / "vectors"
    target.write_bytes(b"of yesterday")
    with Client(str(client.base_url)) as ours, pytest.raises(ApiUnreachable, match="is incomplete"):
        ours.export(str(job_id), target, format)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of yesterday"]


@pytest.mark.usefixtures("losing_the_job")
def test_a_client_that_reads_vector_by_vector_hears_that_some_are_missing(
    client: httpx.Client, job_id: UUID
) -> None:
    with Client(str(client.base_url)) as ours, pytest.raises(ApiUnreachable, match="is incomplete"):
        list(ours.vectors(str(job_id)))


@pytest.mark.parametrize("name", ["vectors.jsonl", "vectors.parquet", "vectors.npy"])
@pytest.mark.usefixtures("losing_the_job")
def test_the_command_says_that_the_export_broke_off_and_leaves_no_file(
    client: httpx.Client, job_id: UUID, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    url = str(client.base_url)
    assert run("export", str(job_id), "-o", str(tmp_path / name), "--api-url", url) == 3
    assert "is incomplete" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_removed_before_the_first_block_is_not_found(
    client: httpx.Client, engine: Engine, job_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_and_read(engine: Engine, job_id: UUID, after: str | None) -> Iterator[ResultBlock]:
        blocks = read_results(engine, job_id)
        ask(engine, delete_job, job_id)
        return blocks

    monkeypatch.setattr(api.routes.results, "read_results", lose_and_read)
    assert_problem(client.get(f"/v1/jobs/{job_id}/vectors"), 404, "job-not-found", "0 of 40 items")


def test_blocks_that_are_missing_in_the_middle_are_noticed(engine: Engine, job_id: UUID) -> None:
    with engine.begin() as connection:  # as when a large job is removed in parts
        connection.execute(
            text("DELETE FROM vectormill.chunks WHERE job_id = :job_id AND first_item IN (10, 30)"),
            {"job_id": job_id},
        )
    with pytest.raises(JobNotFound, match="10 of 40 items"):
        list(read_results(engine, job_id))


class CuttingTransport(httpx.BaseTransport):
    """Ends the first answers after so many bytes, as a lost connection does."""

    def __init__(self, cuts: list[int]) -> None:
        self._real = httpx.HTTPTransport()
        self._cuts = cuts
        self.asked: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._real.handle_request(request)
        if not request.url.path.endswith("/vectors"):
            return answer
        self.asked.append(request.url.params.get("after", ""))
        body = answer.read()
        answer.close()
        stream = CutStream(body[: self._cuts.pop(0)]) if self._cuts else None
        return httpx.Response(answer.status_code, stream=stream) if stream else answer

    def close(self) -> None:
        self._real.close()


class CutStream(httpx.SyncByteStream):
    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body
        raise httpx.ReadError("the connection was lost")


def test_an_export_goes_on_behind_the_last_line_and_has_the_same_bytes(
    client: httpx.Client, job_id: UUID, tmp_path: Path
) -> None:
    whole = client.get(f"/v1/jobs/{job_id}/vectors").content
    length = len(whole) // NUM_ITEMS
    # In the first line, on its end, in the middle of a chunk, and in the last line.
    transport = CuttingTransport([length // 2, whole.index(b"\n") + 1, 7 * length, 30 * length])
    target = tmp_path / "vectors.jsonl"
    with Client(str(client.base_url), transport=transport, pause=lambda _: None) as ours:
        assert ours.export(str(job_id), target) == len(whole)
    assert target.read_bytes() == whole
    assert transport.asked[:3] == ["", "", many(NUM_ITEMS)[0]["key"]]
    assert len(transport.asked) == 5


def test_an_export_goes_on_behind_every_single_item(client: httpx.Client, job_id: UUID) -> None:
    path = f"/v1/jobs/{job_id}/vectors"
    lines = client.get(path).content.splitlines(keepends=True)
    for number in (0, 1, 2, NUM_ITEMS - 2, NUM_ITEMS - 1):
        rest = client.get(path, params={"after": many(NUM_ITEMS)[number]["key"]}).content
        assert rest == b"".join(lines[number + 1 :])


def test_what_cannot_go_on_is_refused(client: httpx.Client, job_id: UUID) -> None:
    path = f"/v1/jobs/{job_id}/vectors"
    assert_problem(client.get(path, params={"after": "nobody"}), 422, "invalid-option", "no item 'nobody'")
    wanted = {"after": many(1)[0]["key"], "format": "parquet"}
    assert_problem(client.get(path, params=wanted), 422, "invalid-option", "omit after")
