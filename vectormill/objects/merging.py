"""Merge the small parts of an ended job into larger ones, which readers open faster and a manifest lists in less.

A merged part is written first; then one fenced transaction replaces the rows of the small parts by its own. So
a manifest names either the one or the others, and the objects that no row names any more are swept.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.objects.manifest import OutputPart
from vectormill.objects.output import PARTS_AT_ONCE, HeldOutput, list_parts
from vectormill.objects.parts import PREFIX, RECORD_PART, SUFFIX, open_writer
from vectormill.objects.reference import open_parquet
from vectormill.objects.store import describe_object, write_object

# Parts below the first size are merged until they have the second: 64 to 128 MiB are in memory at a time.
SMALL_BYTES: Final = 64 << 20
MERGED_BYTES: Final = 64 << 20
ROWS_PER_GROUP: Final = 1 << 16

FORGET_PARTS: Final = text("""
    DELETE FROM vectormill.output_parts WHERE job_id = :job_id AND name = ANY(CAST(:names AS text[]))
""")


def merge_parts(held: HeldOutput, small_bytes: int = SMALL_BYTES, merged_bytes: int = MERGED_BYTES) -> int:
    """Merge consecutive small parts of an output, and return the number of parts that were merged.

    None are merged that a table may already have. Raise LeaseLost, Stopping, and the errors of store.py.
    """
    if held.place.table_url is not None and held.lease.fence > 1:
        return 0
    num_merged = 0
    for group in _group_small(held, small_bytes, merged_bytes):
        name = f"{PREFIX}{group[0].first_item:012d}-merged-{held.lease.fence}{SUFFIX}"
        content = _join(held, group)
        write_object(f"{held.url}/{name}", content)
        merged = OutputPart(name, group[0].first_item, sum(part.num_rows for part in group), len(content))
        with held.engine.begin() as connection:
            held.lease.keep(connection)
            _replace(connection, held, group, merged)
        num_merged += len(group)
    return num_merged


def _group_small(held: HeldOutput, small_bytes: int, merged_bytes: int) -> Iterator[list[OutputPart]]:
    """Yield runs of at least two small parts, each run of about `merged_bytes`."""
    group: list[OutputPart] = []
    after = ""
    while True:
        held.keep()
        with held.engine.connect() as connection:
            page = list_parts(connection, held.lease.key, after, PARTS_AT_ONCE)
        for part in page:
            is_small = part.num_bytes < small_bytes
            if group and (not is_small or sum(each.num_bytes for each in group) >= merged_bytes):
                if len(group) > 1:
                    yield group
                group = []
            if is_small:
                group.append(part)
        if not page:
            break
        after = page[-1].name
    if len(group) > 1:
        yield group


def _join(held: HeldOutput, group: Sequence[OutputPart]) -> memoryview:
    """Return a Parquet file with the rows of these parts in their order."""
    import pyarrow as pa

    sink = io.BytesIO()
    writer = None
    waiting: list[Any] = []
    for part in group:
        held.keep()
        with open_parquet(describe_object(f"{held.url}/{part.name}")) as file:
            table = file.read()
        if writer is None:
            writer = open_writer(sink, table.schema)
        waiting.append(table)
        if sum(each.num_rows for each in waiting) >= ROWS_PER_GROUP:
            writer.write_table(pa.concat_tables(waiting).combine_chunks())
            waiting.clear()
    assert writer is not None, "a group has parts"
    if waiting:
        writer.write_table(pa.concat_tables(waiting).combine_chunks())
    writer.close()
    return sink.getbuffer()


def _replace(
    connection: Connection, held: HeldOutput, group: Sequence[OutputPart], merged: OutputPart
) -> None:
    job_id = held.lease.key
    connection.execute(FORGET_PARTS, {"job_id": job_id, "names": [part.name for part in group]})
    values = {"first_item": merged.first_item, "num_rows": merged.num_rows, "num_bytes": merged.num_bytes}
    connection.execute(RECORD_PART, {"job_id": job_id, "name": merged.name, **values})
