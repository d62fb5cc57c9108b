"""How runs are held, lost, handed back, given up and cancelled."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, text

from indexer.context import ClaimProgress, RunContext
from indexer.reindexing import await_job, begin_reading, read_source
from indexer.reindexing import submit as submit_changes
from tests.api_server import encode_waiting, encoding_meanwhile
from tests.database import ask, execute
from tests.indexers import (
    ListedSource,
    await_run,
    contents,
    count_encoded,
    indexing,
    look,
    make_collection,
    row,
    start_run,
    wanted,
)
from tests.protocol import submit
from tests.waiting import wait_for
from vectormill.domain.errors import LeaseLost, SourceInterrupted
from vectormill.jobs.jobs import find_job
from vectormill.models.registry import Registry
from vectormill.runs.differences import drop_left_stages
from vectormill.runs.run import ENCODING, FAILED, Run
from vectormill.runs.runs import abandon_run, cancel_run, claim_run, hold_run
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import SQL, Source
from vectormill.work.work import Lease, Stopping

ROWS = [row(f"k{number}", f"text {number}", page=number) for number in range(10)]
CHANGED = [*ROWS[:8], row("k8", "another"), row("new", "new")]

COUNT_STAGES = text("SELECT count(*) FROM pg_class WHERE relname ~ '^run_[0-9a-f]{32}_' AND relkind = 'r'")


def build(engine: Engine) -> None:
    submit(engine, ROWS, collection="docs")
    encode_waiting(engine)


def count(engine: Engine, statement: Any) -> int:
    return int(execute(engine, statement).scalar_one())


def claim(engine: Engine) -> tuple[Lease, Run]:
    claimed = ask(engine, claim_run, "somebody", 30.0)
    assert claimed is not None
    return claimed


def expire(engine: Engine) -> None:
    execute(engine, "UPDATE vectormill.runs SET lease_until = now() WHERE state = 'running'")


def test_an_indexer_that_is_told_to_stop_hands_its_runs_back_at_once(engine: Engine) -> None:
    build(engine)
    has_begun = threading.Event()

    def linger(position: int) -> None:
        has_begun.set()

    slow = ListedSource(CHANGED, batch=1, before=linger)
    with indexing(engine, slow, lease_seconds=60.0) as stop:
        run_id = start_run(engine)
        assert has_begun.wait(80)
        wait_for(lambda: look(engine, run_id).phase == "encoding", 20, "it waits for a worker")
        stop.set()
    assert (look(engine, run_id).state, look(engine, run_id).attempt) == ("running", 0)
    with indexing(engine, slow, lease_seconds=60.0), encoding_meanwhile(engine):
        run = await_run(engine, run_id)
    assert run.state == "completed"
    assert contents(engine) == wanted(CHANGED)
    assert count_encoded(engine) == 2


@pytest.mark.parametrize(
    ("error", "num_reads"),
    [
        (RuntimeError("the disk is full"), 1),
        (psycopg.errors.DiskFull("nothing left"), 1),  # a shortage is an attempt at once
        (
            psycopg.OperationalError("server closed the connection unexpectedly"),
            2,
        ),  # a lost connection is waited for
    ],
)
def test_a_run_whose_indexer_fails_again_and_again_is_given_up_with_the_last_error(
    engine: Engine, error: Exception, num_reads: int
) -> None:
    make_collection(engine)
    reads: list[int] = []

    def break_down(position: int) -> None:
        reads.append(position)
        raise error

    with indexing(engine, ListedSource(ROWS, before=break_down), max_attempts=1):
        run = await_run(engine, start_run(engine))
    assert run.state == "failed"
    for said in ("tried 1 times", "in phase reading", str(error)):
        assert said in (run.error or "")
    assert len(reads) == num_reads


def test_a_source_that_is_lost_once_is_read_again(engine: Engine) -> None:
    make_collection(engine)
    losses = iter([True])

    def lose(position: int) -> None:
        if position and next(losses, False):
            raise SourceInterrupted("The connection was lost.")

    with indexing(engine, ListedSource(ROWS, before=lose)), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine))
    assert (run.state, run.error, run.counts.num_seen) == ("completed", None, len(ROWS))
    assert contents(engine) == wanted(ROWS)


def make_context(engine: Engine, lease: Lease, check: Callable[[], None] = lambda: None) -> RunContext:
    return RunContext(
        look(engine, lease.key),
        engine,
        Settings(),
        Registry({}),
        check,
        lambda phase, found: None,
        lambda connection: hold_run(connection, lease),
    )


def test_an_indexer_that_lost_its_run_leaves_no_job_in_the_place_of_the_run(engine: Engine) -> None:
    make_collection(engine)
    run_id = start_run(engine)
    first = claim(engine)
    progress = ClaimProgress(*first)
    context = make_context(engine, first[0])
    read_source(context, progress, ListedSource(ROWS), *begin_reading(context, progress))
    taken_over: list[tuple[Lease, Run]] = []

    def stop() -> None:
        raise Stopping

    def take_over() -> None:
        if not taken_over:
            expire(engine)
            second = claim(engine)
            taken_over.append(second)
            with pytest.raises(Stopping):
                submit_changes(make_context(engine, second[0], stop), ClaimProgress(*second))

    with pytest.raises(LeaseLost):
        submit_changes(make_context(engine, first[0], take_over), progress)
    job_id = submit_changes(make_context(engine, taken_over[0][0]), ClaimProgress(*taken_over[0]))
    assert job_id == look(engine, run_id).job_id
    assert count(engine, text("SELECT count(*) FROM vectormill.jobs")) == 1


FIND_SLEEPERS = text("""
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event = 'PgSleep'
""")


def test_a_query_that_hangs_is_ended_on_its_server_when_its_run_is_cancelled(engine: Engine) -> None:
    make_collection(engine)
    options = {"query": "SELECT 1 AS id, pg_sleep(900)::text AS body", "key": "id", "text": "body"}
    place = SourcePlace(engine, Settings(), Registry({}), collection="docs")
    with indexing(engine, open_source(Source(SQL, options, {"by": "paragraphs"}), place)):
        run_id = start_run(engine)
        wait_for(lambda: count(engine, FIND_SLEEPERS) == 1, 20, "the query hangs")
        ask(engine, cancel_run, run_id)
        assert await_run(engine, run_id).state == "cancelled"
        wait_for(lambda: count(engine, FIND_SLEEPERS) == 0, 20, "the query was ended")


def test_a_run_reads_again_when_a_crash_of_postgres_emptied_its_stage_and_encodes_nothing_twice(
    engine: Engine,
) -> None:
    build(engine)
    with indexing(engine, ListedSource(CHANGED)):
        run_id = start_run(engine)

        def has_job() -> bool:
            run = look(engine, run_id)
            statement = text("SELECT count(*) FROM vectormill.jobs WHERE state = 'queued'")
            return run.phase == "encoding" and count(engine, statement) == 1

        wait_for(has_job, 20, "its job waits for a worker")
        with engine.begin() as connection:
            name = f"vectormill.run_{run_id.hex}"
            connection.execute(text(f"TRUNCATE {name}_seen, {name}_changes, {name}_moved"))
        with encoding_meanwhile(engine):
            run = await_run(engine, run_id)
    assert (run.state, run.error) == ("completed", None)
    assert contents(engine) == wanted(CHANGED)
    assert count_encoded(engine) == 2
    assert count(engine, COUNT_STAGES) == 0


def test_a_run_that_is_cancelled_while_it_reads_has_changed_nothing(engine: Engine) -> None:
    build(engine)

    def cancel(position: int) -> None:
        if position == 6:
            assert ask(engine, cancel_run, run_id).state == "cancelling"
            assert wait_for(lambda: look(engine, run_id).is_terminal, 20, "the indexer heard of it")

    source = ListedSource(CHANGED, before=cancel)
    run_id = start_run(engine)
    with indexing(engine, source):
        run = await_run(engine, run_id)
    assert (run.state, run.error) == ("cancelled", None)
    assert contents(engine) == wanted(ROWS)
    assert count(engine, COUNT_STAGES) == 0


def test_a_run_that_is_cancelled_while_it_encodes_cancels_its_job(engine: Engine) -> None:
    build(engine)
    with indexing(engine, ListedSource(CHANGED)):
        run_id = start_run(engine)
        wait_for(lambda: look(engine, run_id).phase == "encoding", 20, "it encodes")
        ask(engine, cancel_run, run_id)
        run = await_run(engine, run_id)
    assert run.state == "cancelled"
    open_jobs = text("SELECT count(*) FROM vectormill.jobs WHERE state IN ('queued', 'running', 'uploading')")
    assert count(engine, open_jobs) == 0
    assert "k9" in contents(engine)
    assert count(engine, COUNT_STAGES) == 0


def test_a_job_that_somebody_else_cancelled_fails_its_run(engine: Engine) -> None:
    build(engine)
    with indexing(engine, ListedSource(CHANGED)):
        run_id = start_run(engine)
        wait_for(lambda: look(engine, run_id).job_id is not None, 20, "it has a job")
        wait_for(
            lambda: count(engine, text("SELECT count(*) FROM vectormill.jobs WHERE state = 'queued'")) == 1
        )
        execute(engine, "UPDATE vectormill.jobs SET state = 'cancelled' WHERE state = 'queued'")
        run = await_run(engine, run_id)
    assert run.state == "failed"
    assert run.error is not None
    assert "cancelled or deleted" in run.error


def test_a_run_that_fails_ends_the_job_that_encodes_for_it(engine: Engine) -> None:
    build(engine)
    start_run(engine)
    lease, run = claim(engine)
    job = submit(engine, CHANGED, collection="docs")
    ask(engine, ClaimProgress(lease, run).save, phase=ENCODING, job_id=job.id)
    ask(engine, abandon_run, lease, FAILED, "so it is")
    assert ask(engine, find_job, job.id).state == "cancelled"


def test_a_run_whose_job_advances_is_not_given_up_for_the_indexers_that_it_outlived(engine: Engine) -> None:
    build(engine)
    run_id = start_run(engine)
    for _ in range(3):
        claim(engine)
        expire(engine)
    held = claim(engine)
    job = submit(engine, CHANGED, collection="docs")
    context = cast("RunContext", SimpleNamespace(engine=engine, check=lambda: None))
    assert look(engine, run_id).attempt == 4
    await_job(context, ClaimProgress(*held), job.id, lambda _: encode_waiting(engine))
    assert look(engine, run_id).attempt == 1


def test_a_left_stage_that_somebody_reads_holds_up_no_run(engine: Engine) -> None:
    left = f"vectormill.run_{uuid4().hex}_seen"
    execute(engine, f"CREATE TABLE {left} (key text)")
    with engine.connect() as reading:  # as a backup does
        reading.execute(text(f"SELECT FROM {left}"))
        assert drop_left_stages(engine) == 0
    assert drop_left_stages(engine) == 1


def test_a_run_ends_although_somebody_reads_its_stage(engine: Engine) -> None:
    build(engine)
    with engine.connect() as reading:

        def read(position: int) -> None:
            if position == 3:
                reading.execute(text(f"SELECT FROM vectormill.run_{run_id.hex}_seen"))

        run_id = start_run(engine)
        with indexing(engine, ListedSource(ROWS, before=read)):
            assert await_run(engine, run_id).state == "completed"
    assert drop_left_stages(engine) == 1
    assert count(engine, COUNT_STAGES) == 0
