"""The keys of a job by reference: repeated ones, those of results whose object is gone, and deleted ones."""

import json
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from sqlalchemy import Engine

from scheduler.scrubber import Scrubber
from tests.api_server import delete
from tests.database import ask, execute
from tests.integration.objects.conftest import post
from tests.integration.objects.test_api_objects import encode_all
from tests.obedient_engine import FussyEngine, encoding_chunks, run_to_end
from tests.protocol import SPEC, vector_of
from vectormill.collections.collections import find_generation
from vectormill.collections.tombstones import delete_scrubbed
from vectormill.jobs.certificates import write_certificate_lines
from vectormill.jobs.export import read_chunk_at
from vectormill.jobs.jobs import find_job, retry_job
from vectormill.runs.samples import sample_chunks


def write_lines(tmp_path: Path, keys: list[str], name: str = "0.jsonl") -> None:
    lines = [
        json.dumps({"id": key, "body": f"text {place}", "page": place}) for place, key in enumerate(keys)
    ]
    (tmp_path / "in" / name).write_text("\n".join(lines))


def test_of_rows_with_one_key_in_a_chunk_the_last_is_kept_and_the_others_are_counted(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    write_lines(tmp_path, ["b", "a", "b", "c", "a", "b"])
    job_id = post(client, tmp_path, "in/0.jsonl", collection="docs", input={"metadata": ["page"]}).json()[
        "id"
    ]
    encode_all(engine, job_id)
    job = client.get(f"/v1/jobs/{job_id}").json()
    assert (job["state"], job["num_done"], job["num_repeated"]) == ("completed", 6, 3)
    rows = execute(engine, "SELECT key, metadata, embedding::real[] AS vector FROM docs ORDER BY key").all()
    assert [(row.key, row.metadata["page"]) for row in rows] == [("a", 4), ("b", 5), ("c", 3)]
    for row in rows:
        assert row.vector == pytest.approx(vector_of(f"text {row.metadata['page']}".encode()), abs=1e-2)


KEYS = [f"key {number}" for number in range(5)]


def certify(engine: Engine, job_id: str) -> list[str]:
    lines = [json.loads(line) for line in write_certificate_lines(engine, UUID(job_id))]
    return [line["digest"] for line in lines if line["kind"] == "chunk"]


@pytest.mark.parametrize("key", ["id", None])
@pytest.mark.parametrize("collection", ["docs", None])
@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("other")])
def test_results_are_read_resumed_and_certified_when_their_object_has_changed(
    engine: Engine,
    client: httpx.Client,
    tmp_path: Path,
    key: str | None,
    collection: str | None,
    change: Callable[[Path], object],
) -> None:
    write_lines(tmp_path, KEYS)
    job = post(client, tmp_path, "in/0.jsonl", collection=collection, input={"key": key}).json()
    encode_all(engine, job["id"])
    read = f"/v1/jobs/{job['id']}/vectors"
    before, certified = client.get(read).text, certify(engine, job["id"])
    keys = [json.loads(line)["key"] for line in before.splitlines()]
    assert keys == (KEYS if key else [f"file://{tmp_path}/in/0.jsonl#{place}" for place in range(5)])
    change(tmp_path / "in" / "0.jsonl")
    assert client.get(read).text == before
    rest = client.get(read, params={"after": keys[1]})
    assert (rest.status_code, rest.text) == (200, "".join(before.splitlines(keepends=True)[2:]))
    assert certify(engine, job["id"]) == certified
    assert client.get(f"{read.rpartition('/')[0]}/certificate").status_code == 200


def test_a_text_whose_object_has_changed_is_passed_over_by_samples_and_has_no_result_if_it_was_never_read(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    write_lines(tmp_path, KEYS)
    jobs = [post(client, tmp_path, "in/0.jsonl", collection="docs").json()["id"] for _ in range(2)]
    execute(engine, "UPDATE vectormill.jobs SET model = :model", model=SPEC.model)
    execute(engine, "UPDATE vectormill.jobs SET state = 'paused' WHERE id = :id", id=jobs[1])
    with encoding_chunks(engine) as encoder:
        run_to_end(engine, encoder, ask(engine, find_job, UUID(jobs[0])))
        (tmp_path / "in" / "0.jsonl").write_text("other")
        execute(engine, "UPDATE vectormill.jobs SET state = 'queued' WHERE id = :id", id=jobs[1])
        ended, _ = run_to_end(engine, encoder, ask(engine, find_job, UUID(jobs[1])))
    assert (ended.state, ended.num_failed) == ("failed", 5)
    job, generation = ask(engine, find_job, UUID(jobs[0])), ask(engine, find_generation, "docs")
    _, items, _, present = ask(engine, read_chunk_at, job, generation.id, 3)
    assert (list(items.keys), list(items.texts), bool(present.all())) == (KEYS, [b""] * 5, True)
    with engine.connect() as connection:
        assert list(sample_chunks(connection, generation, 9)) == []
    read = client.get(f"/v1/jobs/{jobs[1]}/vectors")
    assert (read.status_code, read.text) == (200, ""), "none of its items has a vector"


def test_a_deleted_key_never_comes_back_by_a_retry_of_a_job_by_reference(
    engine: Engine, client: httpx.Client, tmp_path: Path
) -> None:
    """`late` fails at first, is deleted, and its tombstone is looked at when it would be forgotten; so is a control."""
    for name in ("gone", "control"):
        lines = [json.dumps({"id": f"{name} {place}", "body": body}) for place, body in enumerate(("a", " "))]
        (tmp_path / "in" / "0.jsonl").write_text("\n".join(lines))
        job_id = post(client, tmp_path, "in/0.jsonl", collection="docs").json()["id"]
        execute(engine, "UPDATE vectormill.jobs SET model = :model", model=SPEC.model)
        fussy = FussyEngine()
        with encoding_chunks(engine, fussy) as encoder:
            run_to_end(engine, encoder, ask(engine, find_job, UUID(job_id)))
            if name == "gone":
                for place in range(2):
                    assert delete(client, f"/v1/collections/docs/items/gone {place}").status_code in (
                        204,
                        404,
                    )
            execute(engine, "UPDATE vectormill.collections SET created_at = created_at - interval '9 days'")
            Scrubber(engine).scrub(lambda: False)
            ask(engine, delete_scrubbed, 0.0)
            ask(engine, retry_job, UUID(job_id))
            fussy.is_fussy = False
            run_to_end(engine, encoder, ask(engine, find_job, UUID(job_id)))
    keys = execute(engine, "SELECT key FROM docs ORDER BY key").scalars().all()
    assert keys == ["control 0", "control 1"]
    execute(engine, "DELETE FROM vectormill.jobs")
    assert ask(engine, delete_scrubbed, 0.0) == 2, "no job could bring them back any more"
