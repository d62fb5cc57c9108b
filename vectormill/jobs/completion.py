"""Commit a chunk: its results, errors, state and its job's counters, in one fenced transaction."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.bulk_loads import copy_rows, hold_bulk_load, remove_rows
from vectormill.collections.generation_tables import find_ranges, upsert_rows
from vectormill.collections.row_kinds import Results, take_objects
from vectormill.db.session import driver_of
from vectormill.domain.encoding import INT8, EncodingSpec
from vectormill.domain.task import RECORD, VARYING, VECTOR
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
    TOO_MANY_WEIGHTS,
    UNSTORABLE_RECORD,
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
from vectormill.jobs.vector_failures import find_vector_failures
from vectormill.ragged import Ragged
from vectormill.vectors.records import Records, UnstorableRecord, group_records, pack_records, read_records
from vectormill.vectors.representations import MAX_WEIGHTS, unpack
from vectormill.vectors.vector_types import (
    Rows,
    VectorType,
    choose_vector_type,
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
    if claim.spec.result in VARYING:
        return _complete_records(connection, claim, items, encoded, results, outcome, read_persist_seconds)
    spec = claim.spec
    kind = choose_vector_type(spec, in_collection=claim.generation_id is not None)
    rows, vectors, outcome = leave_out(encoded, results, spec, kind, outcome)
    stored = encoded[rows]
    end_under_fence(connection, claim, COMMIT_CHUNK, proof_id=outcome.proof_id)
    ranges = find_ranges(connection, spec) if kind.name == INT8 else None
    if claim.generation_id is not None:
        columns = make_column_rows(vectors, kind, ranges)
        num_repeated = _upsert(
            connection, claim, claim.generation_id, items, stored, columns, outcome.failures
        )
        outcome = replace(outcome, num_repeated=num_repeated)
    else:
        counted = (encoded, outcome.item_tokens)
        _store_with_chunk(connection, claim, stored, make_rows(vectors, kind, ranges), kind, counted)
    return _end(connection, claim, items, outcome, len(stored), read_persist_seconds)


def _complete_records(
    connection: Connection,
    claim: Claim,
    items: Sequence[Item],
    encoded: npt.NDArray[np.int64],
    results: Ragged,
    outcome: ChunkOutcome,
    read_persist_seconds: Callable[[], float] | None,
) -> bool:
    """Commit a chunk whose results are records or representations, as complete_chunk does for vectors.

    They are stored in the job's collection, or with the chunk if the job has none.
    """
    found = {
        item: results.row(place).tobytes()
        for place, item in enumerate(encoded.tolist())
        if item not in outcome.failures
    }
    if claim.generation_id is not None:
        found, unstorable = (
            _group(found) if claim.spec.result == RECORD else _leave_out_large(found, claim.spec)
        )
        outcome = replace(outcome, failures={**outcome.failures, **unstorable})
    end_under_fence(connection, claim, COMMIT_CHUNK, proof_id=outcome.proof_id)
    if claim.generation_id is not None:
        stored = np.fromiter(found, dtype=np.int64, count=len(found))
        rows = take_objects(list(found.values()))
        num_repeated = _upsert(connection, claim, claim.generation_id, items, stored, rows, outcome.failures)
        outcome = replace(outcome, num_repeated=num_repeated)
    else:
        _store_records(connection, claim, found)
    return _end(connection, claim, items, outcome, len(found), read_persist_seconds)


def _group(found: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, ItemFailure]]:
    """Group each record as a collection stores it.

    Return the grouped records, and failures for those that jsonb refuses. One refused record would make the
    server refuse the whole chunk.
    """
    grouped, failures = {}, {}
    for item, record in found.items():
        try:
            grouped[item] = group_records(record)
        except UnstorableRecord as error:
            failures[item] = ItemFailure(UNSTORABLE_RECORD, str(error))
    return grouped, failures


def _leave_out_large(
    found: Mapping[int, bytes], spec: EncodingSpec
) -> tuple[dict[int, bytes], dict[int, ItemFailure]]:
    """Return the representations that a collection can store, and failures for the others: the dense vector does not
    fit, or there are more weights than a sparsevec can have.
    """
    kept, failures = {}, {}
    kind = choose_vector_type(spec, in_collection=True)
    for item, packed in found.items():
        row = unpack(packed)
        if unfit := find_vector_failures(row.dense[np.newaxis], kind):
            failures[item] = unfit[0]
        elif len(row.indices) > MAX_WEIGHTS:
            failures[item] = ItemFailure(
                TOO_MANY_WEIGHTS,
                f"it has {len(row.indices):,} weights, and a sparsevec of Postgres at most {MAX_WEIGHTS:,}; use a "
                "smaller max_tokens",
            )
        else:
            kept[item] = packed
    return kept, failures


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
    records: Records = [None] * claim.num_items
    if claim.only_items is not None:
        earlier = connection.execute(SELECT_CHUNK_VECTORS, {"id": claim.chunk_id}).scalar_one_or_none()
        records = read_records(earlier, claim.num_items)
        for item in claim.only_items:
            records[item] = None
    for item, record in found.items():
        records[item] = record
    values = {"chunk_id": claim.chunk_id, "vectors": pack_records(records), "item_tokens": None}
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
    kind: VectorType,
    counted: tuple[npt.NDArray[np.int64], Sequence[int]],
) -> None:
    """Store the rows of a job without a collection with its chunk, as one value.

    The token counts are stored as another value: `counted` are the positions of items and the tokens of each.
    """
    num_items, dimensions = claim.num_items, claim.spec.dimensions
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
    kind = choose_vector_type(claim.spec, in_collection=claim.generation_id is not None)
    if claim.generation_id is not None:
        _upsert(connection, claim, claim.generation_id, items, none, take_objects([]), claim.only_items or ())
    elif connection.execute(SELECT_CHUNK_VECTORS, {"id": claim.chunk_id}).one_or_none() is None:
        return  # readers would take an empty block for results, whose keys they expect
    elif claim.spec.result in VARYING:
        _store_records(connection, claim, {})
    else:
        _store_with_chunk(
            connection, claim, none, missing_rows(0, kind, claim.spec.dimensions), kind, (none, ())
        )


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
