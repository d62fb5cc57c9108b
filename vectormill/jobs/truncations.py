"""Truncations: the items of a job that were longer than the model reads and were cut.

Only positions are stored; the keys are in the payloads. Each chunk with truncated items has one row with four
bytes for each: a job of ten million items that were all cut has 40 MB of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.domain.errors import JobNotFound, PayloadGone
from vectormill.jobs.chunk import decode_results, load_blob

# A page covers at most this many payloads, so that its cost does not depend on how few of their items were
# cut.
_CHUNKS_PER_PAGE = 16

# A retry encodes other items of the chunk than those that were cut before, so earlier positions stay valid.
ADD_TRUNCATIONS = text("""
    INSERT INTO vectormill.chunk_truncations AS known (chunk_id, items)
    VALUES (:chunk_id, CAST(:items AS integer[]))
    ON CONFLICT (chunk_id) DO UPDATE
       SET items = (SELECT array_agg(DISTINCT item ORDER BY item) FROM unnest(known.items || excluded.items) AS item)
""")


def add_truncations(connection: Connection, chunk_id: int, items: Sequence[int]) -> None:
    """Store the positions of a chunk's truncated items. Runs in the transaction that completes the chunk."""
    if items:
        connection.execute(ADD_TRUNCATIONS, {"chunk_id": chunk_id, "items": sorted(items)})


MOVE_TRUNCATIONS = text("""
    WITH moved AS (
        DELETE FROM vectormill.chunk_truncations WHERE chunk_id = :chunk_id RETURNING items
    )
    INSERT INTO vectormill.chunk_truncations (chunk_id, items)
    SELECT child.id, array_agg(parent.first_item + item - child.first_item ORDER BY item)
      FROM moved, unnest(moved.items) AS item, vectormill.chunks AS parent
      JOIN vectormill.chunks AS child ON child.job_id = parent.job_id AND child.parent_id = parent.id
     WHERE parent.id = :chunk_id
       AND parent.first_item + item BETWEEN child.first_item AND child.first_item + child.num_items - 1
     GROUP BY child.id
""")


def move_truncations(connection: Connection, chunk_id: int) -> None:
    """Assign the records of truncated items of a split chunk to its two halves."""
    connection.execute(MOVE_TRUNCATIONS, {"chunk_id": chunk_id})


# The page starts at the chunk that contains the item after `after`, which has the largest first_item not
# beyond it.
LIST_TRUNCATIONS = text("""
    SELECT chunks.id AS chunk_id, chunks.first_item, known.items AS positions
      FROM vectormill.chunks
      JOIN vectormill.chunk_truncations AS known ON known.chunk_id = chunks.id
     WHERE chunks.job_id = :job_id
       AND chunks.first_item >= (SELECT coalesce(max(first_item), 0) FROM vectormill.chunks
                                  WHERE job_id = :job_id AND first_item <= CAST(:after AS bigint) + 1)
     ORDER BY chunks.first_item
     LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class TruncatedItem:
    """An item that was cut. `item` is its position in the job, from 0."""

    item: int
    key: str


@dataclass(frozen=True, slots=True)
class TruncatedPage:
    """A page of truncated items in the order of submission; further ones come after the last of `items`."""

    items: list[TruncatedItem]
    has_more: bool


def list_truncated_items(
    connection: Connection, job_id: UUID, *, after: int | None, limit: int
) -> TruncatedPage:
    """Return a keyset page of at most `limit` truncated items after position `after`.

    A page may have fewer items even though more follow.
    """
    after = -1 if after is None else after
    values = {"job_id": job_id, "after": after, "limit": _CHUNKS_PER_PAGE + 1}
    rows = connection.execute(LIST_TRUNCATIONS, values).all()
    found: list[TruncatedItem] = []
    for row in rows[:_CHUNKS_PER_PAGE]:
        positions = [position for position in row.positions if row.first_item + position > after]
        if positions:
            found += _name_items(connection, row.chunk_id, row.first_item, positions)
        if len(found) > limit:
            break
    return TruncatedPage(found[:limit], len(found) > limit or len(rows) > _CHUNKS_PER_PAGE)


def _name_items(
    connection: Connection, chunk_id: int, first_item: int, positions: Sequence[int]
) -> list[TruncatedItem]:
    try:
        keys = decode_results(load_blob(connection, chunk_id)[0], has_results=False).keys
    except PayloadGone as error:  # the payload was removed between the two statements
        raise JobNotFound from error
    return [TruncatedItem(first_item + position, keys[position]) for position in positions]
