"""Parts of an output: Parquet files with results of a job, the records that make them count, and their manifest.

A worker writes the results of a chunk before it commits, as a staged part, under a name that no other claim of the
chunk has. They belong to the job only once the chunk's fenced commit has recorded them. No pattern for Parquet files
matches a staged part, and whoever reads whole folders leaves out names that begin with `_`: so readers see no row until
the job has ended and its staged parts have become parts. The sweep removes them later.
"""

import io
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.collections.generation_tables import find_ranges
from vectormill.domain.errors import InvalidOption, NotFound, ObjectChanged, StorageUnavailable
from vectormill.domain.task import VARYING
from vectormill.files import parquet
from vectormill.files.roots import Roots
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.completion import leave_out
from vectormill.jobs.item import Items
from vectormill.objects.iceberg import add_parts
from vectormill.objects.manifest import MANIFEST, Manifest, OutputPart, make_part_schema, read_manifest_below
from vectormill.objects.output import CLOSED, OUTPUT, SWEPT, HeldOutput
from vectormill.objects.reference import open_parquet
from vectormill.objects.store import delete_object, describe_object, list_folder, write_object
from vectormill.ragged import Ragged
from vectormill.results.kind import take_objects
from vectormill.results.table import choose_kind
from vectormill.vectors.vector_types import make_rows

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
        kind = spec.delivered_type
        rows, vectors, outcome = leave_out(encoded, results, spec, kind, outcome)
        ranges = None
        if kind.has_ranges:
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

    arrays = [pa.array(items.keys, pa.string()), pa.array(items.content_hashes(), pa.binary(16))]
    arrays += choose_kind(claim.spec).arrow_arrays(results, claim.spec)
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


# Staged parts are joined up to this size; so twice as much is in memory.
PART_BYTES: Final = 64 << 20
ROWS_PER_GROUP: Final = 1 << 16
# A worker that lost its lease may still be staging its results; after this time it has given up.
GRACE_SECONDS: Final = 900.0
PARTS_AT_ONCE: Final = 10_000

LIST_PARTS: Final = text("""
    SELECT name, first_item, num_rows, num_bytes FROM vectormill.output_parts
     WHERE job_id = :job_id AND name > :after ORDER BY name LIMIT :limit
""")

LIST_PLANNED: Final = text("""
    SELECT name, first_item, num_rows, num_bytes FROM vectormill.output_parts
     WHERE job_id = :job_id AND name IN (SELECT unnest(joining) FROM vectormill.job_outputs WHERE id = :job_id)
     ORDER BY name
""")

FIND_KNOWN: Final = text("""
    SELECT name FROM vectormill.output_parts WHERE job_id = :job_id AND name = ANY(CAST(:names AS text[]))
""")

PLAN: Final = OUTPUT.compose_keeping("joining = CAST(:names AS text[])")

FORGET_STAGED: Final = text("""
    DELETE FROM vectormill.output_parts WHERE job_id = :job_id AND name = ANY(CAST(:names AS text[]))
""")

CLOSE: Final = OUTPUT.compose_release(
    f"state = '{CLOSED}', closed_at = now(), attempt = 0, last_error = NULL, "
    "available_at = now() + make_interval(secs => CAST(:grace_seconds AS double precision))"
)

FINISH: Final = OUTPUT.compose_release(
    f"state = '{SWEPT}', attempt = 0, last_error = NULL, num_swept = num_swept + CAST(:num_swept AS bigint)"
)

DESCRIBE_JOB: Final = text("""
    SELECT id::text AS job_id, state, spec, num_items, num_done, num_failed, metadata, finished_at
      FROM vectormill.jobs WHERE id = :job_id
""")


def close_output(held: HeldOutput, grace_seconds: float = GRACE_SECONDS) -> None:
    """Write the parts and the manifest of an ended job, and close its output, to be swept after `grace_seconds`.

    If the output has a table, its parts are added to that before. A job that is tried again ends once more: it then
    gets more parts, and its manifest is replaced. Raise LeaseLost, Stopping, SpecMismatch, and the errors of store.py.
    """
    job_id = held.lease.key
    for group in _group_staged(held):
        _write_part(held, group)
    parts = list(_list_parts(held))
    if held.place.table_url is not None:
        # The parts of a former manifest have been added, even if the snapshot that did it is forgotten.
        former: set[str] = set()
        with suppress(NotFound):
            former = {part.name for part in read_manifest_below(held.url, held.roots).parts}
        paths = [f"{held.url}/{part.name}" for part in parts if part.name not in former]
        add_parts(held.place.table_url, job_id, paths, held.keep)
    _write_manifest(held, parts)
    with held.engine.begin() as connection:
        held.lease.release(connection, CLOSE, grace_seconds=grace_seconds)


def sweep(held: HeldOutput, grace_seconds: float = GRACE_SECONDS) -> int:
    """Remove what no commit has recorded, and staged parts whose rows are in parts; return the number of objects.

    A young one is left alone, because its writer may be about to commit: then the sweep is repeated. Raise LeaseLost,
    Stopping and StorageUnavailable.
    """
    num_swept, has_young = _remove_unknown(held, (STAGED, PREFIX), time.time() - grace_seconds)
    # An indexer that lost the lease while it wrote a manifest may have replaced a newer one.
    _write_manifest(held, list(_list_parts(held)))
    with held.engine.begin() as connection:
        if has_young:
            held.lease.hand_back(connection, pause_seconds=grace_seconds)
        else:
            held.lease.release(connection, FINISH, num_swept=num_swept)
    return num_swept


def _group_staged(held: HeldOutput) -> Iterator[list[OutputPart]]:
    """Yield consecutive staged parts of at most PART_BYTES together; first those of a part that was begun before.

    Then remove the parts that count nowhere: an older release has left them, or a future that a restored backup undid.
    """
    with held.engine.connect() as connection:
        planned = [OutputPart(*row) for row in connection.execute(LIST_PLANNED, {"job_id": held.lease.key})]
    if planned:
        yield planned
    _remove_unknown(held, (PREFIX,), before=math.inf)
    group: list[OutputPart] = []
    num_bytes = 0
    for part in _list_parts(held):
        # Workers of an older release have written a part already.
        if not part.name.startswith(STAGED):
            continue
        num_bytes += part.num_bytes
        if group and num_bytes > PART_BYTES:
            yield group
            group, num_bytes = [], part.num_bytes
        group.append(part)
    if group:
        yield group


def _list_parts(held: HeldOutput) -> Iterator[OutputPart]:
    """Yield the recorded parts of a job in the order of their names."""
    after = ""
    while True:
        held.keep()
        with held.engine.connect() as connection:
            values = {"job_id": held.lease.key, "after": after, "limit": PARTS_AT_ONCE}
            page = [OutputPart(*row) for row in connection.execute(LIST_PARTS, values)]
        yield from page
        if not page:
            return
        after = page[-1].name


def _write_part(held: HeldOutput, group: Sequence[OutputPart]) -> None:
    """Make one part of staged parts, and make it count in their place."""
    names = [part.name for part in group]
    with held.engine.begin() as connection:
        held.lease.keep(connection, PLAN, names=names)
    name = name_part(group[0].name)
    url = f"{held.url}/{name}"
    try:
        # This staged part is of a process that was killed before it was recorded.
        num_bytes = describe_object(url, held.roots).num_bytes
    except ObjectChanged:
        content = _encode(held, group)
        write_object(url, content, held.roots)
        num_bytes = len(content)
    joined = OutputPart(name, group[0].first_item, sum(part.num_rows for part in group), num_bytes)
    with held.engine.begin() as connection:
        held.lease.keep(connection)
        connection.execute(FORGET_STAGED, {"job_id": held.lease.key, "names": names})
        connection.execute(RECORD_PART, {"job_id": held.lease.key, **asdict(joined)})


def _encode(held: HeldOutput, group: Sequence[OutputPart]) -> memoryview:
    """Return a Parquet file with the rows of these parts in their order."""
    import pyarrow as pa

    sink = io.BytesIO()
    writer = None
    waiting: list[Any] = []
    for part in group:
        held.keep()
        with open_parquet(describe_object(f"{held.url}/{part.name}", held.roots)) as file:
            table = pa.Table.from_batches(file.iter_batches(), file.schema_arrow)
        if writer is None:
            writer = open_writer(sink, table.schema)
        waiting.append(table)
        # A part is small on disk whose rows are alike.
        if (
            sum(each.num_rows for each in waiting) >= ROWS_PER_GROUP
            or sum(each.nbytes for each in waiting) >= PART_BYTES
        ):
            writer.write_table(pa.concat_tables(waiting).combine_chunks())
            waiting.clear()
    assert writer is not None, "a group has parts"
    if waiting:
        writer.write_table(pa.concat_tables(waiting).combine_chunks())
    writer.close()
    return sink.getbuffer()


def _write_manifest(held: HeldOutput, parts: list[OutputPart]) -> None:
    with held.engine.connect() as connection:
        row = connection.execute(DESCRIBE_JOB, {"job_id": held.lease.key}).one()
    manifest = Manifest(
        job_id=row.job_id,
        state=row.state,
        spec=row.spec,
        num_items=row.num_items,
        num_rows=sum(part.num_rows for part in parts),
        num_failed=row.num_failed,
        metadata=row.metadata,
        finished_at=row.finished_at.isoformat(),
        parts=parts,
    )
    write_object(f"{held.url}/{MANIFEST}", msgspec.json.encode(manifest), held.roots)


def _remove_unknown(held: HeldOutput, prefixes: tuple[str, ...], before: float) -> tuple[int, bool]:
    """Remove the objects whose names begin so, that were written before that moment, and that no row names.

    Return their number, and whether there are younger ones. Raise LeaseLost, Stopping and StorageUnavailable.
    """
    num_removed, has_young = 0, False
    names: list[str] = []
    for each in list_folder(held.url, held.roots):
        held.keep()
        name = each.url.removeprefix(f"{held.url}/")
        if not name.startswith(prefixes):
            continue
        if each.modified_at > before:
            has_young = True
            continue
        names.append(name)
        if len(names) == PARTS_AT_ONCE:
            num_removed += _remove_names(held, names)
            names.clear()
    return num_removed + _remove_names(held, names), has_young


def _remove_names(held: HeldOutput, names: list[str]) -> int:
    with held.engine.connect() as connection:
        values = {"job_id": held.lease.key, "names": names}
        unknown = sorted(set(names) - set(connection.execute(FIND_KNOWN, values).scalars()))
    for name in unknown:
        held.keep()
        delete_object(f"{held.url}/{name}", held.roots)
    return len(unknown)
