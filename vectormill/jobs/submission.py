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
from dataclasses import replace
from typing import Self, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import SQLAlchemyError

from vectormill.collections.collections import check_collection, fit_spec, open_collection
from vectormill.collections.collections import find_written as find_written_generation
from vectormill.db.idempotency import bare_idempotency_key
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import (
    DuplicateKey,
    EmptyJob,
    IdempotencyMismatch,
    JobNotFound,
    StorageUnavailable,
    SubmissionInProgress,
)
from vectormill.jobs.chunk_cutter import ChunkCutter
from vectormill.jobs.deletion import DISCARD_SILENT_UPLOAD, discard_upload
from vectormill.jobs.dual_writes import add_twin
from vectormill.jobs.duplicate_keys import DuplicateFinder, refuse_full_disk
from vectormill.jobs.item import Item, Items
from vectormill.jobs.job import UPLOADING, Job, NewJob
from vectormill.jobs.jobs import find_job, lock_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.transitions import QUEUE_JOB, WAKE_DISPATCHER
from vectormill.jobs.upload import Upload, Written
from vectormill.objects.input import add_input
from vectormill.objects.output import OutputPlace, add_output, leave_folder, take_place
from vectormill.objects.reference import ItemReference, RowGroups
from vectormill.settings import Settings

# An upload that has been silent for so long loses its Idempotency-Key to a client that retries: its API process was
# killed, or its client is gone.
_YIELD_SECONDS = 60.0
# The number of characters of a key that an error shows.
_SHOWN_CHARS = 200

T = TypeVar("T")

logger = logging.getLogger(__name__)

# A key without an owner was stored by an API that had no API keys yet. For a day it also answers requests
# that do have one, so that the creation of the first API key does not duplicate jobs.
FIND_BY_IDEMPOTENCY_KEY = text("""
    SELECT id, state, content_hash FROM vectormill.jobs
     WHERE idempotency_key = :key OR (idempotency_key = :bare_key AND created_at > now() - interval '1 day')
     ORDER BY idempotency_key = :key DESC LIMIT 1
""")

# From now on no client is expected to send anything more (see deletion.py), and a repeated request finds the job.
ACCEPT_JOB = text("UPDATE vectormill.jobs SET content_hash = :content_hash WHERE id = :id")


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
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare to write a job. `clock`, `hold` and `check` are those of an Upload.

        `admit` is called in the transaction of the first checks, unless an earlier request has made the job; an
        exception from it refuses the job.
        """
        self.num_compared = 0
        self.check = check
        self.existing: UUID | None = None
        self._existing_hash: bytes | None = None
        self._engine = engine
        self._settings = settings
        self._admit = admit
        self._cutter = ChunkCutter(new_job.spec, settings)
        self._upload = Upload(engine, new_job, clock, hold, check)
        self._is_finished = False
        self._place: OutputPlace | None = None
        self._keys = DuplicateFinder()
        self._hash = hashlib.blake2b(to_jsonb(new_job.content()).encode(), digest_size=16)

    @property
    def num_items(self) -> int:
        return self._cutter.num_items

    @property
    def next_chunk_tokens(self) -> int:
        return self._cutter.next_chunk_tokens

    def __enter__(self) -> Self:
        job = self._upload.job
        with self._engine.begin() as connection:
            spec, limit = job.spec, self._settings.max_collections
            if job.generation_id is not None:
                spec = fit_spec(find_written_generation(connection, job.generation_id), spec)
            elif job.collection is not None:
                spec = check_collection(connection, job.collection, spec, limit)
            self._upload.job = job = replace(job, spec=spec)
            if job.idempotency_key is not None:
                self._find_existing(connection, job.idempotency_key)
            if self.existing is None:
                self._admit(connection)
        if self.existing is None and job.to is not None:
            self._place = take_place(job.to, self._upload.id, job.spec, self._settings)
        return self

    def _find_existing(self, connection: Connection, key: str) -> None:
        timeout = min(_YIELD_SECONDS, self._settings.upload_timeout_seconds)
        bare_key = bare_idempotency_key(key)
        for kept in {key, bare_key}:
            connection.execute(DISCARD_SILENT_UPLOAD, {"key": kept, "timeout": timeout})
        values = {"key": key, "bare_key": bare_key}
        row = connection.execute(FIND_BY_IDEMPOTENCY_KEY, values).one_or_none()
        if row is None:
            return
        if row.state == UPLOADING and row.content_hash is None:
            raise SubmissionInProgress
        self.existing, self._existing_hash = row.id, bytes(row.content_hash)

    def go_on(self, written: Written) -> None:
        """Write the next chunk behind those that an earlier writer of the job has written."""
        self._cutter.go_on(written.num_items, written.num_chunks, written.num_tokens)

    def add_content(self, content: bytes) -> None:
        """Make `content` part of what a repeated request must have in common with the first one."""
        self._hash.update(content)

    def add(self, item: Item) -> None:
        """Add one item, and write a part if enough chunks are full."""
        self._take(item.key, item.text, item.metadata, item.place)

    def add_all(self, items: Items) -> None:
        """Add many items without making an object for each."""
        for row in zip(items.keys, items.texts, items.metadata, strict=True):
            self._take(*row)

    def _take(self, key: str, text: bytes, metadata: bytes, place: int | None = None) -> None:
        encoded = key.encode()
        sizes = len(encoded), len(text), len(metadata)
        self._hash.update(b"%d,%d,%d;%b%b%b" % (*sizes, encoded, text, metadata))
        if self.existing is not None:
            return
        if self._cutter.add(key, text, metadata, place, sum(sizes)):
            self._close_chunk()
        self._upload.write_if_due()

    def _close_chunk(self) -> None:
        if self._cutter.keys:
            self._keys.add_all(self._cutter.keys)
            filled = self._cutter.filled
            self._upload.add(self._cutter.cut(), filled)

    def add_reference(self, reference: ItemReference, num_tokens: int) -> None:
        """Add a chunk whose items stay in their object. Their keys are compared only by `compare_keys`."""
        chunk = self._cutter.cut_reference(reference.num_rows, num_tokens, reference.encode())
        self._upload.add_reference(chunk)
        self._upload.write_if_due()

    def compare_keys(self) -> None:
        """Read the keys of all references, so that `finish` looks for duplicates among them too.

        Raise DiskFull if the disk has not the room that it takes, ObjectChanged, StorageUnavailable and UploadRemoved.
        """
        if self.num_items == 0:
            return
        num_bytes = refuse_full_disk(self.num_items)
        logger.info(
            "Job %s: comparing %d keys, with %d bytes of disk.", self._upload.id, self.num_items, num_bytes
        )
        row_groups = RowGroups()
        for reference in self._upload.list_references():
            keys = reference.read_keys(row_groups)
            self._keys.add_all(keys)
            self.num_compared += len(keys)

    def finish(self, alongside: Callable[[Connection, Job], object] = lambda _, job: None) -> Job:
        """Do as `finish_with`, and return the job alone."""
        return self.finish_with(alongside)[0]

    def finish_with(self, alongside: Callable[[Connection, Job], T]) -> tuple[Job, T | None]:
        """Make the job visible to the dispatcher and return it; only then may a client get a 202.

        `alongside` is called with the job in the same transaction; an exception from it undoes the job. What it
        returns comes with the job. It is None if an earlier request has made the job, for which it is not called, or
        if the reply to the COMMIT was lost.

        Raise EmptyJob, DuplicateKey, SpecMismatch, IdempotencyMismatch, SubmissionInProgress or
        UploadRemoved; nothing is stored then.
        """
        if self.existing is not None:
            return self._answer_existing(self.existing), None
        if self.num_items == 0:
            raise EmptyJob
        self._close_chunk()
        duplicate = self._keys.find_duplicate(
            lambda position: self._upload.find_item(position)[0], self._upload.write_if_due
        )
        if duplicate is not None:
            (key, first), (_, second) = map(self._upload.find_item, duplicate)
            raise DuplicateKey(
                f"{first} and {second} have the same key, {key[:_SHOWN_CHARS]!r}; keys must be unique within a job."
            )
        self._upload.collection = None  # this transaction may create it, for which no other may share it
        return self._commit(self._queue_job, alongside)

    def hand_over(self, wanted: InputBody, alongside: Callable[[Connection, Job], T]) -> tuple[Job, T | None]:
        """Leave the objects to an indexer, which reads on behind the chunks that are written, and return the job.

        It is `uploading`. `alongside` is as for `finish_with`. Raise SubmissionInProgress, IdempotencyMismatch or
        UploadRemoved.
        """

        def accept(connection: Connection) -> None:
            connection.execute(ACCEPT_JOB, {"id": self._upload.id, "content_hash": self._hash.digest()})
            add_input(connection, self._upload.id, wanted, self._upload.job.collection)

        self._upload.drop_part()
        return self._commit(accept, alongside)

    def _commit(
        self, make: Callable[[Connection], object], alongside: Callable[[Connection, Job], T]
    ) -> tuple[Job, T | None]:
        made: T | None = None
        try:
            with self._engine.begin() as connection:
                self._upload.write(connection)
                make(connection)
                if self._place is not None:
                    add_output(connection, self._upload.id, self._place)
                job = find_job(connection, self._upload.id)
                made = alongside(connection, job)
        except SubmissionInProgress:
            return self._answer_winner(), None
        except SQLAlchemyError as error:
            job, made = self._find_committed(error), None
        self._is_finished = True
        return job, made

    def _find_committed(self, error: SQLAlchemyError) -> Job:
        """Return the job if its COMMIT succeeded and only the reply was lost; raise `error` otherwise.

        A COMMIT in progress holds the row's lock, so this waits for it. The error is also raised if the
        database cannot be queried.
        """
        with suppress(SQLAlchemyError, JobNotFound), self._engine.connect() as connection:
            job = lock_job(connection, self._upload.id)
            if job.state != UPLOADING or (job.is_left_to_indexer and not self._upload.job.is_accepted):
                return job
        raise error

    def _queue_job(self, connection: Connection) -> None:
        job, generation = self._upload.job, None
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
                "id": self._upload.id,
                "spec": to_jsonb(spec.to_json()),
                "generation_id": generation.id if generation else None,
                "content_hash": self._hash.digest(),
                "num_items": self.num_items,
                "num_chunks": self._cutter.num_chunks,
            },
        )
        connection.execute(WAKE_DISPATCHER)
        if generation is not None and job.generation_id is None:
            add_twin(connection, self._upload.id, self._cutter.num_chunks, generation)

    def _answer_winner(self) -> Job:
        """Return the job of another request with the same key, which was committed meanwhile."""
        key = self._upload.job.idempotency_key
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

    def __exit__(self, *_: object) -> None:
        self._keys.close()
        if self._place is not None and not self._is_finished:
            with suppress(StorageUnavailable):
                leave_folder(self._place.url, self._settings)
        if self._upload.is_inserted and not self._is_finished and not self._upload.job.is_accepted:
            with self._engine.begin() as connection:
                discard_upload(connection, self._upload.id)
