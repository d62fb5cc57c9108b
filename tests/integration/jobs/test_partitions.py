"""Partitions of texts and results: who opens them, when they are made and dropped, and what is deleted singly."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from sqlalchemy import Connection, Engine, text

from scheduler.pruner import Pruner
from tests.database import ask, execute, load_payload
from tests.protocol import (
    LONG,
    SPEC,
    claim,
    claim_next,
    complete,
    complete_on,
    dispatch_all,
    make_items,
    submit,
)
from tests.waiting import wait_for
from vectormill.domain.errors import LocksHeld
from vectormill.jobs import partitions
from vectormill.jobs.chunks import claim_chunk
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.export import LIST_CHUNKS, LIST_PAYLOADS, read_results
from vectormill.jobs.item import Item
from vectormill.jobs.job import Job
from vectormill.jobs.partitions import TABLES, ChunkSpan, keep_partitions, list_spans, shrink_partitions
from vectormill.jobs.transitions import INSERT_CHUNK

NEVER = 1e9
SPAN = 8  # in these tests

SET_LAST_ID = text("SELECT setval('vectormill.chunks_id_seq', :last_id)")
# This lists the relations that the transaction has locked.
LIST_OPENED = text("""
    SELECT DISTINCT relname FROM pg_locks JOIN pg_class ON pg_class.oid = relation
     WHERE pid = pg_backend_pid() AND relispartition AND relkind = 'r' ORDER BY relname
""")
IS_DROP_WAITING = text("""
    SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'
                      AND relation = CAST('vectormill.chunk_payloads' AS regclass))
""")
LET_GRACE_PASS = text("UPDATE vectormill.removed_chunks SET due_at = due_at - interval '11 minutes'")


@pytest.fixture
def spans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[ChunkSpan]]:
    """Let spans be small, and let the next id begin the first of them. Return a function that lists them."""
    monkeypatch.setattr(partitions, "SPAN", SPAN)
    monkeypatch.setattr(partitions, "STEP", SPAN)
    monkeypatch.setattr(partitions, "SPAN_BYTES", 1 << 40)
    monkeypatch.setattr(partitions, "SHARE", 1 << 40)
    monkeypatch.setattr(partitions, "MARGIN", 4 * SPAN)
    (first,) = ask(engine, list_spans)
    execute(engine, SET_LAST_ID, last_id=first.end - 1)
    keep_partitions(engine)

    def list_now() -> list[ChunkSpan]:
        return ask(engine, list_spans)

    return list_now


def encode(engine: Engine, job: Job) -> None:
    for each in dispatch_all(engine):
        claimed = claim(engine, each.chunk_id)
        assert claimed is not None
        assert claimed.job_id == job.id
        complete(engine, claimed)


def encoded_job(engine: Engine, num_chunks: int, prefix: str = "k") -> Job:
    job = submit(
        engine,
        (Item(item.key, LONG + item.text) for item in make_items(num_chunks, prefix)),
        chunk_max_items=1,
    )
    encode(engine, job)
    return job


def discard(engine: Engine, *jobs: Job) -> None:
    with engine.begin() as connection:
        for job in jobs:
            discard_job(connection, job.id)


def prune(engine: Engine) -> None:
    Pruner(engine, NEVER, NEVER).prune()


def count(engine: Engine, table: str) -> int:
    return int(execute(engine, f"SELECT count(*) FROM vectormill.{table}").scalar_one())


def count_contents(engine: Engine) -> list[int]:
    return [count(engine, table) for table in TABLES]


def number_of_partitions(engine: Engine) -> int:
    return int(
        execute(engine, "SELECT count(*) FROM pg_class WHERE relname ~ '^chunk_.*_to_[0-9]+$'").scalar_one()
    )


def test_a_claim_a_commit_and_a_page_of_an_export_open_only_the_partitions_of_their_chunk(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    job = encoded_job(engine, 2 * SPAN)
    keep_partitions(engine)
    submit(engine, [Item("late", LONG)])
    assert len(spans()) == 5
    chunk_id = max(each.chunk_id for each in dispatch_all(engine))
    (own,) = [span for span in spans() if span.start <= chunk_id < span.end]

    def opened(connection: Connection) -> set[str]:
        return {f"vectormill.{name}" for name in connection.execute(LIST_OPENED).scalars()}

    for _ in range(12):  # from the sixth execution on Postgres may use one plan for all values
        with engine.connect() as connection:
            claimed = claim_chunk(connection, chunk_id, "w", SPEC.model, 30.0)
            assert claimed is not None
            assert claimed.payload is not None
            assert opened(connection) == {own.name("chunk_payloads")}
            complete_on(connection, claimed.claim)
            assert opened(connection) == set(map(own.name, TABLES))
            connection.rollback()
        for statement, most in ((LIST_CHUNKS, 2), (LIST_PAYLOADS, 1)):
            with engine.connect() as connection:
                values = {"job_id": job.id, "start": SPAN + 2, "limit": 2}
                driver = connection.connection.driver_connection
                assert driver is not None
                assert len(driver.execute(statement, values).fetchall()) == 2
                assert len(opened(connection)) == most
    assert sum(len(block.keys) for block in read_results(engine, job.id)) == 2 * SPAN


def test_spans_are_made_ahead_of_the_ids_and_the_tables_of_a_span_are_alike(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    for _ in range(5):
        encoded_job(engine, SPAN)
        keep_partitions(engine)
    found = spans()
    assert all(former.end == span.start for former, span in pairwise(found))
    assert {span.end - span.start for span in found} == {SPAN}
    assert len(found) == 5 + partitions.AHEAD
    assert number_of_partitions(engine) == 3 * len(found)
    assert [count(engine, f"{table}_default") for table in TABLES] == [0, 0, 0]


def test_a_span_is_dropped_when_its_last_chunk_is_gone_and_not_before(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    first, second = spans()[0].start, spans()[0].end
    large = encoded_job(engine, SPAN - 1, "large")
    kept = encoded_job(engine, 2, "kept")  # the last chunk of this span, and the first of the next one
    discard(engine, large)
    prune(engine)
    assert ChunkSpan(first, second) in spans()
    discard(engine, kept)
    prune(engine)
    assert ChunkSpan(first, second) not in spans()
    assert spans()[0].start == second, "a span whose ids are not all drawn stays"
    assert count_contents(engine) == [0, 0, 0]


def unseen_chunks(job: Job, number: int) -> list[dict[str, object]]:
    """Return the values of further chunks of a job, of an upload that goes on."""
    chunk = {
        "job_id": job.id,
        "first_item": 1,
        "num_items": 1,
        "estimated_tokens": 1,
        "items": b"",
        "places": None,
    }
    return [chunk | {"seq": seq} for seq in range(1, number + 1)]


def test_a_span_with_a_chunk_that_nobody_sees_yet_is_not_dropped(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    job = encoded_job(engine, 1)
    with engine.connect() as uploading:
        uploading.execute(INSERT_CHUNK, unseen_chunks(job, 2 * SPAN - 1))
        own = spans()[0]
        execute(engine, "DELETE FROM vectormill.chunks")
        with pytest.raises(LocksHeld):
            keep_partitions(engine)
        assert own in spans()
        uploading.commit()
    keep_partitions(engine)
    assert own in spans()
    assert count(engine, "chunk_payloads") == 2 * SPAN


def test_chunks_beyond_the_last_span_are_stored_and_their_partitions_become_a_span(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    end = spans()[-1].end
    job = encoded_job(engine, 6 * SPAN)  # while no scheduler makes spans
    held = count(engine, "chunk_payloads_default")
    assert held > 0
    keep_partitions(engine)
    assert [count(engine, f"{table}_default") for table in TABLES] == [0, 0, 0]
    (closed,) = [span for span in spans() if span.start == end]
    assert count(engine, f"chunk_payloads_to_{closed.end}") == held
    assert sum(len(block.keys) for block in read_results(engine, job.id)) == 6 * SPAN
    encoded_job(engine, 6 * SPAN, "later")
    keep_partitions(engine)
    discard(engine, job)
    prune(engine)
    assert count_contents(engine) == [6 * SPAN] * 3


def test_default_partitions_whose_scheduler_was_killed_before_the_end_are_closed_by_the_next_one(
    engine: Engine, spans: Callable[[], list[ChunkSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded_job(engine, 6 * SPAN)
    with monkeypatch.context() as patch:
        patch.setattr(partitions, "_close", stop_after(partitions._close))
        with pytest.raises(KeyboardInterrupt):
            keep_partitions(engine)
    assert count(engine, "chunk_payloads_default") > 0
    encoded_job(engine, 1, "meanwhile")
    keep_partitions(engine)
    assert [count(engine, f"{table}_default") for table in TABLES] == [0, 0, 0]
    with engine.connect() as connection:
        left = text("SELECT count(*) FROM pg_constraint WHERE conname = 'closing'")
        assert connection.execute(left).scalar_one() == 0
    encoded_job(engine, 20 * SPAN, "later")
    assert count_contents(engine) == [26 * SPAN + 1] * 3


def test_a_limit_of_the_default_partitions_that_a_killed_scheduler_has_left_refuses_no_chunk(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    end = spans()[-1].end
    limit = f"ALTER TABLE vectormill.chunk_payloads_default ADD CONSTRAINT closing CHECK (chunk_id < {end})"
    with engine.begin() as connection:  # its rows were deleted before the next scheduler came
        connection.execute(text(limit))
    keep_partitions(engine)
    encoded_job(engine, 20 * SPAN)
    assert count_contents(engine) == [20 * SPAN] * 3


def stop_after(act: Callable[..., object]) -> Callable[..., None]:
    """Act and then stop as a killed process does: the transaction does not come to its end."""

    def stopped(*arguments: object, **named: object) -> None:
        act(*arguments, **named)
        raise KeyboardInterrupt

    return stopped


def test_a_scheduler_that_is_killed_while_it_drops_a_span_leaves_all_of_it_or_nothing(
    engine: Engine, spans: Callable[[], list[ChunkSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = encoded_job(engine, SPAN)
    before = number_of_partitions(engine)
    discard(engine, job)
    with monkeypatch.context() as patch:
        patch.setattr(partitions, "_drop", stop_after(partitions._drop))
        with pytest.raises(KeyboardInterrupt):
            prune(engine)
    assert (
        number_of_partitions(engine) == 3 * len(spans()) == before + 3
    )  # one was made ahead, and none is dropped
    keep_partitions(engine)
    assert number_of_partitions(engine) == 3 * len(spans()) == before


def test_texts_of_a_large_job_beside_others_are_gone_when_they_are_due(engine: Engine) -> None:
    kept = encoded_job(engine, 1, "kept")
    large, small = encoded_job(engine, 250, "large"), encoded_job(engine, 99, "small")
    discard(engine, large, small)
    prune(engine)
    assert count(engine, "chunks") == 1
    assert 100 <= count_contents(engine)[0] <= 201, "rows of less than 100 chunks do not wait"
    execute(engine, LET_GRACE_PASS)
    prune(engine)
    assert count_contents(engine) == [1, 1, 1]
    assert count(engine, "removed_chunks") == 0
    assert sum(len(block.keys) for block in read_results(engine, kept.id)) == 1


@pytest.mark.parametrize("statement", ["DELETE FROM vectormill.jobs", "DELETE FROM vectormill.chunks"])
def test_whoever_deletes_chunks_has_their_texts_deleted(engine: Engine, statement: str) -> None:
    encoded_job(engine, 3)
    execute(engine, statement)
    prune(engine)
    assert count_contents(engine) == [0, 0, 0]


def wait_for_drop(engine: Engine) -> None:
    """Wait until a drop waits for the lock of the payloads."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wait_for(lambda: connection.execute(IS_DROP_WAITING).scalar_one())


def test_claims_and_commits_do_not_wait_for_a_drop_that_waits_for_a_dump(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    job = encoded_job(engine, SPAN)
    submit(engine, make_items(4), chunk_max_items=1)
    keep_partitions(engine)
    discard(engine, job)
    Pruner(engine, NEVER, NEVER)._delete_jobs()
    is_over = threading.Event()

    def drop() -> None:
        while not is_over.is_set():
            with pytest.raises(LocksHeld):
                keep_partitions(engine)

    waits = []
    with engine.connect() as dump, ThreadPoolExecutor(1) as pool:
        dump.execute(text("LOCK TABLE vectormill.chunk_payloads IN ACCESS SHARE MODE"))
        dropping = pool.submit(drop)
        try:
            for _ in range(4):
                wait_for_drop(engine)
                began = time.monotonic()
                complete(engine, claim_next(engine))
                waits.append(time.monotonic() - began)
        finally:
            is_over.set()
        dropping.result()
    assert max(waits) < 1.0
    assert keep_partitions(engine) == 1


def test_a_span_whose_chunks_are_committed_while_its_drop_waits_is_kept(
    engine: Engine, spans: Callable[[], list[ChunkSpan]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "LOCK_MILLISECONDS", 60_000)
    job = submit(engine, make_items(1))
    own = spans()[0]
    with engine.connect() as uploading, ThreadPoolExecutor(1) as pool:
        uploading.execute(INSERT_CHUNK, unseen_chunks(job, SPAN))
        execute(engine, "DELETE FROM vectormill.chunks")
        dropping = pool.submit(keep_partitions, engine)
        wait_for_drop(engine)
        uploading.commit()
        assert dropping.result() == 0
    assert own in spans()
    assert count(engine, own.name("chunk_payloads").removeprefix("vectormill.")) == SPAN


def test_spans_are_made_and_dropped_while_workers_claim_and_commit(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    waits: list[float] = []
    is_over = threading.Event()
    dropped: list[int] = []

    def keep() -> None:
        while not is_over.is_set():
            try:
                dropped.append(keep_partitions(engine))
            except LocksHeld:
                continue

    keeping = threading.Thread(target=keep)
    keeping.start()
    try:
        for number in range(12):
            job = submit(engine, make_items(SPAN, f"{number}-"), chunk_max_items=1)
            for each in dispatch_all(engine):
                began = time.monotonic()
                claimed = claim(engine, each.chunk_id)
                assert claimed is not None
                complete(engine, claimed)
                waits.append(time.monotonic() - began)
            assert sum(len(block.keys) for block in read_results(engine, job.id)) == SPAN
            discard(engine, job)
            execute(engine, "DELETE FROM vectormill.chunks")
    finally:
        is_over.set()
        keeping.join()
    assert len(waits) == 12 * SPAN
    assert max(waits) < 1.0
    assert sum(dropped) > 3


def test_a_partition_with_few_rows_left_gives_its_disk_back(
    engine: Engine, spans: Callable[[], list[ChunkSpan]]
) -> None:
    partition = spans()[0].name("chunk_payloads")
    encoded_job(engine, SPAN)

    def act(statement: str) -> None:
        execute(engine, statement)

    def measure() -> int:
        return int(execute(engine, f"SELECT pg_table_size('{partition}')").scalar_one())

    act(f"ALTER TABLE {partition} ALTER items SET STORAGE EXTERNAL")  # nothing is compressed
    others = f"chunk_id > (SELECT min(chunk_id) FROM {partition})"
    act(f"UPDATE {partition} SET items = convert_to(repeat('x', 1000000), 'UTF8') WHERE {others}")
    full = measure()
    assert full > 7_000_000
    assert shrink_partitions(engine, least_bytes=100_000) == 0
    act(f"DELETE FROM {partition} WHERE {others}")
    assert shrink_partitions(engine, least_bytes=10**9) == 0
    assert shrink_partitions(engine, least_bytes=100_000) == 1
    assert measure() < full / 50
    (chunk_id,) = execute(engine, f"SELECT chunk_id FROM {partition}").scalars()
    assert len(ask(engine, load_payload, chunk_id)) == 1
