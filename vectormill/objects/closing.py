"""Closing: make the rows of an ended job visible in its folder, add them to its table, and write its manifest.

Workers leave staged parts (parts.py), which no reader takes for results. Here they become parts of some 64 MiB, in
their order. Which of them become the next part is recorded before it is written, and stays so until that part counts.
So whoever writes it, also a process that was killed or has lost its lease, writes the same rows under the same name:
no row is ever in two parts, and no part changes.
"""

import io
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import msgspec
from sqlalchemy import text

from vectormill.domain.errors import NotFound, ObjectChanged
from vectormill.objects.iceberg import add_parts
from vectormill.objects.manifest import MANIFEST, Manifest, OutputPart, read_manifest_below
from vectormill.objects.output import CLOSED, OUTPUT, SWEPT, HeldOutput
from vectormill.objects.parts import PREFIX, RECORD_PART, STAGED, name_part, open_writer
from vectormill.objects.reference import open_parquet
from vectormill.objects.store import delete_object, describe_object, list_folder, write_object

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
    # Whoever lost the lease while it wrote a manifest has perhaps replaced a newer one.
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
        # What workers of an older release wrote is a part already.
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
        # Of a process that was killed before it was recorded.
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
