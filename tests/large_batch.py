"""A large request batch from upload to download, with what each part of its way took of memory and of time.

`python -m tests.large_batch --lines 1000000` shows it by the resident memory of one process, which is API and indexer.
Vectors come from a stand-in, at once: workers are not what is measured here.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sqlalchemy import Engine

from tests.api_server import api_client
from tests.protocol import claim, dispatch_all
from tests.request_batches import keep_all, line
from tests.services import connected_engine, migrated_database, running_postgres
from vectormill.jobs.chunk import ChunkOutcome, load_payload
from vectormill.jobs.completion import complete_chunk
from vectormill.ragged import Ragged

BOUNDARY = "of-a-large-file"
DIMENSIONS = 384
TEXT = "In constant memory a file of any length is read, cut, encoded and written. " * 12
# Bytes above where it began, at the most, in what was done since.
MeasurePeak = Callable[[Callable[[], Any]], tuple[Any, int]]


@dataclass(frozen=True)
class Passage:
    """A part of the way."""

    name: str
    seconds: float
    peak_bytes: int


def write_form(num_lines: int) -> Iterator[bytes]:
    """A form with a file of so many lines, a piece at a time."""
    head = '--{0}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--{0}\r\n'
    head += 'Content-Disposition: form-data; name="file"; filename="large.jsonl"\r\n\r\n'
    yield head.format(BOUNDARY).encode()
    for start in range(0, num_lines, 500):
        lines = [
            json.dumps(line(number, f"{number} {TEXT}", dimensions=DIMENSIONS))
            for number in range(start, min(start + 500, num_lines))
        ]
        yield ("\n".join(lines) + "\n").encode()
    yield f"\r\n--{BOUNDARY}--\r\n".encode()


def encode(engine: Engine) -> None:
    """Every chunk that waits, with vectors of chance."""
    chance = np.random.default_rng(7)
    for dispatch in dispatch_all(engine, 1_000_000):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        with engine.begin() as connection:
            items = load_payload(connection, dispatch.chunk_id)
            vectors = chance.standard_normal((len(items), DIMENSIONS), dtype=np.float32) / 20
            everything = np.arange(len(items))
            outcome = ChunkOutcome({}, 1, 1, item_tokens=[200] * len(items))
            complete_chunk(connection, claimed, items, everything, Ragged.from_matrix(vectors), outcome)


def play(engine: Engine, http: httpx.Client, num_lines: int, measure_peak: MeasurePeak) -> list[Passage]:
    """The whole way; asserts that every line has its answer."""
    passages = []

    def go(name: str, act: Callable[[], Any]) -> Any:
        began = time.monotonic()
        answer, peak = measure_peak(act)
        passages.append(Passage(name, time.monotonic() - began, peak))
        return answer

    form = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    uploaded = go("upload", lambda: http.post("/v1/files", content=write_form(num_lines), headers=form))
    wanted = {
        "input_file_id": uploaded.json()["id"],
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    }
    name = http.post("/v1/batches", json=wanted).json()["id"]
    go("validation", lambda: keep_all(engine))
    encode(engine)
    go("finalizing", lambda: keep_all(engine))
    batch = http.get(f"/v1/batches/{name}").json()
    assert batch["status"] == "completed", batch
    assert batch["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}

    def download() -> tuple[int, int]:
        num_bytes, num_answers = 0, 0
        with http.stream("GET", f"/v1/files/{batch['output_file_id']}/content") as stream:
            for piece in stream.iter_raw():
                num_bytes += len(piece)
                num_answers += piece.count(b"\n")
        return num_bytes, num_answers

    found = go("download", download)
    told = http.get(f"/v1/files/{batch['output_file_id']}").json()
    assert found == (told["bytes"], num_lines)
    return passages


def measure_resident(act: Callable[[], Any]) -> tuple[Any, int]:
    """By the kernel's own peak, which is set back first (Linux, proc(5): clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = read_status("VmRSS")
    answer = act()
    return answer, max(read_status("VmHWM") - before, 0)


def read_status(name: str) -> int:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith(f"{name}:"):
            return 1024 * int(row.split()[1])
    raise AssertionError(f"the kernel does not tell {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    num_lines = parser.parse_args().lines
    with (
        running_postgres() as postgres_url,
        migrated_database(postgres_url) as url,
        connected_engine(url) as engine,
        api_client(engine) as http,
    ):
        http.timeout = httpx.Timeout(None)
        for passage in play(engine, http, num_lines, measure_resident):
            print(f"{passage.name:>11}: {passage.seconds:7.1f} s, {passage.peak_bytes / 2**20:6.1f} MiB")


if __name__ == "__main__":
    main()
