"""Every vector type on a real Postgres: what is kept, exported and found is the reference vector, quantized once."""

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from tests.api_server import SMALL, api_client, assert_problem, encode_waiting, many, submit
from tests.database import ask
from tests.obedient_engine import ObedientEngine, encoding_chunks
from tests.protocol import SPEC, dispatch_all, make_items, vector_of
from tests.protocol import submit as submit_directly
from tests.waiting import run_together
from vectormill.collections.generation_tables import find_ranges, keep_ranges
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.jobs.export import read_results
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.job import Job
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec
from vectormill.ragged import Ragged
from vectormill.vectors.quantization import Ranges, measure_ranges, quantize, widen_ranges
from vectormill.vectors.vector_types import make_rows
from worker.chunk.calibrator import MARGIN_SHARE, Calibrator, read_sample
from worker.engine.request import EncodeRequest, EncodeResult

ITEMS = [*many(5), {"key": "blank", "text": " "}, *[{"key": f"x{n}", "text": f"more {n}"} for n in range(5)]]
GOOD = [item for item in ITEMS if item["key"] != "blank"]
VECTORS = np.stack([vector_of(item["text"].encode()) for item in GOOD])
RANGES = Ranges(np.full(8, -0.7, dtype=np.float32), np.linspace(0.5, 0.9, 8, dtype=np.float32))
TYPES_AND_PLACES = [(name, place) for name in VECTOR_TYPES for place in ("docs", None)]


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    spec = make_spec(Registry({}).card(DEFAULT_MODEL), EncodingOptions(dimensions=8, vector_type="int8"))
    ask(engine, keep_ranges, spec, RANGES)
    with api_client(engine, chunk_max_items=3) as client:
        yield client


def options(vector_type: str) -> dict[str, Any]:
    return {**SMALL, "vector_type": vector_type}


def read_all(engine: Engine, job: Job) -> tuple[np.ndarray, np.ndarray]:
    blocks = list(read_results(engine, job.id))
    return (
        np.concatenate([block.results for block in blocks]),
        np.concatenate([block.present for block in blocks]),
    )


@pytest.mark.parametrize(("vector_type", "collection"), TYPES_AND_PLACES)
def test_every_format_gives_the_rows_of_the_type(
    client: httpx.Client, engine: Engine, vector_type: str, collection: str | None
) -> None:
    job = submit(client, ITEMS, collection=collection, options=options(vector_type))
    assert (job["options"]["vector_type"], job["options"]["pooling"]) == (vector_type, "mean")
    encode_waiting(engine)
    expected = make_rows(VECTORS, VECTOR_TYPES[vector_type], RANGES)
    path = f"/v1/jobs/{job['id']}/vectors"

    rows = [json.loads(line) for line in client.get(path).text.splitlines()]
    assert [row["key"] for row in rows] == [item["key"] for item in GOOD]
    written = np.array([row["embedding"] for row in rows])
    assert np.array_equal(written.astype(expected.dtype), expected)
    if vector_type in ("int8", "binary"):
        assert written.dtype == np.int64  # whole numbers, written as such

    table = pq.read_table(io.BytesIO(client.get(path, params={"format": "parquet"}).content))
    column = table["embedding"].combine_chunks().flatten().to_numpy()
    assert column.dtype == expected.dtype
    assert np.array_equal(column.reshape(expected.shape), expected)

    answer = client.get(path, params={"format": "npy"})
    array = np.load(io.BytesIO(answer.content))
    assert answer.headers["content-length"] == str(len(answer.content))
    assert array.dtype == expected.dtype
    assert np.array_equal(np.delete(array, 5, axis=0), expected)
    assert np.isnan(array[5]).all() if expected.dtype.kind == "f" else not array[5].any()


@pytest.mark.parametrize(
    ("vector_type", "column"),
    [("float32", "vector(8)"), ("float16", "halfvec(8)"), ("int8", "halfvec(8)"), ("binary", "bit(8)")],
)
def test_a_collection_of_a_type_takes_no_job_of_another(
    client: httpx.Client, engine: Engine, vector_type: str, column: str
) -> None:
    submit(client, many(2), collection="docs", options=options(vector_type))
    with engine.connect() as connection:
        described = connection.execute(
            text("""
                SELECT format_type(atttypid, atttypmod) FROM pg_attribute
                 WHERE attrelid = CAST('docs' AS regclass) AND attname = 'embedding'""")
        ).scalar_one()
    assert described == column
    other = "float32" if vector_type != "float32" else "int8"
    body = {"items": many(2), "collection": "docs", "options": options(other)}
    said = f"vector_type is '{vector_type}', not '{other}'"
    assert_problem(client.post("/v1/jobs", json=body), 409, "spec-mismatch", said)
    unnamed = client.post("/v1/jobs", json={"items": many(2), "collection": "docs", "options": SMALL})
    assert unnamed.status_code == (202 if vector_type == "float16" else 409)


class CountingEngine(ObedientEngine):
    """Vectors that tell their text; counts the requests."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = np.float32(scale)
        self.num_requests = 0

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        self.num_requests += 1
        result = super().encode(request, cancelled)
        vectors = result.vectors * self.scale
        if not request.request_id.startswith("calibration"):
            return replace(result, results=Ragged.from_matrix(vectors))
        vectors[0] = 1000  # one bad text must not spoil the sample
        return replace(result, results=Ragged.from_matrix(vectors), failures={0: ItemFailure(EMPTY_TEXT, "")})


def test_ranges_are_measured_once_by_whoever_is_first(engine: Engine) -> None:
    spec = replace(SPEC, vector_type="int8")
    first, second = CountingEngine(), CountingEngine(scale=2)
    calibrator, other = Calibrator(engine, first.encode), Calibrator(engine, second.encode)
    never = threading.Event()
    run_together(*4 * [lambda: calibrator.prepare(spec, never)])
    other.prepare(spec, never)
    for vector_type in (None, "float32", "float16", "binary"):  # which have no codes
        other.prepare(replace(SPEC, vector_type=vector_type), never)
    assert (first.num_requests, second.num_requests) == (1, 0)
    ranges = ask(engine, find_ranges, spec)
    assert ranges is not None
    sample = np.stack([vector_of(each) for each in read_sample()[1:]])
    expected = widen_ranges(measure_ranges(sample), MARGIN_SHARE)
    assert np.array_equal(ranges.low, expected.low)
    assert np.array_equal(ranges.high, expected.high)
    with engine.begin() as connection:  # a worker that measured at the same time comes too late
        keep_ranges(connection, spec, RANGES)
        kept = find_ranges(connection, spec)
    assert kept is not None
    assert np.array_equal(kept.low, ranges.low)


def test_a_worker_calibrates_before_its_first_chunk_of_codes_and_never_again(engine: Engine) -> None:
    spec = replace(SPEC, vector_type="int8")
    job = submit_directly(engine, make_items(6), spec=spec, collection="docs", chunk_max_items=2)
    model = CountingEngine()
    with encoding_chunks(engine, model) as encoder:
        outcomes = [encoder.encode_chunk(each.chunk_id)["outcome"] for each in dispatch_all(engine)]
    assert outcomes == ["done"] * 3
    assert model.num_requests == 1 + 3
    ranges = ask(engine, find_ranges, spec)
    assert ranges is not None
    expected = quantize(np.stack([vector_of(item.text) for item in make_items(6)]), ranges)
    assert np.array_equal(read_all(engine, job)[0], expected)
