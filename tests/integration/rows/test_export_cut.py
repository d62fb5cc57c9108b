"""An export whose job is removed meanwhile ends as an error that its client notices, in every format."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine, text

import api.routes.vectors
from tests.api_server import api_client, assert_problem, encode_waiting, many, submit
from vectormill.cli.app import main
from vectormill.client import Client
from vectormill.db.jobs.export import VectorBlock, read_vectors
from vectormill.db.jobs.jobs import delete_job
from vectormill.domain.errors import JobNotFound
from vectormill.problems import ApiUnreachable

NUM_ITEMS = 40


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine, chunk_max_items=2) as client:
        yield client


@pytest.fixture
def job_id(client: httpx.Client, engine: Engine) -> UUID:
    job = submit(client, many(NUM_ITEMS))
    encode_waiting(engine)
    return UUID(job["id"])


def remove(engine: Engine, job_id: UUID) -> None:
    with engine.begin() as connection:
        delete_job(connection, job_id)


@pytest.fixture
def losing_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every export's job is removed when its first block has been read."""

    def read_and_lose(engine: Engine, job_id: UUID) -> Iterator[VectorBlock]:
        blocks = read_vectors(engine, job_id)
        yield next(blocks)
        remove(engine, job_id)
        yield from blocks

    monkeypatch.setattr(api.routes.vectors, "read_vectors", read_and_lose)


@pytest.mark.parametrize("format", ["ndjson", "parquet", "npy"])
@pytest.mark.usefixtures("losing_the_job")
def test_an_export_whose_job_is_removed_breaks_off_and_leaves_the_file_that_was_there(
    client: httpx.Client, job_id: UUID, tmp_path: Path, format: str
) -> None:
    target = tmp_path / "vectors"
    target.write_bytes(b"of yesterday")
    with Client(str(client.base_url)) as ours, pytest.raises(ApiUnreachable, match="what came is not whole"):
        ours.export(str(job_id), target, format)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of yesterday"]


@pytest.mark.usefixtures("losing_the_job")
def test_a_client_that_reads_vector_by_vector_hears_that_some_are_missing(
    client: httpx.Client, job_id: UUID
) -> None:
    with Client(str(client.base_url)) as ours, pytest.raises(ApiUnreachable, match="what came is not whole"):
        list(ours.vectors(str(job_id)))


@pytest.mark.parametrize("name", ["vectors.jsonl", "vectors.parquet", "vectors.npy"])
@pytest.mark.usefixtures("losing_the_job")
def test_the_command_says_that_the_export_broke_off_and_leaves_no_file(
    client: httpx.Client, job_id: UUID, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    url = str(client.base_url)
    with pytest.raises(SystemExit) as exit:
        main(["export", str(job_id), "-o", str(tmp_path / name), "--api-url", url])
    assert exit.value.code == 3
    assert "what came is not whole" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_is_removed_before_the_first_block_is_not_found(
    client: httpx.Client, engine: Engine, job_id: UUID, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_and_read(engine: Engine, job_id: UUID) -> Iterator[VectorBlock]:
        blocks = read_vectors(engine, job_id)
        remove(engine, job_id)
        return blocks

    monkeypatch.setattr(api.routes.vectors, "read_vectors", lose_and_read)
    assert_problem(client.get(f"/v1/jobs/{job_id}/vectors"), 404, "job-not-found", "0 of 40 items")


def test_blocks_that_are_missing_in_the_middle_are_noticed(engine: Engine, job_id: UUID) -> None:
    with engine.begin() as connection:  # as when a large job is removed in parts
        connection.execute(
            text("DELETE FROM vectormill.chunks WHERE job_id = :job_id AND first_item IN (10, 30)"),
            {"job_id": job_id},
        )
    with pytest.raises(JobNotFound, match="10 of 40 items"):
        list(read_vectors(engine, job_id))


def test_a_whole_export_is_what_it_was(client: httpx.Client, job_id: UUID) -> None:
    with Client(str(client.base_url)) as ours:
        assert [row["key"] for row in ours.vectors(str(job_id))] == [item["key"] for item in many(NUM_ITEMS)]
    assert len(json.loads(client.get(f"/v1/jobs/{job_id}/vectors").text.splitlines()[0])["embedding"]) == 8
