"""A job's vectors over HTTP, in every format."""

import io

import httpx
import numpy as np
from sqlalchemy import Engine

from tests.api_server import assert_problem, encode_waiting, many, submit

ITEMS = [*many(5), {"key": "blank", "text": " "}, *[{"key": f"x{n}", "text": f"more {n}"} for n in range(5)]]
GOOD = [item for item in ITEMS if item["key"] != "blank"]
API_SETTINGS = {"chunk_max_items": 3}


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


def test_an_unknown_format_is_refused(client: httpx.Client) -> None:
    path = f"/v1/jobs/{submit(client, ITEMS)['id']}/vectors"
    for query in ("format=csv", "partial=perhaps", "fromat=npy"):
        problem = assert_problem(client.get(f"{path}?{query}"), 422, "invalid-request")
        assert problem["errors"][0]["parameter"] == query.partition("=")[0]
