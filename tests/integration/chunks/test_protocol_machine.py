"""Thousands of histories of the chunk protocol, on a real Postgres, with a model that knows what must be true.

They are histories of whole transactions, one after the other, never two at a time: transactions that overlap are in
tests/integration/interleavings.

Workers crash, stall beyond their lease and come back; messages are lost, repeated and late; Redis is flushed; jobs are
paused, resumed, cancelled and retried. Whatever happens, a fence that is not the newest writes nothing, no
chunk of a paused job is dispatched, counters add up, and once the faults stop every item has exactly one vector of its
own text or one error.
"""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.protocol import check_open_job_counts, claim, complete, dispatch_all, make_items, submit, vector_of
from vectormill.domain.errors import LeaseLost, WrongJobState
from vectormill.jobs.chunk import Claim
from vectormill.jobs.chunks import release_chunk, split_chunk
from vectormill.jobs.dispatch import list_queued, recall_dispatches
from vectormill.jobs.export import read_results
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.job import CANCELLED, CANCELLING, PAUSED, Job
from vectormill.jobs.jobs import cancel_job, find_job, lock_job, pause_job, resume_job, retry_job
from vectormill.jobs.transitions import (
    add_up_jobs,
    end_cancelled_jobs,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)

FAILURE = ItemFailure(EMPTY_TEXT, "empty")

COUNTERS = text("""
    SELECT jobs.num_open_chunks - noted.num_chunks
               = count(*) FILTER (WHERE chunks.state IN ('pending', 'queued', 'leased')) AS open_adds_up,
           jobs.num_failed + noted.num_failed
               = (SELECT count(*) FROM vectormill.item_errors WHERE job_id = jobs.id) AS failed_adds_up,
           (jobs.finished_at IS NOT NULL) = (jobs.num_open_chunks = 0) AS end_adds_up
      FROM vectormill.jobs JOIN vectormill.chunks ON chunks.job_id = jobs.id
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(num_chunks), 0) AS num_chunks, coalesce(sum(num_failed), 0) AS num_failed
             FROM vectormill.job_increments WHERE job_id = jobs.id) AS noted
     GROUP BY jobs.id, noted.num_chunks, noted.num_failed
""")


DISPATCHED_OF_PAUSED = text("""
    SELECT count(*) FROM vectormill.chunks JOIN vectormill.jobs ON jobs.id = chunks.job_id
     WHERE jobs.state = 'paused' AND chunks.state = 'queued'
""")


class ProtocolMachine(RuleBasedStateMachine):
    """Random steps of API, dispatcher, workers and reaper."""

    engine: ClassVar[Engine]

    messages = Bundle("messages")
    claims = Bundle("claims")

    def __init__(self) -> None:
        super().__init__()
        execute(self.engine, "TRUNCATE vectormill.jobs CASCADE")
        execute(self.engine, "DROP VIEW IF EXISTS docs")
        execute(self.engine, "TRUNCATE vectormill.collections CASCADE")
        self.jobs: dict[object, tuple[Job, int]] = {}
        self.newest_fence: dict[int, int] = {}

    @rule(count=st.integers(1, 7), in_collection=st.booleans())
    def submit_job(self, count: int, in_collection: bool) -> None:
        # Keys of different jobs differ, so that every item's vector must be there in the end.
        items = make_items(count, prefix=f"j{len(self.jobs)}-")
        job = submit(self.engine, items, collection="docs" if in_collection else None, chunk_max_items=3)
        self.jobs[job.id] = (job, len(self.jobs))

    @rule(target=messages)
    def dispatch(self):  # type: ignore[no-untyped-def]
        return multiple(*(dispatch.chunk_id for dispatch in dispatch_all(self.engine, 2)))

    @rule(target=claims, chunk_id=messages, seconds=st.sampled_from([-1.0, 30.0]))
    def deliver(self, chunk_id: int, seconds: float):  # type: ignore[no-untyped-def]
        """A message may come twice, late, or for a chunk that is done; a lease of -1 s is a worker that stalls."""
        claimed = claim(self.engine, chunk_id, lease_seconds=seconds)
        if claimed is None:
            return multiple()
        assert self.find(claimed.job_id).state != PAUSED
        self.newest_fence[claimed.chunk_id] = claimed.fence
        return claimed

    @rule(claimed=consumes(claims), has_bad_item=st.booleans(), is_row_held=st.booleans())
    def finish(self, claimed: Claim, has_bad_item: bool, is_row_held: bool) -> None:
        """While somebody holds the row of the job, the commit is only noted."""
        wanted = claimed.only_items or tuple(range(claimed.num_items))
        with self.engine.begin() as other, self.expect_fence(claimed):
            if is_row_held:
                lock_job(other, claimed.job_id)
            complete(self.engine, claimed, {wanted[0]: FAILURE} if has_bad_item else None)

    @rule(claimed=consumes(claims), is_lost=st.booleans())
    def hand_back(self, claimed: Claim, is_lost: bool) -> None:
        ask(self.engine, release_chunk, claimed, "handed back", is_counted=is_lost, is_lost=is_lost)

    @rule(claimed=consumes(claims))
    def split(self, claimed: Claim) -> None:
        if claimed.num_items > 1:
            with self.expect_fence(claimed), self.engine.begin() as connection:
                split_chunk(connection, claimed, "lost twice")

    @rule(claimed=consumes(claims))
    def crash(self, claimed: Claim) -> None:
        """The worker is gone with its claim."""

    @rule(choice=st.integers(0, 100))
    def cancel(self, choice: int) -> None:
        if choice < 10 and self.jobs:
            job_id = list(self.jobs)[choice % len(self.jobs)]
            with self.engine.begin() as connection:
                try:
                    cancel_job(connection, job_id)  # type: ignore[arg-type]
                except WrongJobState:
                    connection.rollback()

    @rule(choice=st.integers(0, 100))
    def retry(self, choice: int) -> None:
        if self.jobs:
            job_id = list(self.jobs)[choice % len(self.jobs)]
            with self.engine.begin() as connection:
                try:
                    retry_job(connection, job_id)  # type: ignore[arg-type]
                except WrongJobState:
                    connection.rollback()

    @rule(choice=st.integers(0, 100))
    def pause(self, choice: int) -> None:
        if choice < 50 and self.jobs:
            job_id = list(self.jobs)[choice % len(self.jobs)]
            with self.engine.begin() as connection:
                try:
                    pause_job(connection, job_id)  # type: ignore[arg-type]
                except WrongJobState:
                    connection.rollback()

    @rule(choice=st.integers(0, 100))
    def resume(self, choice: int) -> None:
        if self.jobs:
            self.resume_job(list(self.jobs)[choice % len(self.jobs)])

    def resume_job(self, job_id: object) -> None:
        with self.engine.begin() as connection:
            try:
                resume_job(connection, job_id)  # type: ignore[arg-type]
            except WrongJobState:
                connection.rollback()

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

    def find(self, job_id: object) -> Job:
        return ask(self.engine, find_job, job_id)  # type: ignore[arg-type]

    def expect_fence(self, claimed: Claim) -> "FenceExpectation":
        return FenceExpectation(claimed.fence < self.newest_fence[claimed.chunk_id])

    @invariant()
    def counters_add_up(self) -> None:
        with self.engine.connect() as connection:
            for row in connection.execute(COUNTERS):
                assert tuple(row) == (True, True, True)
            assert not connection.execute(DISPATCHED_OF_PAUSED).scalar_one()
        check_open_job_counts(self.engine)

    def teardown(self) -> None:
        """The faults and pauses stop: honest workers finish what is left, and every item must be accounted for."""
        for job_id in self.jobs:
            self.resume_job(job_id)
        for _ in range(100):
            with self.engine.begin() as connection:
                connection.execute(
                    text(
                        "UPDATE vectormill.chunks SET lease_until = now() - interval '1 s' WHERE state = 'leased'"
                    )
                )
                rescue_expired_chunks(connection)
                rescue_unclaimed_chunks(connection, timeout_seconds=-1)
                connection.execute(
                    text("UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'")
                )
                end_cancelled_jobs(connection)
            add_up_jobs(self.engine)
            dispatches = dispatch_all(self.engine)
            if not dispatches:
                break
            for dispatch in dispatches:
                claimed = claim(self.engine, dispatch.chunk_id)
                if claimed is not None:
                    complete(self.engine, claimed)
        for job, number in self.jobs.values():
            self.check_job(job, number)

    def check_job(self, job: Job, number: int) -> None:
        ended = self.find(job.id)
        assert ended.is_terminal
        blocks = list(read_results(self.engine, job.id))
        keys = [key for block in blocks for key in block.keys]
        items = make_items(job.num_items, prefix=f"j{number}-")
        assert keys == [item.key for item in items]
        present = np.concatenate([block.present for block in blocks])
        vectors = np.concatenate([block.results for block in blocks])
        for item, is_present, vector in zip(items, present, vectors, strict=True):
            if is_present:
                np.testing.assert_allclose(vector, vector_of(item.text), atol=1e-3)
        assert present.sum() == ended.num_done
        if ended.state not in (CANCELLED, CANCELLING):
            assert ended.num_done + ended.num_failed == job.num_items


class FenceExpectation:
    """The block must raise LeaseLost when the fence is stale; it may do so otherwise, when the lease was taken away."""

    def __init__(self, is_stale: bool) -> None:
        self._is_stale = is_stale

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            assert not self._is_stale, "a stale fence was accepted"
            return False
        return issubclass(kind, LeaseLost)


@pytest.fixture
def machine(engine: Engine) -> type[ProtocolMachine]:
    ProtocolMachine.engine = engine
    return ProtocolMachine


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_no_order_of_whole_transactions_loses_or_doubles_an_item(
    machine: type[ProtocolMachine], count: int
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
