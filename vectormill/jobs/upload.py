"""Upload: the parts of a job that are written while its items arrive, invisible to the dispatcher.

Each part is a transaction, and shows that the writer is alive. Knows nothing of how items are cut, nor of the end.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine, text

from vectormill.collections.collections import share_collection
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import SubmissionInProgress, UploadRemoved
from vectormill.jobs.chunk import read_keys
from vectormill.jobs.chunk_cutter import CutChunk
from vectormill.jobs.job import NewJob
from vectormill.jobs.transitions import INSERT_CHUNK
from vectormill.objects.reference import ItemReference, decode_reference, is_reference
from vectormill.tracing import current_traceparent

# The number of largest chunks in one transaction of a large upload: at most 8 × 1 MiB of text wait in memory.
CHUNKS_PER_PART = 8
# The number of references in one transaction: some hundred bytes each.
REFERENCES_PER_PART = 256
# While items arrive, a part is written at least this often, as the upload's heartbeat.
PART_SECONDS = 15.0

# The seq is drawn here, unless it was drawn before. The generation tells the scrubber whose texts arrive; that which is
# written is chosen at the end.
INSERT_JOB = text("""
    INSERT INTO vectormill.jobs
        (id, seq, generation_id, state, model, spec, priority, metadata, idempotency_key, traceparent, forget_at)
    OVERRIDING SYSTEM VALUE
    VALUES (:id, coalesce(CAST(:seq AS bigint), nextval(pg_get_serial_sequence('vectormill.jobs', 'seq'))),
            (SELECT generations.id FROM vectormill.generations
               JOIN vectormill.collections ON collections.id = generations.collection_id
              WHERE collections.name = :collection AND generations.state = 'live'),
            'uploading', :model, CAST(:spec AS jsonb), :priority, CAST(:metadata AS jsonb), :idempotency_key,
            :traceparent,
            CASE WHEN CAST(:lifetime_seconds AS double precision) = 'infinity' THEN CAST('infinity' AS timestamptz)
                 ELSE now() + make_interval(secs => nullif(CAST(:lifetime_seconds AS double precision), 'infinity'))
            END)
    ON CONFLICT (idempotency_key) DO NOTHING
    RETURNING seq
""")

# The update locks the job until the part is committed, so that nobody removes the job meanwhile.
GIVE_SIGN_OF_LIFE = text("""
    UPDATE vectormill.jobs SET updated_at = now() WHERE id = :id AND state = 'uploading' RETURNING id
""")

LIST_REFERENCES = text("""
    SELECT chunks.seq, payload.items
      FROM vectormill.chunks JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chunks.id
     WHERE chunks.job_id = :job_id AND chunks.seq > :after
     ORDER BY chunks.seq LIMIT :limit
""")

FIND_PAYLOAD = text("""
    SELECT chunks.first_item, payload.items
      FROM vectormill.chunks JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = chunks.id
     WHERE chunks.job_id = :job_id AND chunks.first_item <= :position
     ORDER BY chunks.first_item DESC LIMIT 1
""")

FIND_WRITTEN = text("""
    SELECT last.seq + 1 AS num_chunks, last.first_item + last.num_items AS num_items, payload.items,
           (SELECT sum(estimated_tokens) FROM vectormill.chunks WHERE job_id = :job_id)::bigint AS num_tokens
      FROM vectormill.chunks AS last JOIN vectormill.chunk_payloads AS payload ON payload.chunk_id = last.id
     WHERE last.job_id = :job_id
     ORDER BY last.seq DESC LIMIT 1
""")


@dataclass(frozen=True, slots=True)
class Written:
    """How far an earlier indexer has written a job by reference; `last` is the last chunk that it wrote."""

    num_chunks: int
    num_items: int
    num_tokens: int
    last: ItemReference


def find_written(connection: Connection, job_id: UUID) -> Written | None:
    """Return what an earlier writer has written of a job by reference; None if it has no chunk."""
    row = connection.execute(FIND_WRITTEN, {"job_id": job_id}).one_or_none()
    if row is None:
        return None
    return Written(row.num_chunks, row.num_items, row.num_tokens, decode_reference(row.items))


class Upload:
    """The written parts of one job.

    `hold` is called first in every transaction; an exception from it rolls the transaction back. `check` is called
    often, between transactions; an exception from it ends the writing. `collection` is the one whose texts the parts
    bring. Methods raise UploadRemoved if the upload was removed meanwhile.
    """

    def __init__(
        self,
        engine: Engine,
        new_job: NewJob,
        clock: Callable[[], float],
        hold: Callable[[Connection], object],
        check: Callable[[], object],
    ) -> None:
        self.id: UUID = new_job.id or uuid4()
        self.job = new_job
        self.collection = new_job.collection
        self.is_inserted = new_job.is_accepted
        self.check = check
        self._engine = engine
        self._clock = clock
        self._hold = hold
        self._part_due = 0.0
        self._part: list[CutChunk] = []
        self._part_share = 0.0  # filled share of the part's capacity

    def add(self, chunk: CutChunk, filled: float) -> None:
        """Let a chunk wait for the next part; `filled` is its share of the largest chunk."""
        self._part.append(chunk)
        self._part_share += filled / CHUNKS_PER_PART

    def add_reference(self, chunk: CutChunk) -> None:
        """Let a chunk whose items stay in their object wait for the next part."""
        self._part.append(chunk)
        self._part_share += 1 / REFERENCES_PER_PART

    def write_if_due(self) -> None:
        """Write a part if enough chunks wait, or if the last one was written too long ago."""
        self.check()
        if self._part_share >= 1 or (self.is_inserted and self._clock() >= self._part_due):
            with self._engine.begin() as connection:
                self.write(connection)

    def write(self, connection: Connection) -> None:
        """Write a part; the first one inserts the job.

        Raise SubmissionInProgress if another request with the same Idempotency-Key was faster.
        """
        self._hold(connection)
        if not self.is_inserted:
            if self.collection is not None:
                share_collection(connection, self.collection)  # its generation is not deleted until COMMIT
            values = {
                "id": self.id,
                "seq": self.job.seq,
                "collection": self.collection,
                "model": self.job.spec.model,
                "spec": to_jsonb(self.job.spec.to_json()),
                "priority": self.job.priority,
                "metadata": to_jsonb(self.job.metadata or {}),
                "idempotency_key": self.job.idempotency_key,
                "lifetime_seconds": self.job.lifetime_seconds,
                "traceparent": current_traceparent(),
            }
            if connection.execute(INSERT_JOB, values).one_or_none() is None:
                raise SubmissionInProgress
            self.is_inserted = True
        elif connection.execute(GIVE_SIGN_OF_LIFE, {"id": self.id}).one_or_none() is None:
            raise UploadRemoved
        if self._part:
            connection.execute(INSERT_CHUNK, [{"job_id": self.id, **asdict(chunk)} for chunk in self._part])
        self.drop_part()
        self._part_due = self._clock() + PART_SECONDS

    def drop_part(self) -> None:
        """Forget the chunks that wait to be written."""
        self._part, self._part_share = [], 0.0

    def list_references(self) -> Iterator[ItemReference]:
        """Yield the references of all chunks, in order. Parts are written meanwhile."""
        after = -1
        while True:
            with self._engine.begin() as connection:
                self.write(connection)
                values = {"job_id": self.id, "after": after, "limit": REFERENCES_PER_PART}
                chunks = connection.execute(LIST_REFERENCES, values).all()
            if not chunks:
                return
            for chunk in chunks:
                yield decode_reference(chunk.items)
                self.write_if_due()
            after = chunks[-1].seq

    def find_item(self, position: int) -> tuple[str, str]:
        """Return the key of an item and its place in words."""
        with self._engine.begin() as connection:
            self.write(connection)  # the item may be among those that wait to be written
            values = {"job_id": self.id, "position": position}
            first_item, payload = connection.execute(FIND_PAYLOAD, values).one()
        row = position - first_item
        if is_reference(payload):
            reference = decode_reference(payload).take(row, row + 1)
            return reference.read_keys()[0], reference.name_items()[0]
        return read_keys(payload)[row], f"item {position + 1}"
