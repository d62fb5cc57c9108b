"""A lease that lapses tells nothing of the texts: nothing is held against them. A commit that waits keeps its lease."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from scheduler import reaper
from scheduler.reaper import Reaper
from tests.database import ask, execute, load_payload
from tests.obedient_engine import ObedientEngine, encoding_chunks, run_to_end
from tests.protocol import claim, claim_next, complete, make_items, submit
from tests.waiting import wait_for
from vectormill.jobs.chunks import renew_leases
from vectormill.jobs.jobs import find_job
from vectormill.jobs.transitions import rescue_expired_chunks
from vectormill.settings import Settings
from worker.chunk.chunk_encoder import MAX_LAPSED
from worker.engine.request import EncodeRequest, RunnerDied

CHUNK = text("SELECT state, attempt, lost, lapsed, lease_until FROM vectormill.chunks ORDER BY id LIMIT 1")


def lapse(engine: Engine) -> None:
    """A worker claims the first chunk that waits and is never heard of again."""
    execute(engine, "UPDATE vectormill.chunks SET available_at = now()")
    claim_next(engine, lease_seconds=-1)
    assert ask(engine, rescue_expired_chunks) == 1


def test_a_text_never_fails_because_leases_lapse_however_often(engine: Engine) -> None:
    job = submit(engine, make_items(1))
    for _ in range(3 * MAX_LAPSED):
        lapse(engine)
    assert tuple(execute(engine, CHUNK).one())[:4] == ("pending", 0, 0, 3 * MAX_LAPSED)
    with encoding_chunks(engine, max_attempts=1) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert (ended.state, outcomes) == ("completed", ["done"])
    assert ended.num_retried_chunks == 3 * MAX_LAPSED


def test_a_chunk_that_lapses_again_and_again_is_halved_and_none_of_its_texts_fails(engine: Engine) -> None:
    job = submit(engine, make_items(4))
    for _ in range(MAX_LAPSED):
        lapse(engine)
    with encoding_chunks(engine, max_attempts=1) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert outcomes == ["split", "done", "done"]
    assert (ended.state, ended.num_done) == ("completed", 4)


def test_a_model_process_that_ended_for_another_reason_speaks_against_no_text(engine: Engine) -> None:
    deaths = iter(range(6))

    def die(request: EncodeRequest) -> None:
        if next(deaths, None) is not None:
            raise RunnerDied("it was killed from outside", is_suspect=False)

    job = submit(engine, make_items(1))
    with encoding_chunks(engine, ObedientEngine(die), max_attempts=2) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert outcomes == ["model process died"] * 6 + ["done"]
    assert (ended.state, ended.num_retried_chunks) == ("completed", 6)


def test_a_text_that_was_beside_the_one_to_blame_is_encoded_alone_and_completes(engine: Engine) -> None:
    together = threading.Barrier(2)
    inside, met = set(), threading.Event()

    def crash(request: EncodeRequest) -> None:
        name = request.texts[0]
        if not met.is_set():  # both are in one batch when the model's process dies
            together.wait(60)
            met.set()
            raise RunnerDied
        inside.add(name)
        try:
            assert inside == {name}, "a suspect was encoded in company"
            if b"poison" in name:
                raise RunnerDied
        finally:
            inside.remove(name)

    healthy, poison = submit(engine, make_items(1)), submit(engine, make_items(1, "poison"))
    with encoding_chunks(engine, ObedientEngine(crash)) as encoder:
        for _ in range(3):
            with engine.begin() as connection:
                connection.execute(
                    text("UPDATE vectormill.chunks SET available_at = now() WHERE state = 'pending'")
                )
                connection.execute(
                    text("UPDATE vectormill.jobs SET state = 'running' WHERE state = 'queued'")
                )
                chunk_ids = connection.execute(
                    text("SELECT id FROM vectormill.chunks WHERE state = 'pending'")
                ).scalars()
                threads = [
                    threading.Thread(target=encoder.encode_chunk, args=(chunk_id,)) for chunk_id in chunk_ids
                ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
    assert ask(engine, find_job, healthy.id).state == "completed"
    assert ask(engine, find_job, poison.id).state == "failed"


def test_renewal_passes_over_a_row_that_a_commit_has_locked_and_does_not_take_it_for_lost(
    engine: Engine,
) -> None:
    submit(engine, make_items(2))
    committing = claim_next(engine, lease_seconds=5)
    submit(engine, make_items(2))
    other = claim_next(engine, lease_seconds=5)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.chunks SET state = 'done' WHERE id = :id"), {"id": committing.chunk_id}
        )
        with engine.begin() as beside:
            beside.execute(text("SET LOCAL lock_timeout = '1s'"))
            renewed = renew_leases(beside, [committing, other], 60)
            assert renewed == {committing.chunk_id: "running", other.chunk_id: "running"}
        with engine.begin() as beside:
            assert claim(engine, committing.chunk_id) is None, "a late message waits for no lock"
    with engine.begin() as connection:
        assert renew_leases(connection, [committing, other], 60) == {other.chunk_id: "running"}
        seconds = connection.execute(
            text("SELECT extract(epoch FROM lease_until - now()) FROM vectormill.chunks WHERE id = :id"),
            {"id": other.chunk_id},
        ).scalar_one()
    assert seconds > 30


@contextmanager
def locked(engine: Engine, table: str) -> Iterator[Connection]:
    """As a CREATE INDEX that is not CONCURRENTLY locks it: reads go on, writes wait."""
    with engine.connect() as connection:
        connection.execute(text("SET idle_in_transaction_session_timeout = 0"))
        connection.execute(text(f"LOCK TABLE {table} IN SHARE MODE"))
        yield connection
        connection.rollback()


def test_a_commit_that_a_new_index_blocks_waits_with_its_lease_and_is_then_done(engine: Engine) -> None:
    job = submit(engine, make_items(4), collection="docs")
    execute(engine, "UPDATE vectormill.jobs SET state = 'running'")
    chunk_id = execute(engine, "SELECT id FROM vectormill.chunks").scalar_one()
    table = execute(
        engine, "SELECT 'vectormill.generation_' || generation_id FROM vectormill.jobs"
    ).scalar_one()
    outcomes: list[str] = []
    with encoding_chunks(engine, lease_seconds=4.0) as encoder:
        thread = threading.Thread(
            target=lambda: outcomes.append(encoder.encode_chunk(chunk_id)["outcome"]), daemon=True
        )
        with locked(engine, table):
            thread.start()
            leases: set[Any] = set()

            def is_renewed() -> bool:  # at the claim, and between two attempts to commit
                leases.add(execute(engine, CHUNK).one().lease_until)
                return len(leases - {None}) > 3

            wait_for(is_renewed, 40, "a commit that waits has its lease renewed")
            assert ask(engine, rescue_expired_chunks) == 0
            assert outcomes == []
        thread.join(60)
    assert outcomes == ["done"]
    assert tuple(execute(engine, CHUNK).one())[:4] == ("done", 1, 0, 0)
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_done, ended.num_retried_chunks) == ("completed", 4, 0)


@pytest.mark.parametrize(
    ("clock", "lapses_at", "is_taken_at"),
    [
        ([0, 10, 20, 29, 31], 0, 31),  # a new scheduler's first rounds
        ([0, 15, 30, 35, 100, 115, 129, 131], 100, 131),  # after an outage, or when the clock was set
        ([0, 19, 38, 57, 60], 57, 57),  # a slow machine's rounds are no outage
    ],
)
def test_nothing_is_reaped_before_workers_had_the_time_of_a_lease_to_renew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, clock: list[int], lapses_at: int, is_taken_at: int
) -> None:
    submit(engine, make_items(1))
    claim_next(engine, lease_seconds=3600)
    ticks = iter(clock)
    monkeypatch.setattr(reaper, "read_clock", lambda connection: float(next(ticks)))
    reaping = Reaper(engine, Settings(lease_seconds=30, reap_seconds=5))
    for moment in clock:
        if moment == lapses_at:
            execute(engine, "UPDATE vectormill.chunks SET lease_until = now() - interval '1 s'")
        assert reaping.reap() == (moment == is_taken_at), f"at {moment}"


def test_a_commit_under_a_lapsed_lease_is_done_when_nobody_took_the_chunk(engine: Engine) -> None:
    submit(engine, make_items(2))
    held = claim_next(engine, lease_seconds=-1)
    ask(engine, load_payload, held.chunk_id)
    assert ask(engine, renew_leases, [held], 30)
    assert complete(engine, held)
