"""Chunks before jobs: whoever holds a job's row waits for no chunk's, so no two transactions wait for each other."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from tests.database import ask, execute, load_payload
from tests.protocol import SPEC, claim, claim_next, complete, dispatch_all, make_items, submit
from vectormill.jobs.chunk import Claim, Dispatch
from vectormill.jobs.chunks import (
    claim_chunk,
    release_chunk,
    renew_leases,
    split_chunk,
)
from vectormill.jobs.completion import fail_chunk
from vectormill.jobs.deletion import delete_batch, delete_forgotten_queries, discard_job
from vectormill.jobs.dispatch import mark_queued, recall_dispatches
from vectormill.jobs.item import EMPTY_TEXT, ItemFailure
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import cancel_job, delete_job, find_job, pause_job, retry_job
from vectormill.jobs.transitions import (
    COMMIT_CHUNK,
    add_up_job,
    end_cancelled_jobs,
    end_under_fence,
    recall_paused_chunks,
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)


class Scene:
    """A job with a chunk in every state that the steps below begin with."""

    def __init__(self, engine: Engine) -> None:
        self.job: Job = submit(engine, make_items(24), chunk_max_items=4)
        self.dispatches: list[Dispatch] = sorted(dispatch_all(engine, 5), key=lambda each: each.chunk_id)
        done, held, lapsed, queued, other = (each.chunk_id for each in self.dispatches)
        first = claim(engine, done)
        assert first is not None
        complete(engine, first, {1: ItemFailure(EMPTY_TEXT, "")})
        self.queued, self.lapsed = queued, lapsed
        self.held = self._claim(engine, held, 60)
        self._claim(engine, lapsed, -1)
        self.other = self._claim(engine, other, 60)

    def _claim(self, engine: Engine, chunk_id: int, lease_seconds: float) -> Claim:
        claimed = claim(engine, chunk_id, lease_seconds=lease_seconds)
        assert claimed is not None
        return claimed


Step = Callable[[Connection, Scene], object]


def fail(connection: Connection, scene: Scene) -> None:
    items = load_payload(connection, scene.held.chunk_id)
    fail_chunk(connection, scene.held, items, ItemFailure(EMPTY_TEXT, ""), None)


STEPS: dict[str, Step] = {
    "claim": lambda connection, scene: claim_chunk(connection, scene.queued, "w", SPEC.model, 30),
    "steal": lambda connection, scene: claim_chunk(connection, scene.lapsed, "w", SPEC.model, 30),
    "renew": lambda connection, scene: renew_leases(connection, [scene.other, scene.held], 30),
    "release": lambda connection, scene: release_chunk(connection, scene.held, "failed", is_counted=True),
    "split": lambda connection, scene: split_chunk(connection, scene.held, "lost twice"),
    "fail": fail,
    "dispatch": lambda connection, scene: mark_queued(connection, [(scene.job.id, 9)]),
    "recall": lambda connection, scene: recall_dispatches(connection, scene.dispatches[::-1]),
    "reap expired": lambda connection, scene: rescue_expired_chunks(connection),
    "reap unclaimed": lambda connection, scene: rescue_unclaimed_chunks(connection, -1),
    "reap paused": lambda connection, scene: recall_paused_chunks(connection),
    "end cancelled": lambda connection, scene: end_cancelled_jobs(connection),
}
JOB_CHANGES: dict[str, Step] = {
    "pause": lambda connection, scene: pause_job(connection, scene.job.id),
    "cancel": lambda connection, scene: cancel_job(connection, scene.job.id),
    "retry": lambda connection, scene: retry_job(connection, scene.job.id),
}
# Only these may find a paused job: `retry` wants one.
PAUSES = text("UPDATE vectormill.jobs SET state = 'paused', paused_at = now()")
IS_BLOCKED = text("""
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0
""")


def wait_until_blocked(engine: Engine, ended: threading.Event) -> bool:
    """True when somebody waits for a lock, false when the step ended without that."""
    # A transaction would see the same activity for as long as it is open.
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as beside:
        while not ended.wait(0.02):
            if beside.execute(IS_BLOCKED).scalar_one():
                return True
    return False


def overlap(engine: Engine, first: Callable[..., object], second: Callable[..., object], *given: Any) -> bool:
    """Runs the second step while the first is done and not committed; whether it had to wait for it."""
    with engine.begin() as connection:
        first(connection, *given)
        is_blocked, end = begin_beside(engine, second, *given)
    end()
    return is_blocked


def begin_beside(engine: Engine, act: Callable[..., object], *given: Any) -> tuple[bool, Callable[[], None]]:
    """Begin a transaction in a thread; return whether it waits for a lock, and a function that waits for its end."""
    ended, errors = threading.Event(), []

    def run() -> None:
        try:
            ask(engine, act, *given)
        except Exception as error:
            errors.append(error)
        finally:
            ended.set()

    def end() -> None:
        assert ended.wait(60)
        assert not errors, errors

    threading.Thread(target=run, daemon=True).start()
    return wait_until_blocked(engine, ended), end


@pytest.mark.parametrize("wish", JOB_CHANGES)
def test_a_wish_and_any_step_end_whichever_is_first(engine: Engine, wish: str) -> None:
    for name, step in STEPS.items():
        for first, second in ((JOB_CHANGES[wish], step), (step, JOB_CHANGES[wish])):
            scene = Scene(engine)
            if wish == "retry":
                execute(engine, PAUSES)
            overlap(engine, first, second, scene)
            with engine.connect() as connection:
                assert find_job(connection, scene.job.id).num_open_chunks >= 0, name
                connection.execute(text("TRUNCATE vectormill.jobs CASCADE"))
                connection.commit()


@pytest.mark.parametrize("wish", ["pause", "cancel"])
@pytest.mark.parametrize("step", ["claim", "recall"])
def test_a_wish_never_waits_for_a_chunk(engine: Engine, wish: str, step: str) -> None:
    assert not overlap(engine, STEPS[step], JOB_CHANGES[wish], Scene(engine))


def test_a_chunk_of_a_deleted_job_that_somebody_holds_is_left_to_a_later_batch(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    for _ in range(2):
        complete(engine, claim_next(engine))
    ask(engine, discard_job, job.id)
    with engine.begin() as holding:  # as the mender does, which waits for the job then
        holding.execute(text("SELECT FROM vectormill.chunks ORDER BY id LIMIT 1 FOR NO KEY UPDATE"))
        assert not ask(engine, delete_batch, job.id, 10, 10)
    assert ask(engine, delete_batch, job.id, 10, 10)


REMOVALS: dict[str, Callable[[Connection, Job], object]] = {
    "answered": lambda connection, query: delete_job(connection, query.id),
    "forgotten": lambda connection, query: delete_forgotten_queries(connection),
}


@pytest.mark.parametrize("removal", REMOVALS)
def test_the_query_of_a_search_is_removed_while_a_worker_commits_it(engine: Engine, removal: str) -> None:
    query = submit(engine, make_items(1))
    held = claim_next(engine)
    execute(engine, "UPDATE vectormill.jobs SET forget_at = now() - interval '1 s'")

    with engine.begin() as connection:
        end_under_fence(connection, held, COMMIT_CHUNK, proof_id=None)  # a commit's first statement
        _, end = begin_beside(engine, REMOVALS[removal], query)
        add_up_job(connection, query.id)  # the job's row, as its last
    end()


def test_a_chunk_that_was_being_claimed_when_its_job_was_cancelled_hears_of_it(engine: Engine) -> None:
    scene = Scene(engine)
    claimed: list[Any] = []
    overlap(
        engine,
        lambda connection, scene: claimed.append(claim_chunk(connection, scene.queued, "w", SPEC.model, 30)),
        JOB_CHANGES["cancel"],
        scene,
    )
    claims = [each.claim for each in claimed]
    assert ask(engine, renew_leases, claims, 30) == {scene.queued: "cancelling"}
