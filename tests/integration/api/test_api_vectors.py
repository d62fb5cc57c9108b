"""A job's vectors over HTTP, in every format."""

import io
import json
from collections.abc import Iterator

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, assert_problem, encode_waiting, many, submit
from tests.protocol import vector_of

ITEMS = [*many(5), {"key": "blank", "text": " "}, *[{"key": f"x{n}", "text": f"more {n}"} for n in range(5)]]
GOOD = [item for item in ITEMS if item["key"] != "blank"]
EXPECTED = np.stack([vector_of(item["text"].encode()) for item in GOOD])


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine, chunk_max_items=3) as client:
        yield client


@pytest.mark.parametrize(
    ("collection", "tolerance"),
    [
        (None, 0.0),  # kept with the job, as float32
        ("docs", 1e-3),  # kept in the collection, as float16
    ],
)
def test_every_format_gives_every_vector_in_the_order_of_submission(
    client: httpx.Client, engine: Engine, collection: str | None, tolerance: float
) -> None:
    path = f"/v1/jobs/{submit(client, ITEMS, collection=collection)['id']}/vectors"
    encode_waiting(engine)

    rows = [json.loads(line) for line in client.get(path).text.splitlines()]
    assert [row["key"] for row in rows] == [item["key"] for item in GOOD]
    vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
    assert np.abs(vectors - EXPECTED).max() <= tolerance

    table = pq.read_table(io.BytesIO(client.get(path, params={"format": "parquet"}).content))
    assert table["key"].to_pylist() == [item["key"] for item in GOOD]
    stored = np.array(table["embedding"].to_pylist(), dtype=np.float32)
    # NDJSON has as many digits as the vectors are kept with.
    kept = np.float32 if collection is None else np.float16
    assert np.array_equal(stored.astype(kept), vectors.astype(kept))

    answer = client.get(path, params={"format": "npy"})
    array = np.load(io.BytesIO(answer.content))
    assert answer.headers["content-length"] == str(len(answer.content))
    assert array.shape == (11, 8)
    assert np.isnan(array[5]).all()
    assert np.array_equal(np.delete(array, 5, axis=0), stored)


def test_a_job_that_has_not_ended_is_exported_only_when_parts_are_asked_for(
    client: httpx.Client, engine: Engine
) -> None:
    path = f"/v1/jobs/{submit(client, ITEMS)['id']}/vectors"
    assert_problem(client.get(path), 409, "wrong-job-state", "queued", "partial=true")
    assert client.get(path, params={"partial": True}).content == b""
    partial = client.get(path, params={"partial": True, "format": "npy"})
    assert np.isnan(np.load(io.BytesIO(partial.content))).all()
    encode_waiting(engine)
    assert len(client.get(path).text.splitlines()) == len(GOOD)


@pytest.mark.parametrize("query", ["format=csv", "partial=perhaps", "fromat=npy"])
def test_an_unknown_format_is_refused(client: httpx.Client, query: str) -> None:
    job_id = submit(client, ITEMS)["id"]
    problem = assert_problem(client.get(f"/v1/jobs/{job_id}/vectors?{query}"), 422, "invalid-request")
    assert problem["errors"][0]["parameter"] == query.partition("=")[0]
