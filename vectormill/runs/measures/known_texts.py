"""Texts by chance of which a generation has results: those that its collection keeps, or that jobs still have."""

from collections.abc import Iterator, Sequence
from typing import Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.kinds import choose_kind
from vectormill.collections.kinds.row_kind import Results
from vectormill.collections.rows.attributes import attributes_name, send_text
from vectormill.jobs.chunks.payloads import decode_payload
from vectormill.jobs.item import Item, Items

SAMPLE_KEPT_TEXTS: Final = """
    SELECT kept.key, {content} AS content
      FROM vectormill.{attributes} AS kept TABLESAMPLE SYSTEM (:share)
      JOIN vectormill.{table} AS live ON live.key = kept.key
     WHERE kept.text IS NOT NULL ORDER BY random() LIMIT :limit
"""


def sample_kept_texts(connection: Connection, generation: Generation, size: int) -> list[Item]:
    """So many items by chance whose texts are kept, or fewer."""
    table = generation.table_name
    content = send_text(choose_kind(generation.spec).text_columns, "kept")
    attributes = attributes_name(generation.id)
    statement = text(SAMPLE_KEPT_TEXTS.format(table=table, attributes=attributes, content=content))
    rows = connection.execute(statement, {"share": 10.0, "limit": size}).all()
    if len(rows) < size:  # a tenth of the blocks is enough of any large table
        rows = connection.execute(statement, {"share": 100.0, "limit": size}).all()
    return [Item(row.key, bytes(row.content)) for row in rows]


# Texts of jobs that wrote into the generation and are still there.
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
    """The items of chunks by chance whose results the generation got."""
    values = {"generation_id": generation.id, "limit": num_chunks}
    for payload in connection.execute(SAMPLE_PAYLOADS, values).scalars():
        yield decode_payload(payload)


READ_ROWS: Final = """
    SELECT array_agg(item.ordinal), {results}
      FROM unnest(%(keys)b::text[], %(hashes)b::bytea[]) WITH ORDINALITY AS item (key, content_hash, ordinal)
      JOIN vectormill.{table} AS live ON live.key = item.key AND live.content_hash = item.content_hash
"""


def read_rows(
    connection: Connection, generation: Generation, items: Sequence[Item]
) -> tuple[list[Item], Results]:
    """Read the items that the generation holds with this very text, and their results as they are kept."""
    kind, spec = choose_kind(generation.spec), generation.spec
    driver = connection.connection.driver_connection
    assert driver is not None
    gathered = kind.gathered(kind.sent(spec, "live"))
    statement = READ_ROWS.format(table=generation.table_name, results=gathered)
    values = {"keys": [item.key for item in items], "hashes": [item.content_hash() for item in items]}
    with driver.cursor(binary=True) as cursor:
        ((ordinals, wire),) = cursor.execute(statement, values).fetchall()
    if ordinals is None:
        return [], kind.missing(0, spec)
    # As they came, which is as they were gathered.
    return [items[ordinal - 1] for ordinal in ordinals], kind.read(wire, spec)
