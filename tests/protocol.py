"""Small steps of the chunk protocol for tests: submit, dispatch, claim, commit with known vectors."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID, uuid4

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from tests.database import ask, load_payload
from tests.kinds import VECTORS, numbers_of, record_bytes, representations_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RECORD, REPRESENTATIONS, SCORE
from vectormill.jobs.chunk import ChunkOutcome, Claim, Dispatch
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.dispatch import list_demands, mark_queued
from vectormill.jobs.item import EMPTY_TEXT, Item, ItemFailure
from vectormill.jobs.job import OPEN_JOB_STATES, Job, NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.ragged import Ragged
from vectormill.settings import Settings
from vectormill.workers.workers import beat_worker, name_owner

SPEC = VECTORS

# The process identity of the worker that tests register: repeated heartbeats come from the same process.
INCARNATION = uuid4()

# An item whose text begins like this is committed as truncated.
LONG = b"long "

# An item whose text begins like this cannot be encoded by any model.
FAULTY = b"faulty"


def make_items(count: int, prefix: str = "k") -> list[Item]:
    return [Item(f"{prefix}{number}", f"text {prefix} {number}".encode()) for number in range(count)]


def submit(
    engine: Engine,
    items: Iterable[Item],
    *,
    collection: str | None = None,
    spec: EncodingSpec = SPEC,
    chunk_max_items: int = 4,
    priority: int = 5,
    idempotency_key: str | None = None,
    output_url: str | None = None,
) -> Job:
    new_job = NewJob(
        spec, collection=collection, priority=priority, idempotency_key=idempotency_key, to=output_url
    )
    with JobWriter(engine, new_job, Settings(chunk_max_items=chunk_max_items)) as writer:
        for item in items:
            writer.add(item)
        return writer.finish()


def register_worker(
    engine: Engine,
    slots: int = 4,
    name: str = "w",
    incarnation: UUID = INCARNATION,
    launcher: UUID | None = None,
) -> str:
    """Register a worker by a heartbeat; return its name as an owner of leases."""
    assert ask(engine, beat_worker, name, incarnation, SPEC.model, slots, {}, launcher)
    return name_owner(name, incarnation)


def dispatch_all(engine: Engine, limit: int = 1000) -> list[Dispatch]:
    """Mark every waiting chunk of every model as queued; return the dispatches."""
    with engine.begin() as connection:
        models = connection.execute(text("SELECT DISTINCT model FROM vectormill.jobs")).scalars().all()
        demands = list_demands(connection, models, 100)
        return mark_queued(connection, [(demand.job_id, limit) for demand in demands])


FIND_MODEL = text("""
    SELECT model FROM vectormill.jobs JOIN vectormill.chunks ON chunks.job_id = jobs.id WHERE chunks.id = :chunk_id
""")


def claim(engine: Engine, chunk_id: int, owner: str = "w", lease_seconds: float = 30) -> Claim | None:
    """Claim a chunk as a worker for its model; return None when it cannot be claimed."""
    with engine.begin() as connection:
        model = connection.execute(FIND_MODEL, {"chunk_id": chunk_id}).scalar_one_or_none() or SPEC.model
        claimed = claim_chunk(connection, chunk_id, owner, model, lease_seconds)
    return None if claimed is None else claimed.claim


def claim_next(engine: Engine, owner: str = "w", lease_seconds: float = 30) -> Claim:
    """Dispatch and claim the first waiting chunk."""
    claimed = claim(
        engine, min(dispatch.chunk_id for dispatch in dispatch_all(engine, 1)), owner, lease_seconds
    )
    assert claimed is not None
    return claimed


COUNT_ANEW = text(f"""
    SELECT model, state, priority, generation_id, count(*),
           sum(vectormill.round_open(num_items - num_done - num_failed, num_items))::bigint,
           sum(vectormill.round_open(num_open_chunks, num_chunks))::bigint
      FROM vectormill.jobs WHERE state IN {OPEN_JOB_STATES}
     GROUP BY model, state, priority, generation_id
""")
SUM_COUNTS = text("""
    SELECT model, state, priority, generation_id, sum(num_jobs)::bigint, sum(num_items)::bigint, sum(num_chunks)::bigint
      FROM vectormill.open_job_counts
     GROUP BY model, state, priority, generation_id
    HAVING sum(num_jobs) <> 0 OR sum(num_items) <> 0 OR sum(num_chunks) <> 0
""")


def check_open_job_counts(engine: Engine) -> None:
    """Fail unless the counts of open jobs are what a count of all jobs gives."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        anew = connection.execute(COUNT_ANEW).all()
        counted = connection.execute(SUM_COUNTS).all()
    assert set(counted) == set(anew)


def vector_of(text: bytes, dimensions: int = SPEC.dimensions) -> npt.NDArray[np.float32]:
    """Return a unit vector float32 [dimensions] unique to the text, so that mixed-up rows are noticed."""
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    vector = np.random.default_rng(seed).standard_normal(dimensions).astype(np.float32)
    return vector / np.linalg.norm(vector)


def complete(
    engine: Engine, claimed: Claim, failures: dict[int, ItemFailure] | None = None, **computed: Any
) -> bool:
    """Commit the claimed chunk as a worker would; return True when that ended the job."""
    return ask(engine, complete_on, claimed, failures, **computed)


def complete_on(
    connection: Connection,
    claimed: Claim,
    failures: dict[int, ItemFailure] | None = None,
    *,
    proof_id: int | None = None,
    is_faulty: bool = False,
) -> bool:
    """Commit the claimed chunk in the caller's transaction; return True when that ended the job."""
    items = load_payload(connection, claimed.chunk_id)
    wanted = np.array(list_wanted(claimed), dtype=np.int64)
    results = results_of(claimed.spec, [items[position] for position in wanted], is_faulty=is_faulty)
    truncated = [position for position in wanted.tolist() if items[position].text.startswith(LONG)]
    outcome = ChunkOutcome(
        failures or {},
        10 * len(wanted),
        12 * len(wanted),
        truncated,
        num_reused=1,
        stage_seconds={"run": 0.5},
        item_tokens=[10] * len(wanted),
        proof_id=proof_id,
    )
    return complete_chunk(connection, claimed, items, wanted, results, outcome)


def list_wanted(claimed: Claim) -> list[int]:
    """Return the positions of the items that a claim wants to be encoded."""
    # An empty list means that no item of a split chunk is wanted, None that all are; `or` would confuse them.
    return list(range(claimed.num_items) if claimed.only_items is None else claimed.only_items)


def fail_faulty(items: Sequence[Item], positions: Iterable[int]) -> dict[int, ItemFailure]:
    """Return the failures of the items at these positions that cannot be encoded."""
    failure = ItemFailure(EMPTY_TEXT, "This text cannot be encoded, as this test wants it.")
    return {position: failure for position in positions if items[position].text.startswith(FAULTY)}


def results_of(spec: EncodingSpec, items: Sequence[Item], *, is_faulty: bool = False) -> Ragged:
    """Return a row per item as the model would: vectors, scores or records that are unique to the text.

    A faulty process returns the opposite of each vector.
    """
    if spec.result == RECORD:
        rows = [np.frombuffer(record_bytes(item.text), dtype=np.uint8) for item in items]
        return Ragged.from_rows(rows, np.uint8)
    if spec.result == REPRESENTATIONS:
        packed = [representations_of(item.text, spec).pack() for item in items]
        return Ragged.from_rows([np.frombuffer(row, np.uint8) for row in packed], np.uint8)
    if spec.result == SCORE:
        numbers = [numbers_of(item.text, spec.dimensions) for item in items]
        return Ragged.from_matrix(np.array(numbers, dtype=np.float32).reshape(len(items), spec.dimensions))
    return Ragged.from_matrix(-stack(items) if is_faulty else stack(items))


def stack(items: Sequence[Item]) -> npt.NDArray[np.float32]:
    vectors = [vector_of(item.text) for item in items]
    return np.array(vectors, dtype=np.float32).reshape(len(items), SPEC.dimensions)
