"""Thousands of histories of the work on jobs and of its repair, on a real Postgres, with a model of what must be true.

They are histories of whole transactions, one after the other, never two at a time: transactions that overlap are in
tests/integration/interleavings, and runs, which fill and swap generations, in tests/integration/order.

Workers crash, stall beyond their lease and come back, and some compute wrong vectors and blame texts that have no fault
until a proof finds it; messages are lost, repeated and late; Redis is flushed; jobs are paused, resumed, cancelled,
retried and removed; the sources of jobs by reference change; keys are deleted, scrubbed and imported. Whatever happens,
a fence that is not the newest writes nothing, no chunk of a paused job is dispatched, and counters add up. Once the
faults stop, every job ends, every item has exactly one vector of its own text or one error, neither is of a failed
period unless its chunk is suspect for one of the reasons of docs/CERTIFICATES.md, the newest write of a key wins, and
what was deleted is gone.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID, uuid4

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)
from sqlalchemy import Connection, Engine, text

from scheduler.reaper import Recomputer
from scheduler.scrubber import Scrubber
from tests.database import ask, execute, load_payload
from tests.faulty_workers import ProvenWorker, mend_pages
from tests.histories import play_histories
from tests.integration.repair.ledger import Ledger, Outcome, Submission, Write
from tests.outputs import keep_outputs
from tests.promises import check_counters
from tests.protocol import (
    SPEC,
    check_open_job_counts,
    claim,
    dispatch_all,
    list_wanted,
    make_items,
    results_of,
    vector_of,
)
from vectormill.collections.collections import find_generation
from vectormill.collections.imports import import_rows
from vectormill.collections.items import delete_items
from vectormill.collections.tombstones import delete_scrubbed
from vectormill.domain.errors import (
    CollectionNotFound,
    Conflict,
    JobNotFound,
    LeaseLost,
    ObjectChanged,
    WrongJobState,
)
from vectormill.files.roots import ANYWHERE
from vectormill.jobs.certificates import write_certificate_lines
from vectormill.jobs.chunk import ChunkOutcome, Claim, load_blob, read_known
from vectormill.jobs.chunks import release_chunk, split_chunk
from vectormill.jobs.completion import fail_chunk
from vectormill.jobs.deletion import delete_batch, discard_expired_jobs, lock_discarded_job
from vectormill.jobs.dispatch import list_queued, recall_dispatches
from vectormill.jobs.export import read_results
from vectormill.jobs.item import EMPTY_TEXT, INPUT_CHANGED, MODEL_FAULTS, Item, ItemFailure, Items
from vectormill.jobs.job import CANCELLED, PAUSED, UNWANTED_JOB_STATES, Job, NewJob
from vectormill.jobs.jobs import (
    cancel_job,
    find_job,
    list_item_errors,
    lock_job,
    pause_job,
    resume_job,
    retry_job,
)
from vectormill.jobs.operations import InputBody
from vectormill.jobs.submission import JobWriter
from vectormill.jobs.transitions import (
    add_up_jobs,
    end_cancelled_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)
from vectormill.objects.manifest import read_table
from vectormill.objects.reading import add_objects
from vectormill.settings import Settings
from worker.chunk.commit import PostgresSink

FAILURE = ItemFailure(EMPTY_TEXT, "empty")
# The failures of a chunk's items, besides those without a text: one for its own fault, or one, all that are wanted, or
# the chunk that is given up, for what the process has computed.
FAILING = st.sampled_from(["none", "its own", "one", "all", "given up"])
FAULTY = "by a faulty process"
KEYS = "abcd"
DOCS = "docs"

DISPATCHED_OF_PAUSED = text("""
    SELECT count(*) FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE jobs.state = 'paused' AND chunks.state = 'queued'
""")
LIST_SUSPECT = text("""
    SELECT first_item, num_items FROM vectormill.chunks WHERE job_id = :job_id AND is_suspect AND state <> 'split'
""")
LIST_UNCLOSED = text("""
    SELECT jobs.id FROM vectormill.jobs JOIN vectormill.job_outputs AS output ON output.id = jobs.id
     WHERE jobs.state IN ('completed', 'completed_with_errors') AND output.state IN ('ended', 'closing')
""")
END_LEASES = text("UPDATE vectormill.chunks SET lease_until = now() - interval '1 s' WHERE state = 'leased'")
END_PAUSES = text("UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'")
READ_ROWS = "SELECT key, embedding::real[] AS vector FROM vectormill.{table}"


@dataclass(frozen=True, slots=True)
class Hold:
    """A claim in the memory of a process."""

    claim: Claim
    number: int
    incarnation: UUID


class RepairMachine(RuleBasedStateMachine):
    """Random steps of clients, dispatcher, workers, reaper, mender, scrubber, pruner and indexer."""

    engine: ClassVar[Engine]
    folder: ClassVar[Path]

    messages = Bundle("messages")
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        execute(
            self.engine,
            "TRUNCATE vectormill.jobs, vectormill.proofs, vectormill.workers, vectormill.collections CASCADE",
        )
        execute(self.engine, "DROP VIEW IF EXISTS docs")
        self.settings = Settings(
            chunk_max_items=3, source_root=str(self.folder), output_root=str(self.folder)
        )
        self.ledger = Ledger()
        self.newest_fence: dict[int, int] = {}
        self.workers = [ProvenWorker(self.engine, f"w{number}") for number in range(2)]
        self.mender = Recomputer(self.engine)
        self.has_failed_period = False

    # -- clients ------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 7), is_reference=st.booleans(), has_output=st.booleans())
    def submit_job(self, count: int, is_reference: bool, has_output: bool) -> None:
        """A job of its own: every item's vector must be there in the end."""
        items = make_items(count, prefix=f"j{len(self.ledger.submissions)}-")
        output_url = f"file://{self.folder}/{uuid4()}" if has_output else None
        self.submit(items, None, self.write_source(items) if is_reference else None, output_url)

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True), is_reference=st.booleans()
    )
    def put(self, keys: list[str], is_reference: bool) -> None:
        """A job that writes to the collection, with texts that no other one has."""
        number = len(self.ledger.submissions)
        items = [Item(key, f"{key} of {number}".encode()) for key in keys]
        self.submit(items, DOCS, self.write_source(items) if is_reference else None)

    def write_source(self, items: list[Item]) -> Path:
        source = self.folder / f"{uuid4()}.jsonl"
        source.write_text(
            "".join(json.dumps({"key": item.key, "text": item.text.decode()}) + "\n" for item in items)
        )
        return source

    def submit(
        self,
        items: list[Item],
        collection: str | None = None,
        source: Path | None = None,
        output_url: str | None = None,
    ) -> None:
        new_job = NewJob(SPEC, collection=collection, to=output_url)
        with JobWriter(self.engine, new_job, self.settings) as writer:
            if source is None:
                writer.add_all(Items.of(items))
            else:
                add_objects(writer, InputBody([f"file://{source}"], key="key"), SPEC, self.settings)
            job = writer.finish()
        self.ledger.submit(Submission(job.id, job.seq, items, collection, source, output_url))

    @precondition(lambda self: self.list_sources())
    @rule(choice=st.integers(0, 100))
    def change_source(self, choice: int) -> None:
        submission = self.choose(self.list_sources(), choice)
        submission.source.unlink()
        submission.is_changed = True

    def list_sources(self) -> list[Submission]:
        return [each for each in self.ledger.submissions.values() if each.source and not each.is_changed]

    @precondition(lambda self: self.ledger.writes)
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    def delete(self, keys: list[str]) -> None:
        with suppress(CollectionNotFound):
            ask(self.engine, delete_items, DOCS, keys)
            place = execute(self.engine, "SELECT last_value FROM vectormill.jobs_seq_seq").scalar_one()
            for key in keys:
                self.ledger.write(key, Write(place, None))

    @precondition(lambda self: self.ledger.writes)
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True), number=st.integers(0, 2))
    def import_rows(self, keys: list[str], number: int) -> None:
        """Rows that are older than any other: what the collection has, or remembers as deleted, stays as it is."""
        items = Items.of([Item(key, f"{key} imported {number}".encode()) for key in keys])
        vectors = np.array([vector_of(content) for content in items.texts])
        with suppress(CollectionNotFound, Conflict):
            known = {
                *self.read_collection(),
                *execute(self.engine, "SELECT key FROM vectormill.tombstones").scalars(),
            }
            ask(self.engine, import_rows, DOCS, SPEC, items, vectors)
            for key, content in zip(items.keys, items.texts, strict=True):
                if key not in known:
                    self.ledger.write(key, Write(0, content))

    @precondition(lambda self: self.list_jobs())
    @rule(choice=st.integers(0, 100))
    def cancel(self, choice: int) -> None:
        if choice < 30:
            self.wish(cancel_job, choice)

    @precondition(lambda self: self.list_jobs())
    @rule(choice=st.integers(0, 100))
    def retry(self, choice: int) -> None:
        self.wish(retry_job, choice)

    @precondition(lambda self: self.list_jobs())
    @rule(choice=st.integers(0, 100))
    def pause(self, choice: int) -> None:
        self.wish(pause_job, choice)

    @precondition(lambda self: self.list_jobs())
    @rule(choice=st.integers(0, 100))
    def resume(self, choice: int) -> None:
        self.wish(resume_job, choice)

    def wish(self, act: Any, choice: int) -> None:
        """A client pauses, resumes, cancels or retries one of its last jobs, if the state of the job allows it."""
        with suppress(WrongJobState):
            ask(self.engine, act, self.choose(self.list_jobs()[-3:], choice).job_id)

    def list_jobs(self) -> list[Submission]:
        """Return the submissions whose jobs are there."""
        return [each for each in self.ledger.submissions.values() if each.outcomes is None]

    def choose(self, some: list[Any], choice: int) -> Any:
        return some[choice % len(some)]

    # -- workers ------------------------------------------------------------------------------------------------------

    @rule(number=st.integers(0, 1), is_faulty=st.booleans())
    def prove(self, number: int, is_faulty: bool) -> None:
        """A proof ends a worker's period; with a bad one the process ends, and with it what it held.

        `is_faulty` is the process from then on, whether it goes on or is started anew.
        """
        self.has_failed_period |= not self.workers[number].prove(is_faulty=is_faulty)

    @rule(target=messages)
    def dispatch(self):  # type: ignore[no-untyped-def]
        return multiple(*(dispatch.chunk_id for dispatch in dispatch_all(self.engine, 2)))

    @rule(target=holds, chunk_id=messages, number=st.integers(0, 1), seconds=st.sampled_from([-1.0, 30.0]))
    def deliver(self, chunk_id: int, number: int, seconds: float):  # type: ignore[no-untyped-def]
        """A message may come twice, late, or for a chunk that is done; a lease of -1 s is a worker that stalls."""
        hold = self.take(chunk_id, number, seconds)
        return multiple() if hold is None else hold

    def take(self, chunk_id: int, number: int, seconds: float = 30.0) -> Hold | None:
        claimed = claim(self.engine, chunk_id, lease_seconds=seconds)
        if claimed is None:
            return None
        assert self.find(claimed.job_id).state != PAUSED
        self.newest_fence[claimed.chunk_id] = claimed.fence
        return Hold(claimed, number, self.workers[number].incarnation)

    @rule(hold=consumes(holds), failing=FAILING, is_row_held=st.booleans())
    def finish(self, hold: Hold, failing: str, is_row_held: bool) -> None:
        """While somebody holds the row of the job, the commit is only noted."""
        with self.engine.begin() as other, suppress(JobNotFound):
            if is_row_held:
                lock_job(other, hold.claim.job_id)
            self.commit(hold, failing)

    @rule(number=st.integers(0, 1), count=st.integers(1, 4), failing=FAILING)
    def work(self, number: int, count: int, failing: str) -> None:
        """A worker does all that it is given at once."""
        for dispatch in dispatch_all(self.engine, count):
            hold = self.take(dispatch.chunk_id, number)
            if hold is not None:
                self.commit(hold, failing)

    @precondition(lambda self: self.list_jobs())
    @rule(
        number=st.integers(0, 1),
        count=st.integers(1, 4),
        failing=FAILING,
        before=st.sampled_from(["nothing", "retried", "split"]),
        is_mended=st.booleans(),
        is_retried_later=st.booleans(),
        choice=st.integers(0, 2),
    )
    def work_in_vain(
        self,
        number: int,
        count: int,
        failing: str,
        before: str,
        is_mended: bool,
        is_retried_later: bool,
        choice: int,
    ) -> None:
        """A faulty worker does something, and its next proof is a bad one; a client retries a job before or later."""
        self.prove(number, is_faulty=True)
        self.work(number, count, failing)
        if before != "nothing":
            self.wish(retry_job, choice)
        if before == "split":
            for hold in [self.take(each.chunk_id, number) for each in dispatch_all(self.engine, count)]:
                if hold is not None:
                    self.divide(hold)
        self.prove(number, is_faulty=False)
        if is_mended:
            self.mend(9, is_new_term=False)
        if is_retried_later:
            self.wish(pause_job, choice)
            self.wish(retry_job, choice)
            self.wish(resume_job, choice)

    def commit(self, hold: Hold, failing: str = "none") -> None:
        claimed, worker = hold.claim, self.workers[hold.number]
        if hold.incarnation != worker.incarnation:
            return  # its process is gone
        with self.expecting_fence(claimed):
            try:
                items = ask(self.engine, load_payload, claimed.chunk_id)
            except ObjectChanged:
                ask(self.engine, self.fail_changed, claimed)
                return
            wanted = list_wanted(claimed)
            failures = {position: FAILURE for position in wanted if not items.texts[position]}
            if failing == "given up":
                ask(self.engine, fail_chunk, claimed, items, self.blame(hold), worker.period)
                return
            failed = {"none": 0, "all": len(wanted)}.get(failing, 1)
            failure = FAILURE if failing == "its own" else self.blame(hold)
            failures |= dict.fromkeys([each for each in wanted[:failed] if items.texts[each]], failure)
            results = results_of(SPEC, [items[position] for position in wanted], is_faulty=worker.is_faulty)
            outcome = ChunkOutcome(failures, 10 * len(wanted), 12 * len(wanted), proof_id=worker.period)
            sink = PostgresSink(self.engine, threading.Event(), output_roots=ANYWHERE)
            sink.commit(claimed, items, np.array(wanted, dtype=np.int64), results, outcome)

    def blame(self, hold: Hold) -> ItemFailure:
        """Return the failure of a text alone; the detail says that a faulty process is the cause if that is so."""
        code = MODEL_FAULTS[hold.claim.chunk_id % len(MODEL_FAULTS)]
        return ItemFailure(code, FAULTY if self.workers[hold.number].is_faulty else "")

    def fail_changed(self, connection: Connection, claimed: Claim) -> None:
        blob, _ = load_blob(connection, claimed.chunk_id)
        fail_chunk(connection, claimed, read_known(blob), ItemFailure(INPUT_CHANGED, "changed"), None)

    @rule(hold=consumes(holds), is_lost=st.booleans())
    def hand_back(self, hold: Hold, is_lost: bool) -> None:
        ask(self.engine, release_chunk, hold.claim, "handed back", is_counted=is_lost, is_lost=is_lost)

    @rule(hold=consumes(holds))
    def split(self, hold: Hold) -> None:
        self.divide(hold)

    def divide(self, hold: Hold) -> None:
        if hold.claim.num_items > 1:
            with self.expecting_fence(hold.claim):
                ask(self.engine, split_chunk, hold.claim, "lost twice")

    @rule(hold=consumes(holds))
    def crash(self, hold: Hold) -> None:
        """The worker is gone with its claim."""

    @contextmanager
    def expecting_fence(self, claimed: Claim) -> Iterator[None]:
        """A stale fence must be refused; another one may be as well, when the lease was taken away."""
        try:
            yield
        except LeaseLost:
            return
        assert claimed.fence == self.newest_fence[claimed.chunk_id], "a stale fence was accepted"

    # -- scheduler and indexer ----------------------------------------------------------------------------------------

    @rule(is_flushed=st.booleans())
    def repair(self, is_flushed: bool) -> None:
        with self.engine.begin() as connection:
            rescue_expired_chunks(connection)
            rescue_unclaimed_chunks(connection, timeout_seconds=-1)
            recall_paused_chunks(connection)
            end_cancelled_jobs(connection)
            if is_flushed:
                recall_dispatches(connection, list_queued(connection))
        add_up_jobs(self.engine)

    @precondition(lambda self: self.has_failed_period)
    @rule(num_pages=st.integers(1, 9), is_new_term=st.booleans())
    def mend(self, num_pages: int, is_new_term: bool) -> None:
        """A round of the mender's reads so many pages of two chunks."""
        if is_new_term:
            self.mender = Recomputer(self.engine)
        self.has_failed_period = mend_pages(self.engine, self.mender, num_pages)

    @precondition(lambda self: self.ledger.writes)
    @rule(is_old=st.booleans())
    def scrub(self, is_old: bool) -> None:
        """Deleted texts are emptied; days later the collection forgets the deletions that nothing could undo."""
        Scrubber(self.engine).scrub(lambda: False)
        if is_old:
            execute(
                self.engine, "UPDATE vectormill.collections SET created_at = created_at - interval '2 days'"
            )
            execute(
                self.engine, "UPDATE vectormill.tombstones SET scrubbed_at = scrubbed_at - interval '2 days'"
            )
        ask(self.engine, delete_scrubbed)

    @precondition(lambda self: self.list_jobs())
    @rule(limit=st.integers(1, 2))
    def retain(self, limit: int) -> None:
        """The retention of so many ended jobs is over; none of them is owed its output."""
        unclosed = set(execute(self.engine, LIST_UNCLOSED).scalars())
        outcomes = {each.job_id: self.read_outcomes(each) for each in self.list_jobs()}
        blamed = {each.job_id: self.list_blamed(each) for each in self.list_jobs()}
        ask(self.engine, discard_expired_jobs, -1, limit)
        with self.engine.begin() as connection:
            while (job := lock_discarded_job(connection)) is not None:
                delete_batch(connection, job.id, max_chunks=100, max_errors=100)
        left = set(execute(self.engine, "SELECT id FROM vectormill.jobs").scalars())
        for job_id, found in outcomes.items():
            if job_id not in left:
                assert not blamed[job_id], "a job was removed whose items a faulty process had failed"
                self.ledger.submissions[job_id].outcomes = found
        assert unclosed <= left, "a job was removed before its output was closed"

    @precondition(lambda self: any(each.output_url for each in self.list_jobs()))
    @rule()
    def keep_outputs(self) -> None:
        keep_outputs(self.engine)

    # -- what must be true --------------------------------------------------------------------------------------------

    def find(self, job_id: UUID) -> Job:
        return ask(self.engine, find_job, job_id)

    def read_outcomes(self, submission: Submission) -> list[Outcome]:
        """Return what became of each item of a job that is there."""
        job = self.find(submission.job_id)
        errors = ask(self.engine, list_item_errors, job.id, after=None, limit=1000)
        rest = Outcome.UNKNOWN if job.state in UNWANTED_JOB_STATES else Outcome.DONE
        failed = {error.item for error in errors}
        return [Outcome.FAILED if item in failed else rest for item in range(job.num_items)]

    def list_blamed(self, submission: Submission) -> list[int]:
        """Return the items that a faulty process has failed, but those of a suspect chunk and those without a text.

        A cancelled job has none.
        """
        job, suspect = self.find(submission.job_id), self.list_suspect(submission)
        errors = ask(self.engine, list_item_errors, job.id, after=None, limit=1000)
        return [
            error.item
            for error in errors
            if error.detail == FAULTY
            and job.state not in UNWANTED_JOB_STATES
            and error.item not in suspect
            and not self.ledger.has_deleted(submission, error.item)
        ]

    def read_collection(self) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        """Return the vector of each key; none if there is no collection."""
        try:
            generation = ask(self.engine, find_generation, DOCS)
        except CollectionNotFound:
            return {}
        rows = execute(self.engine, READ_ROWS.format(table=generation.table_name))
        return {row.key: np.array(row.vector, dtype=np.float32) for row in rows}

    @invariant()
    def counters_add_up(self) -> None:
        with self.engine.connect() as connection:
            check_counters(connection)
            assert not connection.execute(DISPATCHED_OF_PAUSED).scalar_one()
        check_open_job_counts(self.engine)

    def teardown(self) -> None:
        """The faults and pauses stop: honest workers finish what is left, and every item must be accounted for."""
        for each in self.list_jobs():
            with suppress(WrongJobState):
                ask(self.engine, resume_job, each.job_id)
        for number in range(2):
            self.prove(number, is_faulty=False)
        for _ in range(100):
            execute(self.engine, END_LEASES)
            self.repair(is_flushed=True)
            execute(self.engine, END_PAUSES)
            while self.has_failed_period:
                self.mend(100, is_new_term=False)
            self.counters_add_up()
            dispatches = dispatch_all(self.engine)
            if not dispatches:
                break
            for dispatch in dispatches:
                hold = self.take(dispatch.chunk_id, 0)
                if hold is not None:
                    self.commit(hold)
        keep_outputs(self.engine)
        for each in self.list_jobs():
            self.check_job(each)
        self.check_collection()

    def check_job(self, submission: Submission) -> None:
        job = self.find(submission.job_id)
        assert job.is_terminal, f"the job never ended: {job}"
        submission.outcomes = self.read_outcomes(submission)
        if job.state != CANCELLED:
            assert job.num_done == submission.outcomes.count(Outcome.DONE)
            assert job.num_failed == submission.outcomes.count(Outcome.FAILED)
        suspect = self.list_suspect(submission)
        assert not self.list_blamed(submission), "an item has the error of a failed period"
        is_excused = job.state == CANCELLED or submission.output_url or self.ledger.has_deleted(submission)
        assert not suspect or is_excused, "a chunk is suspect without a reason"
        if submission.output_url is not None:
            self.check_output(submission.output_url, submission, job, suspect)
            return
        lines = map(json.loads, write_certificate_lines(self.engine, job.id))
        certified = [line for line in lines if line["kind"] == "chunk" and line["suspect"]]
        assert sum(line["num_items"] for line in certified) == len(suspect)
        if submission.collection is None:
            self.check_vectors(submission, job, suspect)

    def check_output(self, url: str, submission: Submission, job: Job, suspect: set[int]) -> None:
        """An output is there if an item has a result; one of a cancelled job may have any part."""
        if job.state == CANCELLED or job.num_done == 0:
            return
        rows = read_table(url).to_pylist()
        found = {row["key"]: np.array(row["embedding"], dtype=np.float32) for row in rows}
        assert len(rows) == len(found) == job.num_done
        for position, item in enumerate(submission.items):
            if item.key in found:
                self.check_vector(item.text, found[item.key], is_suspect=position in suspect)

    def check_vectors(self, submission: Submission, job: Job, suspect: set[int]) -> None:
        blocks = list(read_results(self.engine, job.id))
        if not submission.is_changed:
            assert [key for block in blocks for key in block.keys] == [item.key for item in submission.items]
        present = np.concatenate([block.present for block in blocks])
        vectors = np.concatenate([block.results for block in blocks])
        assert job.state == CANCELLED or present.sum() == job.num_done
        assert submission.outcomes is not None
        for position, item in enumerate(submission.items):
            outcome = submission.outcomes[position]
            assert outcome is Outcome.UNKNOWN or present[position] == (outcome is Outcome.DONE)
            if present[position]:
                self.check_vector(item.text, vectors[position], is_suspect=position in suspect)

    def check_collection(self) -> None:
        found = self.read_collection()
        for key in KEYS:
            allowed = self.ledger.list_allowed(key)
            if key not in found:
                assert None in allowed, f"{key} is not there, and one of {allowed} should be"
                continue
            texts = [
                content for content in allowed if content and abs(found[key] @ vector_of(content)) > 0.99
            ]
            assert texts, f"{key} has the vector of none of {allowed}"
            write = self.ledger.find(key, texts[0])
            suspect = self.list_suspect(write.submission) if write.submission else set()
            is_suspect = write.position in suspect
            self.check_vector(texts[0], found[key], is_suspect=is_suspect)

    def list_suspect(self, submission: Submission) -> set[int]:
        """Return the positions of the items in suspect chunks."""
        rows = execute(self.engine, LIST_SUSPECT, job_id=submission.job_id)
        return {row.first_item + place for row in rows for place in range(row.num_items)}

    def check_vector(self, content: bytes, vector: Any, *, is_suspect: bool) -> None:
        wanted = vector_of(content)
        is_faulty = bool(wanted @ vector < 0)
        np.testing.assert_allclose(-vector if is_faulty else vector, wanted, atol=1e-2)
        assert is_suspect or not is_faulty, f"{content!r} has the vector of a failed period"


@pytest.fixture
def machine(engine: Engine, tmp_path: Path) -> type[RepairMachine]:
    return type("Repair", (RepairMachine,), {"engine": engine, "folder": tmp_path})


@pytest.mark.timeout(300)
def test_no_order_of_whole_transactions_loses_doubles_or_spoils_an_item(
    machine: type[RepairMachine], pytestconfig: pytest.Config
) -> None:
    play_histories(machine, pytestconfig, 30, 40)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_order_does_in_many_more_histories_either(
    machine: type[RepairMachine], pytestconfig: pytest.Config
) -> None:
    play_histories(machine, pytestconfig, 200, 60)
