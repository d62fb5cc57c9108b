"""Texts by chance of which a generation has vectors: those that its collection keeps, or that jobs still have."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.db.chunks.payloads import decode_payload
from vectormill.db.rows.attributes import attributes_name
from vectormill.domain.collection import Generation
from vectormill.domain.jobs.item import Item, Items
from vectormill.vectors.vector_types import choose_vector_type, read_columns

SAMPLE_KEPT_TEXTS: Final = """
    SELECT kept.key, kept.text
      FROM vectormill.{attributes} AS kept TABLESAMPLE SYSTEM (:share)
      JOIN vectormill.{table} AS live ON live.key = kept.key
     WHERE kept.text IS NOT NULL ORDER BY random() LIMIT :limit
"""


def sample_kept_texts(connection: Connection, generation: Generation, size: int) -> list[Item]:
    """So many items by chance whose texts are kept, or fewer."""
    table = generation.table_name
    statement = text(SAMPLE_KEPT_TEXTS.format(table=table, attributes=attributes_name(generation.id)))
    rows = connection.execute(statement, {"share": 10.0, "limit": size}).all()
    if len(rows) < size:  # a tenth of the blocks is enough of any large table
        rows = connection.execute(statement, {"share": 100.0, "limit": size}).all()
    return [Item(row.key, row.text.encode()) for row in rows]


# Of jobs that wrote into the generation and are still there.
SAMPLE_PAYLOADS: Final = text("""
    SELECT payload.items
      FROM (SELECT chunk.id FROM vectormill.chunks AS chunk
             WHERE chunk.state = 'done'
               AND chunk.job_id IN (SELECT id FROM vectormill.jobs WHERE generation_id = :generation_id
                                     ORDER BY seq DESC LIMIT 100)
             ORDER BY random() LIMIT :limit) AS chosen
      JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chosen.id
""")


def sample_chunks(connection: Connection, generation: Generation, num_chunks: int) -> Iterator[Items]:
    """The items of chunks by chance whose vectors the generation got."""
    values = {"generation_id": generation.id, "limit": num_chunks}
    for payload in connection.execute(SAMPLE_PAYLOADS, values).scalars():
        yield decode_payload(payload)


READ_ROWS: Final = """
    SELECT array_agg(item.ordinal), string_agg({column}_send(live.embedding), '' ORDER BY item.ordinal)
      FROM unnest(%(keys)b::text[], %(hashes)b::bytea[]) WITH ORDINALITY AS item (key, content_hash, ordinal)
      JOIN vectormill.{table} AS live ON live.key = item.key AND live.content_hash = item.content_hash
"""


def read_rows(
    connection: Connection, generation: Generation, items: Sequence[Item]
) -> tuple[list[Item], npt.NDArray[Any]]:
    """Those of the items that the generation holds with this very text, and their rows [n, width] as they are kept."""
    kind = choose_vector_type(generation.spec, in_collection=True)
    driver = connection.connection.driver_connection
    assert driver is not None
    statement = READ_ROWS.format(table=generation.table_name, column=kind.column)
    values = {"keys": [item.key for item in items], "hashes": [item.content_hash() for item in items]}
    with driver.cursor(binary=True) as cursor:
        ((ordinals, wire),) = cursor.execute(statement, values).fetchall()
    if ordinals is None:
        return [], np.empty((0, kind.width(generation.spec.dimensions)), dtype=kind.row)
    held = [items[ordinal - 1] for ordinal in sorted(ordinals)]
    return held, read_columns(wire, kind, generation.spec.dimensions)
