"""Small steps of the chunk protocol for tests: submit, dispatch, claim, commit with vectors that tell their text."""

import hashlib
from collections.abc import Iterable, Sequence
from uuid import UUID, uuid4

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from tests.kinds import numbers_of, record_bytes
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RECORD, SCORE
from vectormill.jobs.chunk import ChunkOutcome, Claim, Dispatch, load_payload
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.dispatch import list_demands, mark_queued
from vectormill.jobs.item import EMPTY_TEXT, Item, ItemFailure
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.submission import JobWriter
from vectormill.ragged import Ragged
from vectormill.settings import Settings
from vectormill.workers.workers import beat_worker, name_owner

SPEC = EncodingSpec(
    model="fake",
    revision="1",
    pooling="mean",
    normalize=True,
    dimensions=8,
    prompt="",
    max_tokens=64,
)

# Of the worker that tests register: it beats again and again, and is one.
INCARNATION = uuid4()

# What the text of an item begins with that a worker would cut.
LONG = b"long "

# And of one that no model can encode.
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
) -> Job:
    new_job = NewJob(spec, collection, priority, None, idempotency_key)
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
    """The worker's name as an owner of leases."""
    with engine.begin() as connection:
        assert beat_worker(connection, name, incarnation, SPEC.model, slots, {}, launcher)
    return name_owner(name, incarnation)


def dispatch_all(engine: Engine, limit: int = 1000) -> list[Dispatch]:
    """Marks every chunk that waits as queued, of whatever model."""
    with engine.begin() as connection:
        models = connection.execute(text("SELECT DISTINCT model FROM vectormill.jobs")).scalars().all()
        demands = list_demands(connection, models, 100)
        return mark_queued(connection, [(demand.job_id, limit) for demand in demands])


FIND_MODEL = text("""
    SELECT model FROM vectormill.jobs JOIN vectormill.chunks ON chunks.job_id = jobs.id WHERE chunks.id = :chunk_id
""")


def claim(engine: Engine, chunk_id: int, owner: str = "w", lease_seconds: float = 30) -> Claim | None:
    """As a worker that serves the chunk's own model."""
    with engine.begin() as connection:
        model = connection.execute(FIND_MODEL, {"chunk_id": chunk_id}).scalar_one_or_none() or SPEC.model
        claimed = claim_chunk(connection, chunk_id, owner, model, lease_seconds)
    return None if claimed is None else claimed.claim


def claim_next(engine: Engine, owner: str = "w", lease_seconds: float = 30) -> Claim:
    """Dispatches and claims the first chunk that waits."""
    claimed = claim(
        engine, min(dispatch.chunk_id for dispatch in dispatch_all(engine, 1)), owner, lease_seconds
    )
    assert claimed is not None
    return claimed


def vector_of(text: bytes, dimensions: int = SPEC.dimensions) -> npt.NDArray[np.float32]:
    """A unit vector float32 [dimensions] that only this text has: a mix-up of rows cannot go unseen."""
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
    vector = np.random.default_rng(seed).standard_normal(dimensions).astype(np.float32)
    return vector / np.linalg.norm(vector)


def complete(engine: Engine, claimed: Claim, failures: dict[int, ItemFailure] | None = None) -> bool:
    """Commits the claimed chunk as a worker would; True when it ended the job."""
    with engine.begin() as connection:
        return complete_on(connection, claimed, failures)


def complete_on(
    connection: Connection, claimed: Claim, failures: dict[int, ItemFailure] | None = None
) -> bool:
    """The same in a transaction of the caller's."""
    items = load_payload(connection, claimed.chunk_id)
    # Not `or`: the half of a split chunk may want none of its items, which is not all of them.
    some = claimed.only_items
    wanted = np.array(range(len(items)) if some is None else some, dtype=np.int64)
    results = results_of(claimed.spec, [items[position] for position in wanted])
    truncated = [position for position in wanted.tolist() if items[position].text.startswith(LONG)]
    outcome = ChunkOutcome(
        failures or {},
        10 * len(wanted),
        12 * len(wanted),
        truncated,
        num_reused=1,
        stage_seconds={"run": 0.5},
        item_tokens=[10] * len(wanted),
    )
    return complete_chunk(connection, claimed, items, wanted, results, outcome)


def fail_faulty(items: Sequence[Item], positions: Iterable[int]) -> dict[int, ItemFailure]:
    """The failures of those at these positions that cannot be encoded."""
    failure = ItemFailure(EMPTY_TEXT, "This text cannot be encoded, as this test wants it.")
    return {position: failure for position in positions if items[position].text.startswith(FAULTY)}


def results_of(spec: EncodingSpec, items: Sequence[Item]) -> Ragged:
    """What the model would give for the items, a row each: vectors, scores or records that tell their text."""
    if spec.result == RECORD:
        rows = [np.frombuffer(record_bytes(item.text), dtype=np.uint8) for item in items]
        return Ragged.from_rows(rows, np.uint8)
    if spec.result == SCORE:
        numbers = [numbers_of(item.text, spec.dimensions) for item in items]
        return Ragged.from_matrix(np.array(numbers, dtype=np.float32).reshape(len(items), spec.dimensions))
    return Ragged.from_matrix(stack(items))


def stack(items: Sequence[Item]) -> npt.NDArray[np.float32]:
    vectors = [vector_of(item.text) for item in items]
    return np.array(vectors, dtype=np.float32).reshape(len(items), SPEC.dimensions)
