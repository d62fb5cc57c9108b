"""Jobs of runs: with an id and a place in the order of writers that were noted before, for a generation by id."""

from dataclasses import replace
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, make_items, submit
from vectormill.collections.collections import find_generation, list_written_generations
from vectormill.domain.errors import Conflict, SpecMismatch
from vectormill.jobs.deletion import discard_upload
from vectormill.jobs.item import Item
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import draw_seq, find_job
from vectormill.jobs.submission import JobWriter
from vectormill.settings import Settings


def write(engine: Engine, new_job: NewJob, items: list[Item]) -> Job:
    with JobWriter(engine, new_job, Settings()) as writer:
        for item in items:
            writer.add(item)
        return writer.finish()


def test_what_a_client_puts_after_a_run_began_to_read_is_newer_than_the_runs_job(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    complete(engine, claim_next(engine))
    seq = ask(engine, draw_seq)
    generation = ask(engine, find_generation, "docs")
    put = submit(engine, [Item("k0", b"newer")], collection="docs")
    complete(engine, claim_next(engine))
    job_id = uuid4()
    new_job = NewJob(SPEC, collection="docs", id=job_id, seq=seq, generation_id=generation.id)
    job = write(engine, new_job, [Item("k0", b"as the source had it"), Item("k1", b"one")])
    assert (job.id, job.seq, job.collection) == (job_id, seq, "docs")
    assert seq < put.seq
    complete(engine, claim_next(engine))
    rows = execute(engine, "SELECT key, job_seq FROM docs ORDER BY key").all()
    assert [tuple(row) for row in rows] == [("k0", put.seq), ("k1", seq)]


def test_an_upload_that_broke_gives_its_place_in_the_order_of_writers_back(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    seq = ask(engine, draw_seq)
    generation = ask(engine, find_generation, "docs")
    new_job = NewJob(SPEC, collection="docs", id=uuid4(), seq=seq, generation_id=generation.id)
    broken = JobWriter(engine, new_job, Settings(chunk_max_items=1))
    with broken:
        for item in make_items(9):
            broken.add(item)
    again = write(engine, replace(new_job, id=uuid4()), make_items(2))
    assert again.seq == seq
    with engine.begin() as connection:
        discard_upload(connection, again.id)  # it is a job now, which stays
        assert find_job(connection, again.id).seq == seq


def test_a_job_of_a_generation_that_is_not_there_or_of_another_space_is_refused(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    generation = ask(engine, find_generation, "docs")
    with pytest.raises(Conflict, match="no longer exists"):
        write(engine, NewJob(SPEC, collection="docs", generation_id=4711), make_items(1))
    other = replace(SPEC, dimensions=16)
    with pytest.raises(SpecMismatch, match="dimensions is 8, not 16"):
        write(engine, NewJob(other, collection="docs", generation_id=generation.id), make_items(1))


def test_a_new_collection_is_written_in_its_one_generation(engine: Engine) -> None:
    submit(engine, make_items(1), collection="docs")
    (generation,) = ask(engine, list_written_generations, "docs")
    assert generation == ask(engine, find_generation, "docs")
    assert ask(engine, list_written_generations, "none") == []
