"""Claim, renew, hand back and split chunks. Their commit is in completion.py.

Every statement that changes a leased chunk compares its fence, so a worker that lost its lease writes
nothing. All times are read from the database's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Connection, text

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import JobNotFound, PayloadGone
from vectormill.domain.task import VARYING
from vectormill.jobs.chunk import IS_LEASED, Claim, decode_results, load_blob, split_payload
from vectormill.jobs.transitions import (
    CLAIM_CHUNK,
    COUNT_CHILDREN,
    DIVIDE_CHUNK,
    INSERT_CHILD,
    RELEASE_CHUNK,
    end_under_fence,
)
from vectormill.results.kind import pack_objects, read_objects
from vectormill.vectors.vector_types import measure_item


@dataclass(frozen=True, slots=True)
class ClaimedChunk:
    """A claim and the chunk's payload as stored, to be decoded with open_payload.

    The payload is None if the pruner has removed it. `dispatch_seconds` is the time since the message of this
    claim was written; None if the claim came from a late message of an earlier dispatch. `places` gives the
    position of each item in the order of writers; None if all items have that of the job.
    """

    claim: Claim
    payload: bytes | None
    num_dispatches: int
    dispatch_seconds: float | None
    places: Sequence[int] | None = None


def claim_chunk(
    connection: Connection, chunk_id: int, owner: str, model: str, lease_seconds: float
) -> ClaimedChunk | None:
    """Lease a chunk for a worker of this model. No transaction is needed around the call.

    Return None if the message is a duplicate, stale or forged (for another model), or if the job is not to be
    worked on.
    """
    values = {
        "chunk_id": chunk_id,
        "owner": owner,
        "model": model,
        "lease_seconds": lease_seconds,
    }
    row = connection.execute(CLAIM_CHUNK, values).one_or_none()
    if row is None:
        return None
    claim = Claim(
        chunk_id=row.id,
        fence=row.fence,
        attempt=row.attempt,
        lost=row.lost,
        lapsed=row.lapsed,
        num_items=row.num_items,
        first_item=row.first_item,
        only_items=tuple(row.only_items) if row.only_items is not None else None,
        job_id=row.job_id,
        job_seq=row.job_seq,
        job_priority=row.priority,
        spec=EncodingSpec.from_json(row.spec),
        generation_id=row.generation_id,
        keep_text=bool(row.keep_text),
        generation_fingerprint=row.generation_fingerprint,
        num_tokens=row.num_tokens,
        traceparent=row.traceparent,
        output_url=row.output_url,
        output_schema=row.output_schema,
        is_fill=bool(row.is_fill),
        is_faulty=bool(row.is_faulty),
    )
    return ClaimedChunk(claim, row.items, row.dispatch_seq, row.dispatch_seconds, row.places)


# Locked rows are skipped: nearly always this worker's own commit holds the lock, and may itself be waiting
# for another lock. Such a chunk needs no renewal, since nobody can claim a locked row, and as of its last
# commit it is still ours.
RENEW_LEASES = text(f"""
    WITH held AS (
        SELECT * FROM unnest(CAST(:chunk_ids AS bigint[]), CAST(:fences AS bigint[])) AS held (id, fence)
    ), unlocked AS MATERIALIZED (
        SELECT chunk.id FROM held JOIN vectormill.chunks AS chunk ON chunk.id = held.id
         WHERE chunk.fence = held.fence AND chunk.{IS_LEASED}
           FOR NO KEY UPDATE OF chunk SKIP LOCKED
    ), renewed AS (
        UPDATE vectormill.chunks AS chunk SET lease_until = now() + make_interval(secs => :lease_seconds)
          FROM unlocked WHERE chunk.id = unlocked.id
    )
    SELECT chunk.id, job.state
      FROM held
      JOIN vectormill.chunks AS chunk ON chunk.id = held.id
      JOIN vectormill.jobs AS job ON job.id = chunk.job_id
     WHERE chunk.fence = held.fence AND chunk.{IS_LEASED}
""")


def renew_leases(connection: Connection, claims: Sequence[Claim], lease_seconds: float) -> dict[int, str]:
    """Renew all leases of a worker.

    Return the job's state by chunk id; a chunk whose lease was lost is missing.
    """
    values = {
        "lease_seconds": lease_seconds,
        "chunk_ids": [claim.chunk_id for claim in claims],
        "fences": [claim.fence for claim in claims],
    }
    return {row.id: row.state for row in connection.execute(RENEW_LEASES, values)}


def release_chunk(
    connection: Connection,
    claim: Claim,
    reason: str,
    *,
    is_counted: bool,
    is_lost: bool = False,
    is_lapsed: bool = False,
    delay_seconds: float = 0,
) -> bool:
    """Hand a chunk back so that it becomes `pending` again. Return False if the lease was already lost.

    With `is_counted` it counts as a failed attempt; a worker that shuts down hands chunks back uncounted.
    With `is_lost` it counts as a crash that this chunk may have caused, and with `is_lapsed` as an end that
    says nothing about its texts.
    """
    values = {
        "chunk_id": claim.chunk_id,
        "fence": claim.fence,
        "reason": reason,
        "is_counted": is_counted,
        "is_lost": is_lost,
        "is_lapsed": is_lapsed,
        "delay_seconds": delay_seconds,
    }
    return connection.execute(RELEASE_CHUNK, values).one_or_none() is not None


# The largest block, because Postgres keeps at most 1 GiB in one value.
_MAX_BYTES = 1 << 30

SELECT_OWN = text("SELECT vectors FROM vectormill.chunk_vectors WHERE chunk_id = :chunk_id")
REPLACE_OWN = text("""
    UPDATE vectormill.chunk_vectors SET vectors = :vectors
      FROM vectormill.chunks
     WHERE chunks.job_id = :job_id AND chunks.seq = :seq AND chunk_vectors.chunk_id = chunks.id
""")

DELETE_CONTENT = text("""
    WITH vectors AS (DELETE FROM vectormill.chunk_vectors WHERE chunk_id = :chunk_id)
    DELETE FROM vectormill.chunk_payloads WHERE chunk_id = :chunk_id
""")


def split_chunk(connection: Connection, claim: Claim, reason: str) -> None:
    """Replace a chunk that crashes its workers by two halves, to isolate the item that causes it.

    Either half may contain that item, so a loss is recorded for both. Runs in the caller's transaction. Raise
    LeaseLost if the lease was lost. A chunk of one item is not split: fail it with a reason instead.
    """
    end_under_fence(connection, claim, DIVIDE_CHUNK, reason=reason)
    blob, places = load_blob(connection, claim.chunk_id)
    next_seq: int = connection.execute(COUNT_CHILDREN, {"job_id": claim.job_id}).scalar_one() - 2
    halves = split_payload(blob, places, claim.num_items // 2, claim.spec, claim.num_tokens)
    # Vectors are stored with the chunk only if the job has no collection, so only then is there a block to
    # cut.
    row_bytes = measure_item(claim.spec.delivered_type, claim.spec.dimensions)
    has_records = claim.spec.result in VARYING
    own = {"chunk_id": claim.chunk_id}
    packed = connection.execute(SELECT_OWN, own).scalar_one_or_none() if has_records else None
    records = read_objects(packed, claim.num_items)
    start = 0
    for child, half in enumerate(halves):
        stop = start + half.num_items
        connection.execute(
            INSERT_CHILD,
            {
                "job_id": claim.job_id,
                "seq": next_seq + child,
                "first_item": claim.first_item + start,
                "end_item": claim.first_item + stop,
                "num_items": half.num_items,
                "estimated_tokens": half.num_tokens,
                "only_items": claim.wanted_items(start, stop),
                "parent_id": claim.chunk_id,
                "lost": min(claim.lost, 1),
                "lapsed": claim.lapsed // 2,
                "items": half.items,
                "places": half.places,
                "first_byte": min(start * row_bytes + 1, _MAX_BYTES),
                "num_bytes": min(half.num_items * row_bytes, _MAX_BYTES),
                "first_count": 4 * start + 1,
                "count_bytes": 4 * half.num_items,
            },
        )
        if has_records:  # records vary in length, so that the block cannot be cut by offsets
            values = {
                "vectors": pack_objects(records[start:stop]),
                "job_id": claim.job_id,
                "seq": next_seq + child,
            }
            connection.execute(REPLACE_OWN, values)
        start = stop
    connection.execute(MOVE_TRUNCATIONS, {"chunk_id": claim.chunk_id})
    connection.execute(DELETE_CONTENT, {"chunk_id": claim.chunk_id})


MARK_ALONE = text(f"""
    UPDATE vectormill.chunks SET is_alone = true WHERE id = :chunk_id AND fence = :fence AND {IS_LEASED}
""")


def mark_alone(connection: Connection, claim: Claim) -> None:
    """Record that no other chunk is being encoded alongside this one, so that a crash is attributed to it."""
    connection.execute(MARK_ALONE, {"chunk_id": claim.chunk_id, "fence": claim.fence})


def read_clock(connection: Connection) -> float:
    """Return the database's clock, by which leases expire, in seconds."""
    return float(connection.execute(text("SELECT extract(epoch FROM now())::float8")).scalar_one())


@dataclass(frozen=True, slots=True)
class ChunkPosition:
    """The state and fence of a chunk, read again after a COMMIT whose reply was lost."""

    state: str
    fence: int


def find_chunk(connection: Connection, chunk_id: int) -> ChunkPosition | None:
    """Return the state and fence of a chunk; None if its job was deleted."""
    row = connection.execute(
        text("SELECT state, fence FROM vectormill.chunks WHERE id = :chunk_id"), {"chunk_id": chunk_id}
    ).one_or_none()
    return ChunkPosition(row.state, row.fence) if row else None


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


# The records of a split chunk become those of its two halves.
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
