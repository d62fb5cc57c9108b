"""The actors of an interleaving: clients, submitters, dispatcher, workers, reaper, pruner, as the real processes do it.

Each does what its process does, through the product's own functions, transaction by transaction. What a process would
log and survive ends the actor quietly; a deadlock and everything else is an error.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from uuid import UUID

import numpy as np
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from tests.database import load_payload
from tests.promises import Witness
from tests.protocol import SPEC, complete, dispatch_all, make_items, stack, submit
from vectormill.collections.items import delete_items
from vectormill.domain.errors import (
    CollectionNotFound,
    JobNotFound,
    LeaseLost,
    PayloadGone,
    SubmissionInProgress,
    UploadRemoved,
    WrongJobState,
)
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.chunk import LEASED, ChunkOutcome, Claim
from vectormill.jobs.chunks import claim_chunk, find_chunk, release_chunk, renew_leases, split_chunk
from vectormill.jobs.completion import cancel_chunk, fail_chunk
from vectormill.jobs.deletion import (
    delete_batch,
    discard_expired_jobs,
    discard_job,
    discard_stale_uploads,
    lock_discarded_job,
)
from vectormill.jobs.dispatch import list_queued, recall_dispatches
from vectormill.jobs.item import EMPTY_TEXT, Item, ItemFailure
from vectormill.jobs.job import CANCELLING
from vectormill.jobs.jobs import delete_job, retry_job
from vectormill.jobs.transitions import (
    add_up_jobs,
    end_cancelled_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)
from vectormill.ragged import Ragged
from worker.chunk.commit import PostgresSink

FAILURE = ItemFailure(EMPTY_TEXT, "empty")
LIST_JOBS = text("SELECT id FROM vectormill.jobs WHERE state NOT IN ('uploading', 'deleting') ORDER BY seq")
DEADLOCK = "40P01"


@dataclass(frozen=True, slots=True)
class Submission:
    """What a client sends, again and again under one Idempotency-Key, until it has an answer."""

    key: str
    items: Sequence[Item]
    collection: str | None
    chunk_max_items: int


@dataclass(slots=True)
class World:
    """What the actors of one interleaving share: Redis (`messages`), the workers' memory (`claims`), the clients'."""

    engine: Engine
    witness: Witness
    random: Random
    messages: list[int] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    submissions: list[Submission] = field(default_factory=list)
    newest_fences: dict[int, int] = field(default_factory=dict)
    num_ended: dict[UUID, int] = field(default_factory=dict)

    # -- clients ------------------------------------------------------------------------------------------------------

    def new_submission(self) -> Submission:
        number = len(self.submissions)
        # In a collection jobs share some keys, with texts of their own.
        collection = self.random.choice([None, "docs", "docs"])
        count = self.random.choice([1, 3, 3, 4, 4, 5, 9])
        items = make_items(count, prefix=f"s{number}-")
        if collection:
            items = [
                Item(f"k{position}", item.text) if position < 2 else item
                for position, item in enumerate(items)
            ]
        # Nine chunks are more than one part.
        submission = Submission(f"key {number}", items, collection, 1 if count == 9 else 2)
        self.submissions.append(submission)
        return submission

    def send(self, submission: Submission) -> bool:
        """One request of a client; whether it was answered 202."""
        try:
            with outage():
                job = submit(
                    self.engine,
                    submission.items,
                    collection=submission.collection,
                    chunk_max_items=submission.chunk_max_items,
                    idempotency_key=submission.key,
                )
                self.witness.acknowledged[job.id] = submission.items
                return True
        except (SubmissionInProgress, UploadRemoved, JobNotFound):
            pass
        return False

    def submit(self, submission: Submission) -> None:
        """A client that is refused or hears nothing asks again a few times."""
        any(self.send(submission) for _ in range(3))

    def wish(self, act: Callable[[Connection, UUID], object], job_id: UUID) -> None:
        try:
            with outage(), self.engine.begin() as connection:
                act(connection, job_id)
        except (WrongJobState, JobNotFound):
            pass

    def retry(self, job_id: UUID) -> None:
        self.witness.retried[job_id] = self.witness.retried.get(job_id, 0) + 1
        self.wish(retry_job, job_id)

    def delete(self, job_id: UUID) -> None:
        self.witness.deletable.add(job_id)
        self.wish(self.random.choice([delete_job, discard_job]), job_id)

    def forget(self) -> None:
        """A client deletes keys that jobs share."""
        try:
            with outage(), self.engine.begin() as connection:
                delete_items(connection, "docs", self.random.choice([["k0"], ["k0", "k1"]]))
        except CollectionNotFound:
            pass

    # -- scheduler ----------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        with outage():
            self.messages += [
                dispatch.chunk_id for dispatch in dispatch_all(self.engine, self.random.choice([1, 5]))
            ]

    def reap(self) -> None:
        """A round of the reaper's, without its patience."""
        timeout = self.random.choice([-1, 60])
        for repair in (
            rescue_expired_chunks,
            partial(rescue_unclaimed_chunks, timeout_seconds=timeout),
            recall_paused_chunks,
            end_cancelled_jobs,
        ):
            with outage(), self.engine.begin() as connection:
                repair(connection)
        with outage():
            add_up_jobs(self.engine)

    def recall(self) -> None:
        """Redis has lost what it held."""
        with outage():
            with self.engine.begin() as connection:
                lost = list_queued(connection)
            with self.engine.begin() as connection:
                recall_dispatches(connection, lost)

    def prune(self) -> None:
        self.witness.is_pruning = True
        with outage(), self.engine.begin() as connection:
            discard_stale_uploads(connection, -1)
        with outage(), self.engine.begin() as connection:
            discard_expired_jobs(connection, -1, limit=1)
        with outage(), self.engine.begin() as connection:
            job = lock_discarded_job(connection)
            if job is not None:
                delete_batch(connection, job.id, max_chunks=2, max_errors=1)

    # -- workers ------------------------------------------------------------------------------------------------------

    def claim(self) -> Claim | None:
        """A message comes, perhaps for the second time."""
        if not self.messages:
            return None
        chunk_id = self.random.choice(self.messages)
        seconds = self.random.choice([-1.0, 30.0])  # -1: the worker stalls beyond its lease
        with self.engine.begin() as connection:
            claimed = claim_chunk(connection, chunk_id, threading.current_thread().name, SPEC.model, seconds)
        if claimed is None:
            return None
        self.newest_fences[chunk_id] = max(claimed.claim.fence, self.newest_fences.get(chunk_id, 0))
        return claimed.claim

    def take(self) -> None:
        with outage():
            claimed = self.claim()
            if claimed is not None:
                self.work(claimed)

    def hold_one(self) -> None:
        """A worker that is at work when the interleaving begins."""
        claimed = self.claim()
        self.claims += [claimed] if claimed else []

    def go_on(self) -> None:
        """A worker that held a claim when all this began."""
        if self.claims:
            with outage():
                self.work(self.random.choice(self.claims))

    def work(self, claimed: Claim) -> None:
        self.claims.append(claimed)
        end = self.random.choice(
            [self.commit, self.commit, self.commit, self.count, self.fail, self.split, self.release]
        )
        is_renewed = self.random.random() < 0.5
        try:
            with self.engine.connect() as connection:
                items = load_payload(connection, claimed.chunk_id)
            if is_renewed:
                with self.engine.begin() as connection:
                    states = renew_leases(connection, [claimed], 30)
                if not states:
                    self.expect_lost(claimed)
                    return
                end = self.cancel_chunk if states[claimed.chunk_id] == CANCELLING else end
            is_stale = claimed.fence < self.newest_fences[claimed.chunk_id]
            has_written = end(claimed, items)
            assert not (is_stale and has_written), "a worker wrote under a lease that another one had"
        except (LeaseLost, PayloadGone):
            self.expect_lost(claimed)

    def expect_lost(self, claimed: Claim) -> None:
        with self.engine.connect() as connection:
            position = find_chunk(connection, claimed.chunk_id)
        is_ours = position is not None and position.fence == claimed.fence and position.state == LEASED
        assert not is_ours, "a worker was told that it had lost a lease that is still its own"

    def commit(self, claimed: Claim, items: Sequence[Item]) -> bool:
        """As the worker's sink does it, with its repeats."""
        wanted, outcome = self.encode(claimed)
        results = Ragged.from_matrix(stack([items[position] for position in wanted.tolist()]))
        PostgresSink(self.engine, threading.Event(), output_roots=ANYWHERE).commit(
            claimed, items, wanted, results, outcome
        )
        return True

    def encode(self, claimed: Claim) -> tuple["np.ndarray[tuple[int], np.dtype[np.int64]]", ChunkOutcome]:
        some = claimed.wanted_items(0, claimed.num_items)
        wanted = np.array(range(claimed.num_items) if some is None else some, dtype=np.int64)
        is_bad = self.random.random() < 0.3 and len(wanted) > 0
        failures = {int(wanted[0]): FAILURE} if is_bad else {}
        return wanted, ChunkOutcome(failures, 10 * len(wanted), 12 * len(wanted))

    def count(self, claimed: Claim, items: Sequence[Item]) -> bool:
        """The same without a sink: only so is it told whether it has ended the job."""
        if complete(self.engine, claimed):
            self.num_ended[claimed.job_id] = self.num_ended.get(claimed.job_id, 0) + 1
        return True

    def fail(self, claimed: Claim, items: Sequence[Item]) -> bool:
        with self.engine.begin() as connection:
            fail_chunk(connection, claimed, items, FAILURE, None)
        return True

    def split(self, claimed: Claim, items: Sequence[Item]) -> bool:
        if claimed.num_items == 1:
            return False
        with self.engine.begin() as connection:
            split_chunk(connection, claimed, "lost twice")
        return True

    def release(self, claimed: Claim, items: Sequence[Item]) -> bool:
        with self.engine.begin() as connection:
            return release_chunk(connection, claimed, "handed back", is_counted=self.random.random() < 0.5)

    def cancel_chunk(self, claimed: Claim, items: Sequence[Item]) -> bool:
        with self.engine.begin() as connection:
            cancel_chunk(connection, claimed)
        return True


@contextmanager
def outage() -> Iterator[None]:
    """What breaks the connection is survived, as every process does; a deadlock is a fault of ours."""
    try:
        yield
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise


def list_jobs(engine: Engine) -> list[UUID]:
    with engine.connect() as connection:
        return list(connection.execute(LIST_JOBS).scalars())


def repair(engine: Engine) -> None:
    """Lets every lease expire, and does what the scheduler does about it."""
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.chunks SET lease_until = now() - interval '1 s' WHERE state = 'leased'")
        )
        rescue_expired_chunks(connection)
        rescue_unclaimed_chunks(connection, timeout_seconds=-1)
        recall_paused_chunks(connection)
        connection.execute(text("UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'"))
        end_cancelled_jobs(connection)
    add_up_jobs(engine)
