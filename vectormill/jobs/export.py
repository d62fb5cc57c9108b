"""Read a job's results in item order, one chunk at a time, from its collection or from those of its chunks."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, Self, TypeVar
from uuid import UUID

import numpy as np
import numpy.typing as npt
import psycopg
from sqlalchemy import Connection, Engine, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import PRUNED
from vectormill.collections.collections import find_generation_by_id
from vectormill.collections.generation_tables import table_name
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import (
    CollectionNotFound,
    GenerationNotFound,
    InvalidOption,
    JobNotFound,
    ObjectChanged,
    WrongJobState,
)
from vectormill.domain.task import VARYING
from vectormill.jobs.chunk import DONE, decode_payload, decode_results
from vectormill.jobs.item import Items
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job, has_lost_collection
from vectormill.results.kind import Results, read_objects, take_objects
from vectormill.results.table import RESULT_KINDS
from vectormill.vectors.vector_types import missing_rows, read_block


@dataclass(frozen=True, slots=True)
class ResultBlock:
    """Consecutive items of a job from position `first_item` on: their keys [n] and their results as stored [n, …].

    Results are numbers, or the JSON of records and the packed form of representations. `present` [n] says which items
    have one.
    """

    first_item: int
    keys: Sequence[str]
    results: Results
    present: npt.NDArray[np.bool_]

    @property
    def end(self) -> int:
        """Return the position after the last item of the block."""
        return self.first_item + len(self.keys)

    def behind(self, position: int) -> Self:
        """Return the items of the block from this position in the job on."""
        cut = max(0, position - self.first_item)
        return replace(
            self,
            first_item=self.first_item + cut,
            keys=self.keys[cut:],
            results=self.results[cut:],
            present=self.present[cut:],
        )


# Only payloads are read, in the order of the index on (job_id, first_item), to search them for a key.
LIST_PAYLOADS = """
    SELECT chunks.first_item, payload.items
      FROM vectormill.chunks
      CROSS JOIN LATERAL vectormill.payload_of(chunks.id) AS payload
     WHERE chunks.job_id = %(job_id)s AND chunks.first_item >= %(start)s AND chunks.state <> 'split'
     ORDER BY chunks.first_item
     LIMIT %(limit)s
"""

_CHUNKS_WITH_RESULTS: Final = """
    SELECT chunks.first_item, payload.items, chunks.state, own.vectors, own.item_tokens
      FROM vectormill.chunks
      CROSS JOIN LATERAL vectormill.payload_of(chunks.id) AS payload
      LEFT JOIN LATERAL vectormill.vectors_of(chunks.id) AS own ON true
     WHERE chunks.job_id = %(job_id)s AND chunks.state <> 'split'
"""
LIST_CHUNKS = f"""
    {_CHUNKS_WITH_RESULTS} AND chunks.first_item >= %(start)s ORDER BY chunks.first_item LIMIT %(limit)s
"""


class Read(Protocol):
    """The items of one chunk that were read from a job."""

    @property
    def end(self) -> int:
        """Return the position in the job after the last item."""
        ...


R = TypeVar("R", bound=Read)
# The arguments are a connection, the position of the chunk's first item, its items, the blob stored with it, and the
# numbers of tokens of its items, if they were stored, as int32.
MakeBlock = Callable[[Connection, int, Items, bytes | None, bytes | None], R]

# Two pages are in memory, the current one and the next: 4 chunks of 512 items and 1024 components are 8 MiB.
_CHUNKS_PER_PAGE = 2
_SEARCHED_CHUNKS = 8


def read_results(engine: Engine, job_id: UUID, after: str | None = None) -> Iterator[ResultBlock]:
    """Yield blocks of all items of a job in the order of submission.

    With `after`, begin after the item with this key. Memory does not grow with the job. If another job has
    since written another text under the same key of a collection, that result is not this job's: `present` is
    False for it, as for an item that failed.

    Raise CollectionNotFound if the collection was deleted, and GenerationNotFound if the job's generation was
    replaced and its tables were removed. Raise JobNotFound before the first block, or at the first missing
    item if the job is removed during the export; the blocks until then are incomplete. Raise InvalidOption if
    no item has the key `after`.
    """
    job, generation_id = find_written(engine, job_id)

    def make_block(
        connection: Connection, first_item: int, items: Items, own: bytes | None, *_: object
    ) -> ResultBlock:
        results, present = read_stored(connection, job, generation_id, items, own)
        if generation_id is not None:
            results = RESULT_KINDS[job.spec.result].deliver(results)
        return ResultBlock(first_item, list(items.keys), results, present)

    return _read_behind(engine, job, make_block, after)


def _read_behind(
    engine: Engine, job: Job, make_block: MakeBlock[ResultBlock], after: str | None
) -> Iterator[ResultBlock]:
    if after is None:
        yield from read_blocks(engine, job, make_block, 0)
        return
    chunk_start, position = find_item(engine, job, after)
    for block in read_blocks(engine, job, make_block, chunk_start):
        if block.end > position + 1:
            yield block.behind(position + 1)


def find_item(engine: Engine, job: Job, key: str) -> tuple[int, int]:
    """Return the position of the item with this key, after that of the first item in its chunk.

    Keys are compressed together with their texts, so all chunks before it are searched, a few at a time.
    Raise InvalidOption if no item has the key.
    """
    start = 0
    while start < job.num_items:
        with engine.connect() as connection:
            values = {"job_id": job.id, "start": start, "limit": _SEARCHED_CHUNKS}
            rows = _fetch_binary(connection, LIST_PAYLOADS, values)
        for first_item, payload in rows:
            keys = decode_results(payload, has_results=False).keys
            if key in keys:
                return first_item, first_item + keys.index(key)
            start = first_item + len(keys)
        if not rows:
            raise JobNotFound(f"Job {job.id} was removed while its keys were being read.")
    raise InvalidOption(
        f"Job {job.id} has no item {key!r}; `after` must be the key of the last line that was received."
    )


def find_written(engine: Engine, job_id: UUID) -> tuple[Job, int | None]:
    """Return the job, and the id of the generation that has its results, if any.

    Raise the same errors as `read_results` raises before its first block.
    """
    with engine.connect() as connection:
        job = find_job(connection, job_id)
        if job.output_url is not None:
            raise WrongJobState(
                f"The results of job {job_id} are in {job.output_url}. Read them with vectormill.read_table, or, once "
                "the output is swept, with any reader of Parquet."
            )
        generation_id = connection.execute(
            text("SELECT generation_id FROM vectormill.jobs WHERE id = :job_id"), {"job_id": job_id}
        ).scalar_one()
        if generation_id is None and has_lost_collection(connection, job_id):
            raise CollectionNotFound(
                f"The results of job {job_id} were deleted together with the collection that it wrote to."
            )
        written = None if generation_id is None else find_generation_by_id(connection, generation_id)
        if written is not None and written.state == PRUNED:
            raise GenerationNotFound(
                f"The results of job {job_id} were in generation {written.id} of collection {job.collection!r}, which "
                "has been replaced and removed. The collection itself contains the current results."
            )
    return job, generation_id


def read_blocks(engine: Engine, job: Job, make_block: MakeBlock[R], start: int) -> Iterator[R]:
    # The next page is read on a second thread, so that Postgres and the socket work while the caller formats.
    with ThreadPoolExecutor(1, thread_name_prefix="export") as reader:
        upcoming, position = reader.submit(_read_page, engine, job, make_block, start), start
        while position < job.num_items:
            page = upcoming.result()
            position = page[-1].end
            if position < job.num_items:
                upcoming = reader.submit(_read_page, engine, job, make_block, position)
            yield from page


def _read_page(engine: Engine, job: Job, make_block: MakeBlock[R], start: int) -> list[R]:
    """Read the next few chunks of a job, in a separate transaction.

    A single transaction would hold back vacuum for hours if the reader is slow. Chunks are found by item
    position, because they may be split while the job is read. Raise JobNotFound if the item at `start` is
    missing.
    """
    blocks = []
    with engine.connect() as connection:
        values = {"job_id": job.id, "start": start, "limit": _CHUNKS_PER_PAGE}
        for first_item, payload, state, *own in _fetch_binary(connection, LIST_CHUNKS, values):
            if first_item != start:
                break
            items = decode_results(payload, has_results=state == DONE or own[0] is not None)
            blocks.append(make_block(connection, first_item, items, *own))
            start = blocks[-1].end
    if not blocks:
        raise JobNotFound(
            f"Job {job.id} was removed while its vectors were being read, after {start} of {job.num_items} items."
        )
    return blocks


def read_stored(
    connection: Connection, job: Job, generation_id: int | None, items: Items, own: bytes | None
) -> tuple[Results, npt.NDArray[np.bool_]]:
    """Return the stored results of a chunk's items [n], and which of them have one that is this job's.

    `generation_id` names the generation that has the results, and `own` is the blob stored with the chunk.
    """
    if generation_id is not None:
        try:
            return read_generation(connection, generation_id, items, job.spec)
        except psycopg.errors.UndefinedTable as error:
            raise CollectionNotFound(
                "The results of the job no longer exist: the generation that it wrote to was replaced or deleted. "
                "Use `vectormill collections export NAME -o FILE` to export the current content of a collection."
            ) from error
    if job.spec.result in VARYING:
        records = read_objects(own, len(items))
        return take_objects(records), np.array([record is not None for record in records])
    kind = job.spec.delivered_type
    if own is None:
        return missing_rows(len(items), kind, job.spec.dimensions), np.zeros(len(items), dtype=np.bool_)
    return read_block(own, kind, len(items), job.spec.dimensions)


READ_CHUNK_AT: Final = f"""
    {_CHUNKS_WITH_RESULTS} AND chunks.first_item <= %(position)s ORDER BY chunks.first_item DESC LIMIT 1
"""


def read_chunk_at(
    connection: Connection, job: Job, generation_id: int | None, position: int
) -> tuple[int, Items, Results, npt.NDArray[np.bool_]]:
    """Return the chunk with the item at this position: that of its first item, its items, results and which it has.

    Texts of an object that is another one now, or gone, are empty. Raise JobNotFound if the job was removed.
    """
    rows = _fetch_binary(connection, READ_CHUNK_AT, {"job_id": job.id, "position": position})
    if not rows:
        raise JobNotFound(f"Job {job.id} was removed while its texts were being read.")
    first_item, payload, state, own, _ = rows[0]
    try:
        items = decode_payload(payload)
    except ObjectChanged:
        items = decode_results(payload, has_results=state == DONE or own is not None)
    return first_item, items, *read_stored(connection, job, generation_id, items, own)


# vector_send, halfvec_send and bit_send return the binary form that COPY accepts. The server concatenates the
# rows, so that a whole chunk is one value that NumPy reads at once.
READ_GENERATION = """
    SELECT array_agg(item.ordinal), {results}
      FROM unnest(%(keys)b::text[], %(hashes)b::bytea[]) WITH ORDINALITY AS item (key, content_hash, ordinal)
      JOIN vectormill.{table} AS live ON live.key = item.key AND live.content_hash = item.content_hash
"""


def read_generation(
    connection: Connection, generation_id: int, items: Items, spec: EncodingSpec
) -> tuple[Results, npt.NDArray[np.bool_]]:
    """Return the results [n] that a generation has of these items, and for which of them it still has the same text."""
    kind = open_kind(driver_of(connection), spec)
    values = {"keys": list(items.keys), "hashes": items.content_hashes()}
    results = kind.gathered(kind.sent(spec, "live"))
    statement = READ_GENERATION.format(table=table_name(generation_id), results=results)
    ((ordinals, wire),) = _fetch_binary(connection, statement, values)
    rows, present = kind.missing(len(items), spec), np.zeros(len(items), dtype=np.bool_)
    if ordinals is not None:
        places = np.array(ordinals) - 1
        rows[places], present[places] = kind.read(wire, spec), True
    return rows, present


def _fetch_binary(connection: Connection, statement: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Fetch rows in the binary protocol.

    The text protocol would send each byte of a vector as two hexadecimal digits.
    """
    with driver_of(connection).cursor(binary=True) as cursor:
        rows: list[tuple[Any, ...]] = cursor.execute(statement, values).fetchall()
    return rows
