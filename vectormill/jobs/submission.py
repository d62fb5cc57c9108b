"""Submission: turn a client's items into a job of chunks, all or nothing.

Small jobs are written in one transaction. Larger ones are written in parts while they arrive, invisible to
the dispatcher in the state `uploading`, and a last transaction makes the job `queued`. Redis is not needed,
and memory does not grow with the job.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self
from uuid import UUID, uuid4

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from vectormill.collections.collections import check_collection, fit_spec, open_collection
from vectormill.collections.generations import find_written as find_written_generation
from vectormill.collections.generations import share_collection
from vectormill.db.idempotency import bare_idempotency_key
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import (
    DuplicateKey,
    EmptyJob,
    IdempotencyMismatch,
    JobNotFound,
    StorageUnavailable,
    SubmissionInProgress,
    UploadRemoved,
)
from vectormill.jobs.chunk import (
    LARGEST_CHUNK_TOKENS,
    TokenEstimate,
    choose_chunk_tokens,
    encode_payload,
    read_keys,
)
from vectormill.jobs.deletion import discard_silent_upload, discard_upload
from vectormill.jobs.item import Item, Items
from vectormill.jobs.job import UPLOADING, Job, NewJob
from vectormill.jobs.jobs import find_job, lock_job
from vectormill.jobs.key_ledger import KeyLedger, refuse_full_disk
from vectormill.jobs.operations import InputBody
from vectormill.jobs.transitions import INSERT_CHUNK, QUEUE_JOB, WAKE_DISPATCHER
from vectormill.jobs.twins import add_twin
from vectormill.objects.input import add_input
from vectormill.objects.output import OutputPlace, add_output, leave_folder, take_place
from vectormill.objects.reference import ItemReference, RowGroups, decode_reference, is_reference
from vectormill.settings import Settings
from vectormill.tracing import current_traceparent

# The number of largest chunks in one transaction of a large upload: at most 8 × 1 MiB of text wait in memory.
_CHUNKS_PER_PART = 8
# The number of references in one transaction: some hundred bytes each.
_REFERENCES_PER_PART = 256
# While items arrive, a part is written at least this often, as the upload's heartbeat. An upload that has been
# silent for _YIELD_SECONDS loses its Idempotency-Key to a client that retries: its API process was killed,
# or its client is gone.
_PART_SECONDS = 15.0
_YIELD_SECONDS = 60.0
# The number of characters of a key that an error shows.
_SHOWN_CHARS = 200

# Called with a new job in the transaction that makes it visible.
Alongside = Callable[[Connection, Job], object]

logger = logging.getLogger(__name__)

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

# A key without an owner was stored by an API that had no API keys yet. For a day it also answers requests
# that do have one, so that the creation of the first API key does not duplicate jobs.
FIND_BY_IDEMPOTENCY_KEY = text("""
    SELECT id, state, content_hash FROM vectormill.jobs
     WHERE idempotency_key = :key OR (idempotency_key = :bare_key AND created_at > now() - interval '1 day')
     ORDER BY idempotency_key = :key DESC LIMIT 1
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

# From now on no client is expected to send anything more (see deletion.py), and a repeated request finds the job.
ACCEPT_JOB = text("UPDATE vectormill.jobs SET content_hash = :content_hash WHERE id = :id")


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


class JobWriter:
    """A writer of one job, used as a context manager.

    Leaving it without `finish` or `hand_over` removes the upload, but never a job. If the Idempotency-Key already
    exists, nothing is written: the items are only hashed, and `finish` returns the existing job or raises
    IdempotencyMismatch. If the job has an output, its folder is taken on entering, which raises OutputTaken and
    StorageUnavailable. Not thread-safe.

    `existing` is the job that an earlier request with the same key made. At `next_chunk_tokens` a chunk is closed.
    """

    def __init__(
        self,
        engine: Engine,
        new_job: NewJob,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
        hold: Callable[[Connection], object] = lambda _: None,
        admit: Callable[[Connection], object] = lambda _: None,
        keep: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare to write a job.

        `hold` is called first in every transaction that writes the job; an exception from it rolls the
        transaction back. `admit` is called in the transaction of the first checks, unless an earlier request
        has made the job; an exception from it refuses the job. `keep` is called often, between transactions; an
        exception from it ends the writing.
        """
        self.num_compared = 0
        self.keep = keep
        self._engine = engine
        self._admit = admit
        self._hold = hold
        self._clock = clock
        self._part_due = 0.0
        self._new_job = new_job
        self._collection = new_job.collection  # whose texts an upload brings before its end
        self._settings = settings
        self._max_items, self._max_bytes = settings.chunk_max_items, settings.chunk_max_bytes
        self._id: UUID = new_job.id or uuid4()
        self._is_inserted = new_job.is_accepted
        self._is_finished = False
        self._place: OutputPlace | None = None
        self.existing: UUID | None = None
        self._existing_hash: bytes | None = None
        self._chunk_keys: list[str] = []
        self._texts: list[bytes] = []
        self._metadata: list[bytes] = []
        self._places: list[int] = []
        self._item_bytes = 0
        self._item_tokens = 0
        self.num_items = 0
        self._num_tokens = 0
        self._num_chunks = 0
        self._estimate = TokenEstimate(new_job.spec)
        self.next_chunk_tokens = choose_chunk_tokens(0)
        self._part: list[dict[str, object]] = []
        self._part_share = 0.0  # filled share of the part's capacity
        self._keys = KeyLedger()
        self._hash = hashlib.blake2b(to_jsonb(new_job.content()).encode(), digest_size=16)

    def __enter__(self) -> Self:
        job = self._new_job
        with self._engine.begin() as connection:
            spec, limit = job.spec, self._settings.max_collections
            if job.generation_id is not None:
                spec = fit_spec(find_written_generation(connection, job.generation_id), spec)
            elif job.collection is not None:
                spec = check_collection(connection, job.collection, spec, limit)
            self._new_job = job = replace(job, spec=spec)
            if job.idempotency_key is not None:
                self._find_existing(connection, job.idempotency_key)
            if self.existing is None:
                self._admit(connection)
        if self.existing is None and job.to is not None:
            self._place = take_place(job.to, self._id, job.spec, self._settings)
        return self

    def _find_existing(self, connection: Connection, key: str) -> None:
        timeout = min(_YIELD_SECONDS, self._settings.upload_timeout_seconds)
        bare_key = bare_idempotency_key(key)
        for kept in {key, bare_key}:
            discard_silent_upload(connection, kept, timeout)
        values = {"key": key, "bare_key": bare_key}
        row = connection.execute(FIND_BY_IDEMPOTENCY_KEY, values).one_or_none()
        if row is None:
            return
        if row.state == UPLOADING and row.content_hash is None:
            raise SubmissionInProgress
        self.existing, self._existing_hash = row.id, bytes(row.content_hash)

    def go_on(self, written: Written) -> None:
        """Write the next chunk behind those that an earlier writer of the job has written."""
        self.num_items, self._num_chunks = written.num_items, written.num_chunks
        self._num_tokens = written.num_tokens
        self.next_chunk_tokens = choose_chunk_tokens(self._num_tokens)

    def add_content(self, content: bytes) -> None:
        """Make `content` part of what a repeated request must have in common with the first one."""
        self._hash.update(content)

    def add(self, item: Item) -> None:
        """Add one item, and write a part if enough chunks are full."""
        if item.place is not None:
            self._places.append(item.place)
        self._take(item.key, item.text, item.metadata)

    def add_all(self, items: Items) -> None:
        """Add many items without making an object for each."""
        for row in zip(items.keys, items.texts, items.metadata, strict=True):
            self._take(*row)

    def add_reference(self, reference: ItemReference, num_tokens: int) -> None:
        """Add a chunk whose items stay in their object. Their keys are compared only by `compare_keys`."""
        payload = reference.encode()
        self.num_items += reference.num_rows
        self._close_chunk()
        self._append_chunk(reference.num_rows, num_tokens, payload, None)
        self._part_share += 1 / _REFERENCES_PER_PART
        self._write_full_part()

    def compare_keys(self) -> None:
        """Read the keys of all references, so that `finish` looks for duplicates among them too.

        Raise DiskFull if the disk has not the room that it takes, ObjectChanged, StorageUnavailable and UploadRemoved.
        """
        if self.num_items == 0:
            return
        num_bytes = refuse_full_disk(self.num_items)
        logger.info("Job %s: comparing %d keys, with %d bytes of disk.", self._id, self.num_items, num_bytes)
        row_groups, after = RowGroups(), -1
        while True:
            with self._engine.begin() as connection:
                self._write_part(connection)
                values = {"job_id": self._id, "after": after, "limit": _REFERENCES_PER_PART}
                chunks = connection.execute(LIST_REFERENCES, values).all()
            if not chunks:
                return
            for chunk in chunks:
                keys = decode_reference(chunk.items).read_keys(row_groups)
                self._keys.add_all(keys)
                self.num_compared += len(keys)
                self._write_full_part()
            after = chunks[-1].seq

    def _take(self, key: str, text: bytes, metadata: bytes) -> None:
        encoded = key.encode()
        sizes = len(encoded), len(text), len(metadata)
        self._hash.update(b"%d,%d,%d;%b%b%b" % (*sizes, encoded, text, metadata))
        self.num_items += 1
        if self.existing is not None:
            return
        self._chunk_keys.append(key)
        self._texts.append(text)
        self._metadata.append(metadata)
        self._item_bytes += sum(sizes)
        self._item_tokens += self._estimate.of(text)
        if (
            self._item_tokens >= self.next_chunk_tokens
            or len(self._texts) >= self._max_items
            or self._item_bytes >= self._max_bytes
        ):
            self._close_chunk()
        self._write_full_part()

    def _write_full_part(self) -> None:
        self.keep()
        if self._part_share >= 1 or (self._is_inserted and self._clock() >= self._part_due):
            with self._engine.begin() as connection:
                self._write_part(connection)

    def _close_chunk(self) -> None:
        items = Items(self._chunk_keys, self._texts, self._metadata)
        if not items:
            return
        self._keys.add_all(items.keys)
        self._append_chunk(len(items), self._item_tokens, encode_payload(items), self._places or None)
        # of the largest size in tokens, items or bytes
        filled = max(
            self._item_tokens / LARGEST_CHUNK_TOKENS,
            len(self._texts) / self._max_items,
            self._item_bytes / self._max_bytes,
        )
        self._part_share += filled / _CHUNKS_PER_PART
        self._chunk_keys, self._texts, self._metadata, self._places = [], [], [], []
        self._item_bytes = self._item_tokens = 0

    def _append_chunk(
        self, num_items: int, num_tokens: int, payload: bytes, places: list[int] | None
    ) -> None:
        self._part.append(
            {
                "job_id": self._id,
                "seq": self._num_chunks,
                "first_item": self.num_items - num_items,
                "num_items": num_items,
                "estimated_tokens": num_tokens,
                "items": payload,
                "places": places,
            }
        )
        self._num_chunks += 1
        self._num_tokens += num_tokens
        self.next_chunk_tokens = choose_chunk_tokens(self._num_tokens)

    def _write_part(self, connection: Connection) -> None:
        self._hold(connection)
        if not self._is_inserted:
            self._insert_job(connection)
        elif connection.execute(GIVE_SIGN_OF_LIFE, {"id": self._id}).one_or_none() is None:
            raise UploadRemoved
        if self._part:
            connection.execute(INSERT_CHUNK, self._part)
        self._part, self._part_share = [], 0.0
        self._part_due = self._clock() + _PART_SECONDS

    def _insert_job(self, connection: Connection) -> None:
        job = self._new_job
        if self._collection is not None:
            share_collection(connection, self._collection)  # its generation is not deleted until COMMIT
        values = {
            "id": self._id,
            "seq": job.seq,
            "collection": self._collection,
            "model": job.spec.model,
            "spec": to_jsonb(job.spec.to_json()),
            "priority": job.priority,
            "metadata": to_jsonb(job.metadata or {}),
            "idempotency_key": job.idempotency_key,
            "lifetime_seconds": job.lifetime_seconds,
            "traceparent": current_traceparent(),
        }
        if connection.execute(INSERT_JOB, values).one_or_none() is None:
            raise SubmissionInProgress  # another request with the same key was faster
        self._is_inserted = True

    def finish(self, alongside: Alongside = lambda _, job: None) -> Job:
        """Make the job visible to the dispatcher and return it; only then may a client get a 202.

        `alongside` is called with the job in the same transaction, unless an earlier request has made the
        job; an exception from it undoes the job.

        Raise EmptyJob, DuplicateKey, SpecMismatch, IdempotencyMismatch, SubmissionInProgress or
        UploadRemoved; nothing is stored then.
        """
        if self.existing is not None:
            return self._answer_existing(self.existing)
        if self.num_items == 0:
            raise EmptyJob
        self._close_chunk()
        self._refuse_duplicates()
        self._collection = None  # this transaction may create it, for which no other may share it
        return self._commit(self._queue_job, alongside)

    def hand_over(self, wanted: InputBody, alongside: Alongside) -> Job:
        """Leave the objects to an indexer, which reads on behind the chunks that are written, and return the job.

        It is `uploading`.

        `alongside` is as for `finish`. Raise SubmissionInProgress, IdempotencyMismatch or UploadRemoved.
        """

        def accept(connection: Connection) -> None:
            connection.execute(ACCEPT_JOB, {"id": self._id, "content_hash": self._hash.digest()})
            add_input(connection, self._id, wanted, self._new_job.collection)

        self._part = []
        return self._commit(accept, alongside)

    def _commit(self, make: Callable[[Connection], object], alongside: Alongside) -> Job:
        try:
            with self._engine.begin() as connection:
                self._write_part(connection)
                make(connection)
                if self._place is not None:
                    add_output(connection, self._id, self._place)
                job = find_job(connection, self._id)
                alongside(connection, job)
        except SubmissionInProgress:
            return self._answer_winner()
        except SQLAlchemyError as error:
            job = self._find_committed(error)
        self._is_finished = True
        return job

    def _find_committed(self, error: SQLAlchemyError) -> Job:
        """Return the job if its COMMIT succeeded and only the reply was lost; raise `error` otherwise.

        A COMMIT in progress holds the row's lock, so this waits for it. The error is also raised if the
        database cannot be queried.
        """
        with suppress(SQLAlchemyError, JobNotFound), self._engine.connect() as connection:
            job = lock_job(connection, self._id)
            if job.state != UPLOADING or (job.is_left_to_indexer and not self._new_job.is_accepted):
                return job
        raise error

    def _queue_job(self, connection: Connection) -> None:
        job, generation = self._new_job, None
        # It is locked against removal and changes of its state until the transaction ends.
        if job.generation_id is not None:
            generation = find_written_generation(connection, job.generation_id)
        elif job.collection is not None:
            generation = open_collection(connection, job.collection, job.spec)
        # A collection that was created meanwhile may have a former name of the model's revision.
        spec = job.spec if generation is None else fit_spec(generation, job.spec)
        connection.execute(
            QUEUE_JOB,
            {
                "id": self._id,
                "spec": to_jsonb(spec.to_json()),
                "generation_id": generation.id if generation else None,
                "content_hash": self._hash.digest(),
                "num_items": self.num_items,
                "num_chunks": self._num_chunks,
            },
        )
        connection.execute(WAKE_DISPATCHER)
        if generation is not None and job.generation_id is None:
            add_twin(connection, self._id, self._num_chunks, generation)

    def _answer_winner(self) -> Job:
        """Return the job of another request with the same key, which was committed meanwhile."""
        key = self._new_job.idempotency_key
        assert key is not None  # only a key can collide
        with self._engine.begin() as connection:
            self._find_existing(connection, key)
        if self.existing is None:
            raise SubmissionInProgress
        return self._answer_existing(self.existing)

    def _answer_existing(self, job_id: UUID) -> Job:
        if self._hash.digest() != self._existing_hash:
            raise IdempotencyMismatch
        self._is_finished = True
        with self._engine.connect() as connection:
            return find_job(connection, job_id)

    def _refuse_duplicates(self) -> None:
        duplicate = self._keys.find_duplicate(
            lambda position: self._find_item(position)[0], self._write_full_part
        )
        if duplicate is not None:
            (key, first), (_, second) = map(self._find_item, duplicate)
            raise DuplicateKey(
                f"{first} and {second} have the same key, {key[:_SHOWN_CHARS]!r}; keys must be unique within a job."
            )

    def _find_item(self, position: int) -> tuple[str, str]:
        """Return the key of an item and its place in words."""
        with self._engine.begin() as connection:
            self._write_part(connection)  # the item may be among those that wait to be written
            values = {"job_id": self._id, "position": position}
            first_item, payload = connection.execute(FIND_PAYLOAD, values).one()
        row = position - first_item
        if is_reference(payload):
            reference = decode_reference(payload).take(row, row + 1)
            return reference.read_keys()[0], reference.name_items()[0]
        return read_keys(payload)[row], f"item {position + 1}"

    def __exit__(self, *_: object) -> None:
        self._keys.close()
        if self._place is not None and not self._is_finished:
            with suppress(StorageUnavailable):
                leave_folder(self._place.url, self._settings)
        if self._is_inserted and not self._is_finished and not self._new_job.is_accepted:
            with self._engine.begin() as connection:
                discard_upload(connection, self._id)
