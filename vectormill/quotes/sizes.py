"""Sizes: the time, disk, memory and cores that rows take, as figures with intervals. Uses no SQL and no hardware."""

from dataclasses import dataclass
from typing import Any, Final

from vectormill.collections.index_plan import SHAPES, estimate_graph_bytes, find_operator_class
from vectormill.collections.sizing import estimate_row_bytes
from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8
from vectormill.quotes.figure import Figure

# Seconds of one core for a row of 384 dimensions in an HNSW graph in memory, divided by m × ef_construction: 1.7 µs for
# the first 20,000 rows of 16 × 64 (docs/INDEXES.md), 1.3 µs for 200,000 of 16 × 128, 1.6 µs for the first 100,000 and
# 2.0 µs for five million of 8 × 32 (benchmarks/README.md, "Millions of rows").
BUILD_SECONDS: Final = Figure.between(1.1e-6, 2.4e-6)
# Bytes of a token in UTF-8, and how much of them Postgres keeps of a job's texts after compression.
TEXT_BYTES_PER_TOKEN: Final = 4.5
KEPT_SHARE: Final = Figure(0.5, 0.25, 0.75)
# Rows of real tables were within this share of what was computed, and those of attributes too.
ROW_SHARE: Final = 0.1
ATTRIBUTE_BYTES: Final = 190
# Pages that are not full: the last of the table, and the first ones of the index of keys.
PAGES_BYTES: Final = Figure(12 << 10, 0, 40 << 10)
BITS: Final = {FLOAT32: 32, FLOAT16: 16, INT8: 16, BINARY: 1}
# Seconds of the host's cores for a text and for each of its tokens: 35 µs for 16 tokens, 74 for 100 and 155 for 256 in
# a worker, and 25 to 55 µs in the other processes (docs/SIZING.md, "Host"); 115 µs in all, for 17 tokens, with five
# million rows in one collection (benchmarks/README.md, "Millions of rows").
HOST_TEXT_SECONDS: Final = Figure.between(53e-6, 115e-6)
HOST_TOKEN_SECONDS: Final = 0.5e-6
# From the submission to the first batch and from the last to the end of the job.
AROUND_SECONDS: Final = Figure(0.7, 0.2, 2.5)


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload is the texts that are to be encoded and the rows that are to be kept.

    `tokens_per_row` counts what the model reads of a row, and `encoded` is the share of all tokens that are encoded:
    the others are in texts that are known. The bytes are those of a row on average. Scores and records have no index.
    `graph` is m and ef_construction of the index; None: as Vectormill chooses.
    """

    rows: Figure
    tokens_per_row: Figure
    vector_type: str
    dimensions: int
    text_bytes: float
    encoded: Figure = Figure.exact(1)  # noqa: RUF009 - frozen
    key_bytes: float = 16
    metadata_bytes: float = 0
    has_vectors: bool = True
    graph: tuple[int, int] | None = None


def estimate_sizes(load: Workload, rate: Figure | None, cores: int) -> dict[str, Any]:
    """Return the figures of a load by name; those of time are None without a rate, in tokens per second.

    `cores` are those of the Postgres server that builds the index. `index_reason` says why there is none.
    """
    kind, reason = find_operator_class(load.vector_type, load.dimensions)
    if not (load.has_vectors and load.dimensions):
        kind, reason = None, "Only dense vectors have an index that can be computed before."
    has_index = kind is not None
    m, ef_construction = load.graph or max(shape for shape in SHAPES if shape[0] <= load.rows.value)[1:]
    build_seconds = BUILD_SECONDS * (m * ef_construction * load.dimensions / 384 / cores)
    graph_bytes = estimate_graph_bytes(1, kind.vector_bytes(load.dimensions), m) if kind else 0
    row_bytes = estimate_row_bytes(load.dimensions * BITS[load.vector_type] // 8, round(load.key_bytes))
    if load.metadata_bytes:
        row_bytes += round(ATTRIBUTE_BYTES + load.metadata_bytes)
    tokens = load.rows * load.tokens_per_row * load.encoded
    return {
        "tokens": tokens,
        **estimate_time(tokens, load.tokens_per_row, rate),
        "rows_bytes": load.rows * Figure.around(row_bytes, ROW_SHARE) + PAGES_BYTES,
        "texts_bytes": load.rows * load.text_bytes * KEPT_SHARE,
        "index_bytes": load.rows * graph_bytes if has_index else None,
        "index_seconds": load.rows * build_seconds if has_index else None,
        "index_reason": "" if has_index else reason,
    }


def estimate_time(tokens: Figure, tokens_per_row: Figure, rate: Figure | None) -> dict[str, Figure | None]:
    """Return the seconds of a job without others, and the cores that tokenize and commit; None without a rate."""
    if rate is None:
        return {"seconds": None, "host_cores": None}
    tokens_per_row = tokens_per_row.at_least(1)  # a text that fails has none
    host_seconds = HOST_TEXT_SECONDS + tokens_per_row * HOST_TOKEN_SECONDS
    return {
        "seconds": tokens / rate + AROUND_SECONDS,
        "host_cores": host_seconds * rate / tokens_per_row,
    }
