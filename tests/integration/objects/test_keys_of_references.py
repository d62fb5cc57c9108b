"""The keys of a job by reference: repeated ones, those of results whose object is gone, and deleted ones."""

import json
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

from tests.database import execute
from tests.integration.objects.conftest import post
from tests.integration.objects.test_api_objects import encode_all
from tests.protocol import vector_of


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
