"""OutputPart: a Parquet file with results of a job, and the record in Postgres that makes it count.

A worker writes the results of a chunk before it commits, as a staged part, under a name that no other claim of the
chunk has. They belong to the job only once the chunk's fenced commit has recorded them. No pattern for Parquet files
matches a staged part, and whoever reads whole folders leaves out names that begin with `_`: so readers see no row until
the job has ended and its staged parts have become parts. The sweep removes them later (closing.py does both).
"""

import io
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.collections.generation_tables import find_ranges
from vectormill.collections.row_kinds import take_objects
from vectormill.domain.encoding import INT8
from vectormill.domain.errors import InvalidOption, StorageUnavailable
from vectormill.domain.task import VARYING
from vectormill.files import parquet
from vectormill.files.roots import Roots
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.completion import leave_out
from vectormill.jobs.item import Items
from vectormill.objects.manifest import OutputPart, make_part_schema
from vectormill.objects.store import write_object
from vectormill.ragged import Ragged
from vectormill.vectors.vector_types import choose_vector_type, make_rows

PREFIX: Final = "part-"
STAGED: Final = "_staged/"


def name_staged(claim: Claim) -> str:
    """Return the name of the staged part that this claim of a chunk writes."""
    return f"{STAGED}{claim.first_item:012d}-{claim.chunk_id}-{claim.fence}.rows"


def name_part(staged: str) -> str:
    """Return the name of the part whose first rows are those of this staged part."""
    return f"{PREFIX}{staged.removeprefix(STAGED).removesuffix('.rows')}.parquet"


def write_staged(
    engine: Engine,
    claim: Claim,
    items: Items,
    encoded: npt.NDArray[np.int64],
    results: Ragged,
    outcome: ChunkOutcome,
    roots: Roots,
) -> tuple[OutputPart | None, ChunkOutcome]:
    """Stage the results of the items at positions `encoded` [m] that did not fail; nothing if all of them did.

    Return the staged part, and the outcome with a failure for each vector that the requested type cannot hold. Raise
    StorageUnavailable.
    """
    assert claim.output_url is not None, "the results of a job without an output are not staged"
    spec = claim.spec
    kept: npt.NDArray[Any]
    if spec.result in VARYING:
        rows = np.flatnonzero([item not in outcome.failures for item in encoded.tolist()])
        kept = take_objects([results.row(row).tobytes() for row in rows.tolist()])
    else:
        kind = choose_vector_type(spec, in_collection=False)
        rows, vectors, outcome = leave_out(encoded, results, spec, kind, outcome)
        ranges = None
        if kind.name == INT8:
            with engine.connect() as connection:
                ranges = find_ranges(connection, spec)
        kept = make_rows(vectors, kind, ranges)
    if not len(rows):
        return None, outcome
    stored = items if len(rows) == len(items) else items.take(encoded[rows].tolist())
    content = encode_part(stored, kept, claim)
    name = name_staged(claim)
    try:
        write_object(f"{claim.output_url}/{name}", content, roots)
    except InvalidOption as error:  # this worker's folders are others than those of the API that took the job
        raise StorageUnavailable(str(error)) from error
    return OutputPart(name, claim.first_item, len(rows), len(content)), outcome


def encode_part(items: Items, results: npt.NDArray[Any], claim: Claim) -> memoryview:
    """Return a Parquet file of key, content_hash, the result's columns, and metadata as JSON if an item has any."""
    import pyarrow as pa  # imported here, because most jobs need no object storage

    from vectormill.files.result_tables import RESULT_TABLES

    arrays = [pa.array(items.keys, pa.string()), pa.array(items.content_hashes(), pa.binary(16))]
    arrays += RESULT_TABLES[claim.spec.result].arrays(results, claim.spec)
    if any(items.metadata):
        arrays.append(pa.array([metadata.decode() or None for metadata in items.metadata], pa.string()))
    else:
        arrays.append(pa.nulls(len(items), pa.string()))
    table = pa.table(arrays, schema=make_part_schema(claim.spec))
    if claim.output_schema is not None:
        table = table.cast(pa.ipc.read_schema(pa.py_buffer(claim.output_schema)))
    sink = io.BytesIO()
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getbuffer()


def open_writer(sink: io.BytesIO, schema: Any) -> Any:
    """Open a pyarrow.parquet.ParquetWriter for a part: zstd, but for vectors, which no compression makes smaller."""
    compression = dict.fromkeys(schema.names, "zstd") | {"embedding.list.element": "none"}
    return parquet.open_writer(
        sink, schema, compression=compression, use_dictionary=False, write_statistics=["key"]
    )


RECORD_PART: Final = text("""
    INSERT INTO vectormill.output_parts (job_id, name, first_item, num_rows, num_bytes)
    VALUES (:job_id, :name, :first_item, :num_rows, :num_bytes)
""")


def record_part(connection: Connection, claim: Claim, part: OutputPart) -> None:
    """Make a part count, in the transaction that ends its chunk."""
    connection.execute(RECORD_PART, {"job_id": claim.job_id, **asdict(part)})
