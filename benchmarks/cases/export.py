"""export: how fast a job's vectors come out over HTTP in each format, and how much memory that takes of the API."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from uuid import UUID

import numpy as np
import pyarrow.parquet

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.memory import MemorySampler
from benchmarks.results.report import Report
from benchmarks.results.spread import Spread
from benchmarks.results.table import Table, judge
from benchmarks.results.writing import write_mebibytes, write_number
from benchmarks.systems.own.own_api import OwnApi
from benchmarks.systems.own.stored_job import store_job
from benchmarks.texts import list_lines
from vectormill.cli.stack import workplace
from vectormill.client import EXPORT_FORMATS
from vectormill.db.session import make_engine
from vectormill.models.registry import DEFAULT_MODEL, EncodingOptions, Registry, make_spec

NUM_ITEMS: Final = 200_000
RATE_TARGET: Final = 30_000
GROWTH_TARGET_BYTES: Final = 50_000_000
READ_BYTES: Final = 1 << 20
# Where vectors are kept: with the job's chunks, or in a table that is read by key.
PLACES: Final[Mapping[str, str | None]] = {"no collection": None, "a collection": "benchmark"}


def measure(order: Order) -> Report:
    num_items = order.items or NUM_ITEMS
    spec = make_spec(Registry({}).card(DEFAULT_MODEL), EncodingOptions())
    order.steps.begin("export", 1 + len(PLACES) * (1 + len(EXPORT_FORMATS) * order.repeat))
    rows = []
    with workplace(None) as directory:
        order.steps.step("starting Postgres and the API")
        with OwnApi(directory) as api, ExitStack() as exits:
            engine = make_engine(api.database_url, application_name="benchmark")
            exits.callback(engine.dispose)
            for place, collection in PLACES.items():
                order.steps.step(f"writing {num_items:,} vectors into {place}")
                job_id = store_job(engine, spec, list_lines(num_items), collection)
                for format in EXPORT_FORMATS:
                    rows.append(_measure_format(order, api, directory, job_id, num_items, place, format))
    return Report(
        "export",
        f"{num_items:,} vectors of {spec.dimensions} values, {order.repeat} exports of each kind.",
        (Table(("vectors in", "rows/s", "target", "size", "API's growth", "target"), tuple(rows)),),
        (
            "From the request to the last byte, written into a file by a client that shares the machine's cores.",
            "Growth is the peak of the API's resident memory above that before the export.",
        ),
    )


def _measure_format(
    order: Order, api: OwnApi, directory: Path, job_id: UUID, num_items: int, place: str, format: str
) -> tuple[str, ...]:
    target = directory / f"vectors.{format}"
    seconds, growths = [], []
    for number in range(order.repeat):
        order.steps.step(f"{format} out of {place}, export {number + 1} of {order.repeat}")
        with MemorySampler([api.process]) as memory:
            seconds.append(api.export(str(job_id), format, target))
        growths.append(memory.growth_bytes)
        num_rows = count_rows(target, format)
        if num_rows != num_items:
            raise BenchmarkFailed(f"The export as {format} has {num_rows:,} rows of {num_items:,}.")
    size = target.stat().st_size
    target.unlink()
    rate, growth = Spread.of([num_items / each for each in seconds]), Spread.of(growths)
    return (
        f"{place}, {format}",
        rate.describe(write_number),
        judge(f"≥ {RATE_TARGET:,}", rate.median >= RATE_TARGET),
        write_mebibytes(size),
        growth.describe(write_mebibytes),
        judge("< 50 MB", growth.high < GROWTH_TARGET_BYTES),
    )


def count_rows(path: Path, format: str) -> int:
    """Rows of an exported file, so that a truncated export is not taken for a fast one."""
    if format == "npy":
        return len(np.load(path, mmap_mode="r"))
    if format == "parquet":
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(READ_BYTES), b""))
