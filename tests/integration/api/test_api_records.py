"""Extraction jobs over HTTP, by RexUniNLU in a real worker's engine: records back, kept through retries and splits."""

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import JSON, api_client, assert_problem
from tests.chunk_work import encode_all
from tests.models import DEVICE
from tests.protocol import claim_next, dispatch_all
from tests.protocol import submit as submit_directly
from tests.rexuninlu import GOLDEN, describe, find_case, summarize
from vectormill.db.chunks.chunks import split_chunk
from vectormill.db.chunks.completion import complete_chunk
from vectormill.db.jobs.export import read_job_records
from vectormill.db.jobs.jobs import retry_job
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.jobs.chunk import ChunkOutcome, Claim
from vectormill.domain.jobs.item import ENCODING_FAILED, Item, ItemFailure
from vectormill.models.registry import Registry, make_spec
from vectormill.ragged import Ragged
from vectormill.settings import ModelEntry
from worker.engine.engine import Engine as EncodingEngine
from worker.settings import WorkerSettings

MODEL = "rex"
MODELS = {MODEL: ModelEntry(path=str(GOLDEN / "model"))}
CASE = find_case("ee_sport")
ITEMS = [{"key": f"k{number}", "text": CASE["text"] + " " * number} for number in range(5)]
BLANK = {"key": "blank", "text": " "}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncodingEngine]:
    card = Registry(MODELS).card(MODEL, weights=True)
    engine = EncodingEngine(card, DEVICE, WorkerSettings(threads=1), tmp_path_factory.mktemp("cache"))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine, models=MODELS, chunk_max_items=2) as client:
        yield client


def submit(client: httpx.Client, items: list[dict[str, Any]], **options: Any) -> httpx.Response:
    body = {"items": items, "model": MODEL, "options": options}
    return client.post("/v1/jobs", content=json.dumps(body), headers=JSON)


def test_records_are_those_of_the_reference_in_every_format(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    answer = submit(client, [*ITEMS, BLANK], extract_schema=json.dumps(CASE["schema"]))
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert job["options"]["task"] == "extract"
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    path = f"/v1/jobs/{job['id']}/results"
    rows = [json.loads(line) for line in client.get(path).text.splitlines()]
    assert [row["key"] for row in rows] == [item["key"] for item in ITEMS]
    assert describe(rows[0]["output"]) == summarize(CASE["output"])
    table = pq.read_table(io.BytesIO(client.get(path, params={"format": "parquet"}).content)).to_pylist()
    assert [(row["key"], json.loads(row["output"])) for row in table] == [
        (row["key"], row["output"]) for row in rows
    ]
    errors = client.get(f"/v1/jobs/{job['id']}/errors").json()["data"]
    assert [(error["key"], error["code"]) for error in errors] == [("blank", "empty_text")]


def test_a_schema_that_cannot_be_is_refused_with_its_place(client: httpx.Client) -> None:
    for schema, said in (
        ({"a": {" b": None}}, "schema.a. b"),
        ({"a": 3}, "schema.a"),
        ({}, "names no type"),
    ):
        answer = submit(client, ITEMS, extract_schema=json.dumps(schema))
        assert_problem(answer, 422, "invalid-option", said)
    assert_problem(submit(client, ITEMS), 422, "invalid-option", "needs a schema")


SPEC = make_spec(Registry(MODELS).card(MODEL), EncodingOptions(extract_schema='{"a": null}'))


def complete(engine: Engine, claim: Claim, failed: set[int]) -> None:
    """Commits a record for each wanted item, which names it, and fails some."""
    wanted = np.array(claim.wanted_items(0, claim.num_items) or range(claim.num_items), dtype=np.int64)
    records = [json.dumps([[{"type": str(item), "fence": claim.fence}]]).encode() for item in wanted]
    results = Ragged.from_rows([np.frombuffer(record, np.uint8) for record in records], np.uint8)
    failure = ItemFailure(ENCODING_FAILED, "for this test")
    outcome = ChunkOutcome(dict.fromkeys(failed & set(wanted.tolist()), failure), 10, 10)
    items = [Item(f"k{number}", f"text {number}".encode()) for number in range(claim.num_items)]
    with engine.begin() as connection:
        complete_chunk(connection, claim, items, wanted, results, outcome)


def test_records_outlive_a_retry_and_a_split(engine: Engine) -> None:
    items = [Item(f"k{number}", f"text {number}".encode()) for number in range(6)]
    job = submit_directly(engine, items, spec=SPEC, chunk_max_items=6)
    complete(engine, claim_next(engine), {1, 4})
    with engine.begin() as connection:
        retry_job(connection, job.id)
    with engine.begin() as connection:
        split_chunk(connection, claim_next(engine), "lost twice")
    (block, other) = list(read_job_records(engine, job.id))
    kept = [
        None if record is None else json.loads(record)[0][0]["type"]
        for record in block.records + other.records
    ]
    assert kept == ["0", None, "2", "3", None, "5"]
    assert len(dispatch_all(engine)) == 2
