"""The results of a request batch's items, in their order, a chunk at a time; and the lines that became no
item.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from vectormill.domain.errors import JobNotFound
from vectormill.jobs.chunks.payloads import decode_payload
from vectormill.jobs.item import ItemFailure, Items
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import find_job
from vectormill.vectors.vector_types import Rows, choose_vector_type, missing_rows, read_block

# As two statements at once, chunks and payloads; a few chunks a page, as results are exported.
_CHUNKS_PER_PAGE: Final = 2
REFUSALS_PER_PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class AnswerBlock:
    """Items from position `first_item` on; of each its result [n, width], whether it has one [n], and its tokens [n].

    `failures` are by place in the block; an item without a result that is not among them was never tried.
    """

    first_item: int
    items: Items
    rows: Rows
    present: npt.NDArray[np.bool_]
    tokens: npt.NDArray[np.int32]
    failures: dict[int, ItemFailure]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A line of a batch that became no item, and why."""

    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


LIST_ANSWERS = text("""
    SELECT chunks.first_item, payload.items, own.vectors, own.item_tokens
      FROM vectormill.chunks
      JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chunks.id
      LEFT JOIN vectormill.chunk_vectors AS own ON own.chunk_id = chunks.id
     WHERE chunks.job_id = :job_id AND chunks.first_item >= :start AND chunks.state <> 'split'
     ORDER BY chunks.first_item
     LIMIT :limit
""")

LIST_FAILURES = text("""
    SELECT item, code, detail FROM vectormill.item_errors
     WHERE job_id = :job_id AND item >= :start AND item < :stop ORDER BY item
""")


def read_answers(engine: Engine, job_id: UUID) -> Iterator[AnswerBlock]:
    """All items of an ended job; memory does not grow with it. Raises JobNotFound, too when it is removed meanwhile."""
    with engine.connect() as connection:
        job = find_job(connection, job_id)
    position = 0
    while position < job.num_items:
        with engine.connect() as connection:
            page = _read_page(connection, job, position)
        if not page:
            raise JobNotFound(f"Job {job_id} was removed while its answers were read.")
        position = page[-1].first_item + len(page[-1].items)
        yield from page


def _read_page(connection: Connection, job: Job, start: int) -> list[AnswerBlock]:
    blocks = []
    values = {"job_id": job.id, "start": start, "limit": _CHUNKS_PER_PAGE}
    for row in connection.execute(LIST_ANSWERS, values).all():
        if row.first_item != start:
            break
        items = decode_payload(row.items)
        blocks.append(_make_block(connection, job, start, items, row.vectors, row.item_tokens))
        start += len(items)
    return blocks


def _make_block(
    connection: Connection,
    job: Job,
    first_item: int,
    items: Items,
    vectors: bytes | None,
    item_tokens: bytes | None,
) -> AnswerBlock:
    kind, num_items = choose_vector_type(job.spec, in_collection=False), len(items)
    if vectors is None:
        rows, present = (
            missing_rows(num_items, kind, job.spec.dimensions),
            np.zeros(num_items, dtype=np.bool_),
        )
    else:
        rows, present = read_block(vectors, kind, num_items, job.spec.dimensions)
    # None where no item of the chunk was encoded.
    tokens = np.zeros(num_items, np.int32) if item_tokens is None else np.frombuffer(item_tokens, dtype="<i4")
    failures = {}
    if not present.all():
        values = {"job_id": job.id, "start": first_item, "stop": first_item + num_items}
        failures = {
            row.item - first_item: ItemFailure(row.code, row.detail)
            for row in connection.execute(LIST_FAILURES, values)
        }
    return AnswerBlock(first_item, items, rows, present, tokens, failures)


INSERT_REFUSAL = text("""
    INSERT INTO vectormill.request_refusals (batch_id, line, custom_id, code, message, param)
    VALUES (:batch_id, :line, :custom_id, :code, :message, :param)
""")


def add_refusals(connection: Connection, batch_id: UUID, refusals: Sequence[Refusal]) -> None:
    """Behind keep_batch in the same transaction."""
    if refusals:
        values: list[dict[str, Any]] = [{"batch_id": batch_id, **asdict(refusal)} for refusal in refusals]
        connection.execute(INSERT_REFUSAL, values)


LIST_REFUSALS = text("""
    SELECT line, custom_id, code, message, param FROM vectormill.request_refusals
     WHERE batch_id = :batch_id AND line > :after ORDER BY line LIMIT :limit
""")


def read_refusals(engine: Engine, batch_id: UUID) -> Iterator[Refusal]:
    """In the order of lines, a page at a time."""
    after = 0
    while True:
        values = {"batch_id": batch_id, "after": after, "limit": REFUSALS_PER_PAGE}
        with engine.connect() as connection:
            page = [Refusal(*row) for row in connection.execute(LIST_REFUSALS, values)]
        yield from page
        if len(page) < REFUSALS_PER_PAGE:
            return
        after = page[-1].line
