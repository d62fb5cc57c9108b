"""Commit a chunk: its results, errors, state and its job's counters, in one fenced transaction."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.bulk_loads import copy_rows, hold_bulk_load, remove_rows
from vectormill.collections.generation_tables import find_ranges, upsert_rows
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import VARYING, VECTOR
from vectormill.domain.vector_type import VectorType
from vectormill.jobs.bottleneck import PERSIST
from vectormill.jobs.chunk import (
    ChunkOutcome,
    Claim,
    insert_errors,
    keep_keys,
    write_payload,
)
from vectormill.jobs.chunks import add_truncations
from vectormill.jobs.item import (
    Item,
    ItemFailure,
    Items,
)
from vectormill.jobs.transitions import (
    ABANDON_CHUNK,
    COMMIT_CHUNK,
    REFUSE_CHUNK,
    count_chunk,
    end_under_fence,
)
from vectormill.ragged import Ragged
from vectormill.results.kind import Results, pack_objects, read_objects, take_objects
from vectormill.results.table import RESULT_KINDS
from vectormill.vectors.vector_types import (
    Rows,
    find_vector_failures,
    make_column_rows,
    make_rows,
    missing_rows,
    pack_block,
    read_block,
)

SELECT_CHUNK_VECTORS = text("SELECT vectors, item_tokens FROM vectormill.chunk_vectors WHERE chunk_id = :id")

UPSERT_CHUNK_VECTORS = text("""
    INSERT INTO vectormill.chunk_vectors (chunk_id, vectors, item_tokens) VALUES (:chunk_id, :vectors, :item_tokens)
    ON CONFLICT (chunk_id) DO UPDATE SET vectors = excluded.vectors, item_tokens = excluded.item_tokens
""")


def complete_chunk(
    connection: Connection,
    claim: Claim,
    items: Sequence[Item],
    encoded: npt.NDArray[np.int64],
    results: Ragged,
    outcome: ChunkOutcome,
    read_persist_seconds: Callable[[], float] | None = None,
    record: Callable[[Connection], object] | None = None,
) -> bool:
    """Commit a chunk inside the caller's transaction. Return True if this ended the job.

    `items` are all items of the chunk. `encoded` [m] are the positions of those that were encoded, and
    `results` their vectors in the same order, rows of float32 [dimensions]. Results of items named in
    `outcome.failures` are not stored and may have any value. For int8 the ranges of the vector space must
    already be stored. `read_persist_seconds` is called before the last statement, to add the time of this
    commit to the job's stage seconds.

    With `record` the results are stored elsewhere: it is called under the fence to record where, and `results` are not
    looked at.

    Raise LeaseLost, after which the caller must roll back and discard its work, or SpecMismatch.
    """
    claim.check_space()
    if record is not None:
        end_under_fence(connection, claim, COMMIT_CHUNK, proof_id=outcome.proof_id)
        record(connection)
        num_done = len(encoded) - len(outcome.failures)
        return _end(connection, claim, items, outcome, num_done, read_persist_seconds)
    spec, is_kept = claim.spec, claim.generation_id is not None
    found: Mapping[int, bytes] = {}
    if spec.result in VARYING:
        found = {
            item: results.row(place).tobytes()
            for place, item in enumerate(encoded.tolist())
            if item not in outcome.failures
        }
        if is_kept:
            found, unstorable = RESULT_KINDS[spec.result].keep(found, spec)
            outcome = replace(outcome, failures={**outcome.failures, **unstorable})
        stored = np.fromiter(found, dtype=np.int64, count=len(found))
        kept = take_objects(list(found.values()))
        end_under_fence(connection, claim, COMMIT_CHUNK, proof_id=outcome.proof_id)
    else:
        kind = spec.kept_type if is_kept else spec.delivered_type
        rows, vectors, outcome = leave_out(encoded, results, spec, kind, outcome)
        stored = encoded[rows]
        end_under_fence(connection, claim, COMMIT_CHUNK, proof_id=outcome.proof_id)
        kept = (make_column_rows if is_kept else make_rows)(vectors, kind, find_ranges(connection, spec))
    if claim.generation_id is not None:
        num_repeated = _upsert(connection, claim, claim.generation_id, items, stored, kept, outcome.failures)
        outcome = replace(outcome, num_repeated=num_repeated)
    elif spec.result in VARYING:
        _store_records(connection, claim, found)
    else:
        _store_with_chunk(connection, claim, stored, kept, (encoded, outcome.item_tokens))
    return _end(connection, claim, items, outcome, len(stored), read_persist_seconds)


def _upsert(
    connection: Connection,
    claim: Claim,
    generation_id: int,
    items: Sequence[Item],
    stored: npt.NDArray[np.int64],
    results: Results,
    failures: Collection[int],
) -> int:
    """Write the results of the items at positions `stored` [n] into the job's generation.

    The job that fills a new generation copies its rows, whose keys were compared; any other one upserts them. Rows that
    an earlier attempt wrote for the items at positions `failures` are removed. Return the number of items whose key
    comes again behind them.
    """
    if claim.is_faulty and failures:
        failed = Items.of(items).take(sorted(failures))
        remove_rows(connection, generation_id, failed, claim.job_seq)
    taken = items if len(stored) == len(items) else Items.of(items).take(stored.tolist())
    target = generation_id, claim.job_seq
    if claim.is_fill:
        with driver_of(connection).cursor() as cursor:
            if hold_bulk_load(cursor, generation_id, claim.job_id):
                copy_rows(cursor, *target, Items.of(taken), results, claim.spec, keep_text=claim.keep_text)
                return 0
    return upsert_rows(connection, *target, taken, results, claim.spec, keep_text=claim.keep_text)


def _store_records(connection: Connection, claim: Claim, found: Mapping[int, bytes]) -> None:
    """Store the records by position with their chunk, beside those of items that were not to be encoded again."""
    records: list[bytes | None] = [None] * claim.num_items
    if claim.only_items is not None:
        earlier = connection.execute(SELECT_CHUNK_VECTORS, {"id": claim.chunk_id}).scalar_one_or_none()
        records = read_objects(earlier, claim.num_items)
        for item in claim.only_items:
            records[item] = None
    for item, record in found.items():
        records[item] = record
    values = {"chunk_id": claim.chunk_id, "vectors": pack_objects(records), "item_tokens": None}
    connection.execute(UPSERT_CHUNK_VECTORS, values)


def _end(
    connection: Connection,
    claim: Claim,
    items: Sequence[Item],
    outcome: ChunkOutcome,
    num_done: int,
    read_persist_seconds: Callable[[], float] | None,
) -> bool:
    """Record the outcome of a chunk after its results were stored; the job's counters are updated last."""
    failures = outcome.failures
    _insert_errors(connection, claim, items, failures)
    if isinstance(items, Items) and items.reference is not None and claim.output_url is None:
        blob = keep_keys(items.reference, items)
        if blob is not None:
            write_payload(connection, claim.chunk_id, blob)
    outcome = replace(outcome, truncated=[item for item in outcome.truncated if item not in failures])
    add_truncations(connection, claim.chunk_id, outcome.truncated)
    if read_persist_seconds is not None:
        stage_seconds = {**outcome.stage_seconds, PERSIST: read_persist_seconds()}
        # Carried over from an earlier chunk.
        stage_seconds[PERSIST] += outcome.stage_seconds.get(PERSIST, 0.0)
        outcome = replace(outcome, stage_seconds=stage_seconds)
    return count_chunk(connection, claim, outcome, num_done, len(failures))


def leave_out(
    encoded: npt.NDArray[np.int64],
    results: Ragged,
    spec: EncodingSpec,
    kind: VectorType,
    outcome: ChunkOutcome,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], ChunkOutcome]:
    """Return the rows [n] of `results` that can be stored, their vectors [n, dimensions], and the outcome.

    It has a failure for each vector that `kind` cannot hold, for which the server would refuse the whole chunk, or that
    would be zero. The vectors are a view if no item failed.
    """
    rows = np.arange(len(encoded))
    if outcome.failures:
        failed = np.fromiter(outcome.failures, dtype=np.int64, count=len(outcome.failures))
        rows = np.flatnonzero(~np.isin(encoded, failed))
        results = results.take(rows)
    vectors = results.matrix.reshape(-1, spec.dimensions)
    if spec.result == VECTOR and (unfit := find_vector_failures(vectors, kind)):
        more = {int(encoded[rows[row]]): failure for row, failure in unfit.items()}
        outcome = replace(outcome, failures={**outcome.failures, **more})
        rows, vectors = np.delete(rows, list(unfit)), np.delete(vectors, list(unfit), axis=0)
    return rows, vectors, outcome


def _store_with_chunk(
    connection: Connection,
    claim: Claim,
    stored: npt.NDArray[np.int64],
    rows: Rows,
    counted: tuple[npt.NDArray[np.int64], Sequence[int]],
) -> None:
    """Store the rows of a job without a collection with its chunk, as one value.

    The token counts are stored as another value: `counted` are the positions of items and the tokens of each.
    """
    num_items, dimensions, kind = claim.num_items, claim.spec.dimensions, claim.spec.delivered_type
    block, present = missing_rows(num_items, kind, dimensions), np.zeros(num_items, dtype=np.bool_)
    tokens = np.zeros(num_items, dtype="<i4")
    if claim.only_items is not None:
        earlier = connection.execute(SELECT_CHUNK_VECTORS, {"id": claim.chunk_id}).one_or_none()
        if earlier is not None:
            block[:], present[:] = read_block(earlier.vectors, kind, num_items, dimensions)
            wanted = list(claim.only_items)
            block[wanted], present[wanted] = missing_rows(len(wanted), kind, dimensions), False
            if earlier.item_tokens is not None:
                tokens[:] = np.frombuffer(earlier.item_tokens, dtype="<i4")
    block[stored], present[stored] = rows, True
    places, numbers = counted
    if len(numbers):
        tokens[places] = numbers
    values = {
        "chunk_id": claim.chunk_id,
        "vectors": pack_block(block, present, kind),
        "item_tokens": tokens.tobytes() if len(numbers) else None,
    }
    connection.execute(UPSERT_CHUNK_VECTORS, values)


def _insert_errors(
    connection: Connection, claim: Claim, items: Sequence[Item], failures: Mapping[int, ItemFailure]
) -> None:
    failed = [
        (claim.first_item + place, claim.chunk_id, items[place].key, failure)
        for place, failure in sorted(failures.items())
    ]
    insert_errors(connection, claim.job_id, failed)


def _remove_results(connection: Connection, claim: Claim, items: Sequence[Item]) -> None:
    """Remove what an earlier attempt stored for the items that are to be encoded again, and now fail."""
    none = np.empty(0, dtype=np.int64)
    if claim.generation_id is not None:
        _upsert(connection, claim, claim.generation_id, items, none, take_objects([]), claim.only_items or ())
    elif connection.execute(SELECT_CHUNK_VECTORS, {"id": claim.chunk_id}).one_or_none() is None:
        return  # readers would take an empty block for results, whose keys they expect
    elif claim.spec.result in VARYING:
        _store_records(connection, claim, {})
    else:
        rows = missing_rows(0, claim.spec.delivered_type, claim.spec.dimensions)
        _store_with_chunk(connection, claim, none, rows, (none, ()))


NOTHING = ChunkOutcome(failures={}, num_tokens=0, num_computed_tokens=0)


def cancel_chunk(connection: Connection, claim: Claim) -> None:
    """End a chunk of a job that is being cancelled; the last one makes the job `cancelled`.

    Raise LeaseLost.
    """
    end_under_fence(connection, claim, ABANDON_CHUNK)
    count_chunk(connection, claim, NOTHING, 0, 0)


def fail_chunk(
    connection: Connection, claim: Claim, items: Sequence[Item], failure: ItemFailure, proof_id: int | None
) -> bool:
    """Fail all items of a chunk with the same reason. Return True if this ended the job. Raise LeaseLost."""
    wanted = claim.only_items if claim.only_items is not None else range(claim.num_items)
    failures = dict.fromkeys(wanted, failure)
    end_under_fence(connection, claim, REFUSE_CHUNK, proof_id=proof_id)
    if claim.is_faulty and claim.output_url is None:
        _remove_results(connection, claim, items)
    _insert_errors(connection, claim, items, failures)
    return count_chunk(connection, claim, NOTHING, 0, len(failures))
