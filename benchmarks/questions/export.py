"""export: how fast the API exports a job's vectors in each format, and how much memory that takes."""

from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
import pyarrow.parquet
from sqlalchemy import Engine

from benchmarks.harness import BenchmarkFailed, Harness
from benchmarks.models import find_packaged
from benchmarks.ours import OwnApi
from benchmarks.processes import sample_memory
from benchmarks.tables import MEBIBYTES, NUMBER, Report, Spread, Table, judge
from benchmarks.texts import list_lines
from vectormill.cli.stack import workplace
from vectormill.client import EXPORT_FORMATS
from vectormill.db.session import make_engine
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.chunk import ChunkOutcome, open_payload
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.dispatch import mark_queued
from vectormill.jobs.item import Item
from vectormill.jobs.job import NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.models.registry import EncodingOptions, make_spec
from vectormill.ragged import Ragged
from vectormill.settings import Settings

NUM_ITEMS: Final = 200_000
RATE_TARGET: Final = 30_000
GROWTH_TARGET_BYTES: Final = 50_000_000
# Where the vectors are kept: with the job's chunks, or in a collection's table that is read by key.
PLACES: Final = {"no collection": None, "a collection": "benchmark"}


def run(harness: Harness) -> Report:
    num_items = harness.items or NUM_ITEMS
    spec = make_spec(find_packaged(), EncodingOptions())
    rows = []
    with workplace(None) as directory, OwnApi(directory) as api:
        engine = make_engine(api.database_url, application_name="benchmark")
        try:
            for place, collection in PLACES.items():
                harness.say(f"writing {num_items:,} vectors into {place}")
                job_id = store_job(engine, spec, num_items, collection)
                for format in EXPORT_FORMATS:
                    harness.say(f"{format} out of {place}")
                    row = measure_format(api, directory, job_id, num_items, format, harness.repeat)
                    rows.append((f"{place}, {format}", *row))
        finally:
            engine.dispose()
    return Report(
        f"{num_items:,} vectors of {spec.dimensions} values, {harness.repeat} exports of each kind.",
        (Table(("vectors in", "rows/s", "target", "size", "API's growth", "target"), tuple(rows)),),
        (
            "The time is from the request to the last byte, which a client on the same machine writes to a file.",
            "Growth is the peak of the API's resident memory above that before the export.",
        ),
    )


def measure_format(
    api: OwnApi, directory: Path, job_id: UUID, num_items: int, format: str, repeat: int
) -> tuple[str, ...]:
    target = directory / f"vectors.{format}"
    seconds, growths = [], []
    for _ in range(repeat):
        with sample_memory([api.process]) as memory:
            seconds.append(api.export(str(job_id), format, target))
        growths.append(memory.growth_bytes)
        if count_rows(target, format) != num_items:
            raise BenchmarkFailed(f"The export as {format} has not the {num_items:,} rows of the job.")
    rate, growth = Spread.of([num_items / each for each in seconds]), Spread.of(growths)
    return (
        NUMBER(rate),
        judge(f"≥ {RATE_TARGET:,}", rate.median >= RATE_TARGET),
        MEBIBYTES(target.stat().st_size),
        MEBIBYTES(growth),
        judge("< 50 MB", growth.high < GROWTH_TARGET_BYTES),
    )


def count_rows(path: Path, format: str) -> int:
    """Count the rows of an exported file, so that a truncated export is not taken for a fast one."""
    if format == "npy":
        return len(np.load(path, mmap_mode="r"))
    if format == "parquet":
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def store_job(engine: Engine, spec: EncodingSpec, num_items: int, collection: str | None) -> UUID:
    """Store a finished job with random vectors, by the functions that a worker uses, and return its id."""
    settings = Settings()
    with JobWriter(engine, NewJob(spec, collection=collection), settings) as writer:
        for item in list_lines(num_items):
            writer.add(Item(item["key"], item["text"].encode()))
        job = writer.finish()
    random = np.random.default_rng(job.seq)
    with engine.begin() as connection:
        dispatches = mark_queued(connection, [(job.id, job.num_chunks)])
    for dispatch in dispatches:
        with engine.begin() as connection:
            args = dispatch.chunk_id, "benchmark", dispatch.model, settings.lease_seconds
            claimed = claim_chunk(connection, *args)
            assert claimed is not None, "nobody else claims chunks here"
            items = open_payload(claimed.payload, claimed.claim.chunk_id)
            vectors = random.standard_normal((len(items), spec.dimensions), dtype=np.float32)
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            outcome = ChunkOutcome(failures={}, num_tokens=0, num_computed_tokens=0)
            places, rows = np.arange(len(items)), Ragged.from_matrix(vectors)
            complete_chunk(connection, claimed.claim, items, places, rows, outcome)
    return job.id
