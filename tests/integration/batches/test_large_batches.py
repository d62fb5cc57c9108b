"""A batch of many lines passes through API and indexer in the memory of a few chunks: no part of its way holds it."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.database import load_payload
from tests.protocol import claim, dispatch_all
from tests.request_batches import keep_all, line
from vectormill.jobs.chunk import ChunkOutcome
from vectormill.jobs.completion import complete_chunk
from vectormill.ragged import Ragged

# 20 MB of requests, and 120 MB of answers.
NUM_LINES = 20_000
MOST_BYTES = 24 << 20
BOUNDARY = "of-a-large-file"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
DIMENSIONS = 384
TEXT = "In constant memory a file of any length is read, cut, encoded and written. " * 12


@contextmanager
def little_memory(passage: str) -> Iterator[None]:
    """Assert that Python and NumPy allocate little at once in the block, which is a part of the batch's way."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MOST_BYTES, f"{passage}: {peak >> 20} MiB"


def write_form() -> Iterator[bytes]:
    """A form with the file, a piece at a time."""
    head = '--{0}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{0}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="large.jsonl"\r\n\r\n'
    yield head.format(BOUNDARY).encode()
    for start in range(0, NUM_LINES, 500):
        lines = (
            line(number, f"{number} {TEXT}", dimensions=DIMENSIONS) for number in range(start, start + 500)
        )
        yield "".join(f"{json.dumps(each)}\n" for each in lines).encode()
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


def encode_all(engine: Engine) -> None:
    """Give every chunk random vectors, as workers are not what is measured."""
    random = np.random.default_rng(7)
    for dispatch in dispatch_all(engine, 1_000_000):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        with engine.begin() as connection:
            items = load_payload(connection, dispatch.chunk_id)
            vectors = random.standard_normal((len(items), DIMENSIONS), dtype=np.float32) / 20
            outcome = ChunkOutcome({}, 1, 1, item_tokens=[200] * len(items))
            rows = Ragged.from_matrix(vectors)
            complete_chunk(connection, claimed, items, np.arange(len(items)), rows, outcome)


def count_answers(http: httpx.Client, file_id: str) -> tuple[int, int]:
    """Return the numbers of bytes and of lines."""
    num_bytes, num_answers = 0, 0
    with http.stream("GET", f"/v1/files/{file_id}/content") as stream:
        for piece in stream.iter_raw():
            num_bytes += len(piece)
            num_answers += piece.count(b"\n")
    return num_bytes, num_answers


def test_a_file_of_many_lines_is_answered_in_the_memory_of_a_few_chunks(engine: Engine) -> None:
    with api_client(engine) as http:
        with little_memory("upload"):
            uploaded = http.post("/v1/files", content=write_form(), headers=FORM).json()["id"]
        wanted = {"input_file_id": uploaded, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        name = http.post("/v1/batches", json=wanted).json()["id"]
        with little_memory("validation"):
            keep_all(engine)
        encode_all(engine)
        with little_memory("finalizing"):
            keep_all(engine)
        batch = http.get(f"/v1/batches/{name}").json()
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        with little_memory("download"):
            found = count_answers(http, batch["output_file_id"])
        assert found == (http.get(f"/v1/files/{batch['output_file_id']}").json()["bytes"], NUM_LINES)
