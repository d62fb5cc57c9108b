"""Tests that exactly the chunks which a worker committed since its last good proof are encoded again, in place."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import Engine, text

from scheduler.reaper import Recomputer
from tests.api_server import api_client
from tests.building import build
from tests.database import ask, execute, load_payload
from tests.obedient_engine import ObedientEngine, encoding_chunks, run_to_end
from tests.protocol import (
    SPEC,
    check_open_job_counts,
    complete,
    make_items,
    register_worker,
    submit,
    vector_of,
)
from tests.protocol import claim_next as claim_next_chunk
from vectormill.client import Client
from vectormill.db.session import walk_plan
from vectormill.jobs.certificates import write_certificate_lines
from vectormill.jobs.chunks import split_chunk
from vectormill.jobs.completion import cancel_chunk, fail_chunk
from vectormill.jobs.deletion import discard_job
from vectormill.jobs.export import read_results
from vectormill.jobs.item import (
    CRASHED_WORKER,
    EMPTY_TEXT,
    ENCODING_FAILED,
    ITEM_ERROR_CODES,
    MODEL_FAULTS,
    Item,
    ItemFailure,
)
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import cancel_job, find_job, list_item_errors, pause_job, resume_job, retry_job
from vectormill.jobs.operations import InputBody
from vectormill.jobs.recomputation import LIST_SUSPECT, list_computed_chunks, list_suspect_chunks
from vectormill.jobs.submission import JobWriter
from vectormill.objects.reading import add_objects
from vectormill.settings import Settings
from vectormill.workers.proofs import (
    begin_period,
    count_failed_periods,
    fail_period,
    prove_period,
    prune_periods,
)
from worker.engine.request import EngineStopped

REASON = "its vector has changed to a cosine of 0.93000"
FIND_CHUNKS = text("""
    SELECT state, proof_id, only_items, error FROM vectormill.chunks WHERE job_id = :job_id ORDER BY first_item
""")


@pytest.fixture
def periods(engine: Engine) -> list[int]:
    """Three periods of a worker that is gone; the first is proven, the second fails, and the third is another's."""
    incarnation = uuid4()
    found = [
        ask(engine, begin_period, "w", owner, SPEC.model, {}) for owner in (incarnation, incarnation, uuid4())
    ]
    ask(engine, prove_period, found[0])
    return found


def encode(engine: Engine, job: Job, periods: Sequence[int | None]) -> Job:
    """Encode the chunks of the job, each in the period of its place."""
    current = iter(periods)
    with encoding_chunks(engine, read_period=lambda: next(current)) as encoder:
        return run_to_end(engine, encoder, job)[0]


def fail_and_mend(engine: Engine, period: int) -> None:
    ask(engine, fail_period, period, REASON)
    Recomputer(engine).recompute()


def damage(engine: Engine, table: str, where: str = "true") -> None:
    """Write other vectors into a table of results, as a faulty process would have."""
    wrong = "[" + ",".join(["0.5"] * SPEC.dimensions) + "]"
    execute(engine, f"UPDATE vectormill.{table} SET embedding = '{wrong}' WHERE {where}")


def test_exactly_the_chunks_of_the_failed_period_are_encoded_again_and_their_job_ends_again(
    engine: Engine, periods: list[int]
) -> None:
    proven, failed, other = periods
    job = encode(engine, submit(engine, make_items(16)), [proven, failed, other, failed])
    fail_and_mend(engine, failed)
    chunks = execute(engine, FIND_CHUNKS, job_id=job.id).all()
    assert [(chunk.state, chunk.proof_id) for chunk in chunks] == [
        ("done", proven),
        ("pending", None),
        ("done", other),
        ("pending", None),
    ]
    assert REASON in chunks[1].error
    opened = ask(engine, find_job, job.id)
    assert (opened.state, opened.num_done, opened.num_open_chunks) == ("queued", 8, 2)
    check_open_job_counts(engine)
    ended = encode(engine, job, [other, other])
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed", 16, 0)
    blocks = list(read_results(engine, job.id))
    vectors = np.concatenate([block.results for block in blocks])
    assert np.allclose(vectors, [vector_of(item.text) for item in make_items(16)])
    Recomputer(engine).recompute()
    assert ask(engine, find_job, job.id).state == "completed", "the period was repaired once"
    check_open_job_counts(engine)


def test_a_newer_write_to_one_of_the_keys_stays_and_the_others_are_replaced(
    engine: Engine, periods: list[int]
) -> None:
    failed = periods[1]
    job = encode(engine, submit(engine, make_items(4), collection="docs"), [failed])
    table = execute(engine, "SELECT 'generation_' || max(id) FROM vectormill.generations").scalar()
    damage(engine, str(table))
    newer = encode(engine, submit(engine, [Item("k1", b"newer")], collection="docs"), [periods[2]])
    fail_and_mend(engine, failed)
    assert ask(engine, find_job, newer.id).state == "completed"
    assert encode(engine, job, [periods[2]]).state == "completed"
    rows = execute(engine, "SELECT key, job_seq, embedding::real[] AS vector FROM docs ORDER BY key").all()
    assert [(row.key, row.job_seq) for row in rows] == [
        ("k0", job.seq),
        ("k1", newer.seq),
        ("k2", job.seq),
        ("k3", job.seq),
    ]
    texts = [b"text k 0", b"newer", b"text k 2", b"text k 3"]
    for row, given in zip(rows, texts, strict=True):
        assert np.allclose(row.vector, vector_of(given), atol=1e-3), row.key


def test_a_worker_that_may_still_commit_is_waited_for(engine: Engine) -> None:
    incarnation = uuid4()
    register_worker(engine, incarnation=incarnation)
    failed = ask(engine, begin_period, "w", incarnation, SPEC.model, {})
    job = encode(engine, submit(engine, make_items(4)), [failed])
    fail_and_mend(engine, failed)
    assert ask(engine, find_job, job.id).state == "completed"
    execute(engine, "DELETE FROM vectormill.workers WHERE name = 'w'")
    Recomputer(engine).recompute()
    assert ask(engine, find_job, job.id).state == "queued"


def list_failed(engine: Engine, job: Job) -> list[tuple[int, str]]:
    errors = ask(engine, list_item_errors, job.id, after=None, limit=100)
    return [(error.item, error.code) for error in errors]


@pytest.mark.parametrize("collection", [None, "docs"])
def test_an_item_that_a_faulty_process_failed_is_encoded_again_and_its_error_is_not_that_of_its_text(
    engine: Engine, periods: list[int], collection: str | None
) -> None:
    """One chunk for each code: an item failed with it, another one for its own fault, and two are done."""
    job = submit(engine, make_items(4 * len(ITEM_ERROR_CODES)), collection=collection)
    for code in ITEM_ERROR_CODES:
        failures = {1: ItemFailure(code, "by the process"), 2: ItemFailure(EMPTY_TEXT, "by itself")}
        complete(engine, claim_next_chunk(engine), failures, proof_id=periods[1], is_faulty=True)
    fail_and_mend(engine, periods[1])
    kept = [
        (4 * number + place, failed)
        for number, code in enumerate(ITEM_ERROR_CODES)
        for place, failed in ((1, code), (2, EMPTY_TEXT))
        if failed not in MODEL_FAULTS
    ]
    assert list_failed(engine, job) == kept
    opened = ask(engine, find_job, job.id)
    assert (opened.num_done, opened.num_failed) == (0, len(kept))
    check_open_job_counts(engine)
    again = dict.fromkeys([1], ItemFailure(ENCODING_FAILED, "again"))
    first = next(number for number, code in enumerate(ITEM_ERROR_CODES) if code in MODEL_FAULTS)
    for number in range(len(ITEM_ERROR_CODES)):
        complete(engine, claim_next_chunk(engine), again if number == first else None, proof_id=periods[2])
    kept.append((4 * first + 1, ENCODING_FAILED))
    assert list_failed(engine, job) == sorted(kept)
    ended = ask(engine, find_job, job.id)
    assert (ended.state, ended.num_failed) == ("completed_with_errors", len(kept))
    blocks = list(read_results(engine, job.id))
    present = np.concatenate([block.present for block in blocks])
    assert np.flatnonzero(~present).tolist() == [item for item, _ in sorted(kept)]
    vectors = np.concatenate([block.results for block in blocks])[present]
    texts = [item.text for item, has in zip(make_items(job.num_items), present, strict=True) if has]
    assert np.allclose(vectors, [vector_of(each) for each in texts], atol=1e-3)


@pytest.mark.parametrize("is_retried", [False, True])
@pytest.mark.parametrize("ends", ["committed", "given up"])
@pytest.mark.parametrize("collection", [None, "docs"])
def test_a_chunk_of_which_a_faulty_process_failed_every_item_is_encoded_again(
    engine: Engine, periods: list[int], collection: str | None, ends: str, is_retried: bool
) -> None:
    job = submit(engine, make_items(4), collection=collection)
    claimed = claim_next_chunk(engine)
    failure = ItemFailure(CRASHED_WORKER, "")
    if ends == "committed":
        complete(engine, claimed, dict.fromkeys(range(4), failure), proof_id=periods[1])
    else:
        ask(engine, fail_chunk, claimed, make_items(4), failure, periods[1])
    assert ask(engine, find_job, job.id).state == "failed"
    if is_retried:
        ask(engine, retry_job, job.id)
    fail_and_mend(engine, periods[1])
    opened = ask(engine, find_job, job.id)
    assert (opened.state, opened.num_failed, opened.num_open_chunks) == ("queued", 0, 1)
    ended = encode(engine, job, [periods[2]])
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed", 4, 0)
    certified = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert [line["suspect"] for line in certified if line["kind"] == "chunk"] == [False]


def test_a_worker_names_the_period_in_which_it_gives_a_chunk_up_and_gives_none_up_after_a_bad_proof(
    engine: Engine, periods: list[int]
) -> None:
    def fail(request: object) -> None:
        raise ValueError("this process makes no sense of its own results, as this test wants it")

    proofs: list[EngineStopped | int] = [EngineStopped("a bad proof"), periods[1]]

    def read_period() -> int:
        found = proofs.pop(0)
        if isinstance(found, EngineStopped):
            raise found
        return found

    job = submit(engine, make_items(1))
    with encoding_chunks(engine, ObedientEngine(fail), read_period=read_period) as encoder:
        ended, outcomes = run_to_end(engine, encoder, job)
    assert ended.state == "failed"
    assert outcomes[-2:] == ["handed back", "item failed"]
    fail_and_mend(engine, periods[1])
    assert encode(engine, job, [periods[2]]).state == "completed"


@pytest.mark.parametrize("waits", ["blamed", "retried before", "retried later"])
def test_a_build_takes_a_faulty_chunk_with_an_item_that_was_never_done(
    engine: Engine, periods: list[int], waits: str
) -> None:
    job = submit(engine, make_items(2), collection="docs")
    failure = ItemFailure(ENCODING_FAILED if waits == "blamed" else EMPTY_TEXT, "")
    complete(engine, claim_next_chunk(engine), {1: failure}, proof_id=periods[1], is_faulty=True)
    if waits == "retried before":
        ask(engine, retry_job, job.id)
    fail_and_mend(engine, periods[1])
    if waits == "retried later":
        ask(engine, pause_job, job.id)
        ask(engine, retry_job, job.id)
    building = build(engine)
    twins = execute(engine, "SELECT num_items FROM vectormill.jobs WHERE generation_id = :id", id=building.id)
    assert twins.scalars().all() == [2]


def test_items_that_failed_stay_failed_and_are_not_counted_twice(engine: Engine, periods: list[int]) -> None:
    job = submit(engine, make_items(4))
    claim = claim_next_chunk(engine)
    complete(engine, claim, {1: ItemFailure(EMPTY_TEXT, "")})
    execute(engine, "UPDATE vectormill.chunks SET proof_id = :id", id=periods[1])
    fail_and_mend(engine, periods[1])
    chunk = execute(engine, FIND_CHUNKS, job_id=job.id).one()
    assert chunk.only_items == [0, 2, 3]
    ended = encode(engine, job, [periods[2]])
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed_with_errors", 3, 1)


def begin_again(engine: Engine, period: int, collection: str | None = None) -> Job:
    """Return a job of two chunks, of which the period computed four items, but not the first one, which failed."""
    job = submit(engine, make_items(5), collection=collection)
    complete(engine, claim_next_chunk(engine), {0: ItemFailure(EMPTY_TEXT, "")})
    execute(engine, "UPDATE vectormill.chunks SET proof_id = :id WHERE state = 'done'", id=period)
    return job


def test_a_paused_job_whose_chunk_was_mended_is_retried_with_both_what_failed_and_what_is_faulty(
    engine: Engine, periods: list[int]
) -> None:
    job = begin_again(engine, periods[1])
    fail_and_mend(engine, periods[1])
    ask(engine, pause_job, job.id)
    retried = ask(engine, retry_job, job.id)
    assert (retried.num_done, retried.num_failed, retried.num_open_chunks) == (0, 0, 2)
    assert execute(engine, FIND_CHUNKS, job_id=job.id).all()[0].only_items == [0, 1, 2, 3]
    ask(engine, resume_job, job.id)
    ended = encode(engine, job, [periods[2]] * 2)
    assert (ended.state, ended.num_done, ended.num_open_chunks) == ("completed", 5, 0)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_chunk_keeps_every_period_that_computed_one_of_its_vectors(
    engine: Engine, periods: list[int], is_open: bool
) -> None:
    proven, failed, other = periods
    job = begin_again(engine, failed)
    encode(engine, job, [other])
    ask(engine, retry_job, job.id)
    if not is_open:
        encode(engine, job, [proven])
        lines = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
        assert [line["id"] for line in lines if line["kind"] == "proof"] == [proven, failed, other]
        assert next(line for line in lines if line["kind"] == "chunk")["earlier_proofs"] == [failed]
    fail_and_mend(engine, failed)
    first, _ = execute(engine, FIND_CHUNKS, job_id=job.id).all()
    assert (first.state, first.only_items) == ("pending", [0, 1, 2, 3])
    opened = ask(engine, find_job, job.id)
    assert (opened.num_done, opened.num_failed, opened.num_open_chunks) == (1, 0, 1)
    ended = encode(engine, job, [other])
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed", 5, 0)
    certified = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert {line["proof"] for line in certified if line["kind"] == "chunk"} == {other}
    assert certified[-1]["num_suspect_chunks"] == 0


def test_a_chunk_that_is_split_keeps_its_periods(engine: Engine, periods: list[int]) -> None:
    job = submit(engine, make_items(4))
    failures = dict.fromkeys(range(2), ItemFailure(EMPTY_TEXT, ""))
    complete(engine, claim_next_chunk(engine), failures)
    execute(engine, "UPDATE vectormill.chunks SET proof_id = :id", id=periods[1])
    ask(engine, retry_job, job.id)
    ask(engine, split_chunk, claim_next_chunk(engine), "lost twice")
    fail_and_mend(engine, periods[1])
    wanted = [
        chunk.only_items for chunk in execute(engine, FIND_CHUNKS, job_id=job.id) if chunk.state == "pending"
    ]
    assert wanted == [[0, 1], [0, 1]]
    ended = encode(engine, job, [periods[2]] * 2)
    assert (ended.state, ended.num_done, ended.num_chunks) == ("completed", 4, 3)
    certified = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert {line.get("proof") for line in certified if line["kind"] == "chunk"} == {periods[2]}


@pytest.mark.parametrize("holder", [None, "a worker"])
def test_a_chunk_whose_job_is_cancelled_before_it_is_encoded_again_is_suspect(
    engine: Engine, periods: list[int], holder: str | None
) -> None:
    job = begin_again(engine, periods[1], "docs")
    complete(engine, claim_next_chunk(engine))
    fail_and_mend(engine, periods[1])
    claimed = claim_next_chunk(engine) if holder else None
    ask(engine, cancel_job, job.id)
    if claimed is not None:
        ask(engine, cancel_chunk, claimed)
    assert [chunk.num_items for chunk in ask(engine, list_suspect_chunks, after=None, limit=9)] == [4]
    lines = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert [line["suspect"] for line in lines if line["kind"] == "chunk"] == [True, False]


def test_the_halves_of_a_suspect_chunk_are_suspect(engine: Engine, periods: list[int]) -> None:
    job = begin_again(engine, periods[1])
    complete(engine, claim_next_chunk(engine))
    execute(engine, "UPDATE vectormill.chunks SET is_suspect = true WHERE first_item = 0")
    ask(engine, retry_job, job.id)
    ask(engine, split_chunk, claim_next_chunk(engine), "lost twice")
    assert len(ask(engine, list_suspect_chunks, after=None, limit=9)) == 2


def test_a_row_of_which_a_run_has_changed_the_metadata_alone_gets_its_vector_again(
    engine: Engine, periods: list[int]
) -> None:
    job = encode(engine, submit(engine, [Item("k", b"same", b'{"page":1}')], collection="docs"), [periods[1]])
    table = execute(engine, "SELECT 'generation_' || max(id) FROM vectormill.generations").scalar_one()
    damage(engine, table)
    execute(engine, f"UPDATE vectormill.{table}_attributes SET job_seq = job_seq + 1, metadata = NULL")
    fail_and_mend(engine, periods[1])
    encode(engine, job, [periods[2]])
    (row,) = execute(engine, "SELECT embedding::real[] AS vector, metadata FROM docs").all()
    assert np.allclose(row.vector, vector_of(b"same"), atol=1e-3)
    assert not row.metadata


def test_a_chunk_that_a_worker_gives_up_leaves_no_faulty_row(engine: Engine, periods: list[int]) -> None:
    job = encode(engine, submit(engine, make_items(1), collection="docs"), [periods[1]])
    fail_and_mend(engine, periods[1])

    def fail(request: object) -> None:
        raise ValueError("this text cannot be encoded, as this test wants it")

    with encoding_chunks(engine, ObedientEngine(fail)) as encoder:
        ended, _ = run_to_end(engine, encoder, job)
    assert (ended.num_done, ended.num_failed) == (0, 1)
    assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 0


def test_a_chunk_that_was_given_up_twice_is_certified_when_its_object_is_gone(
    engine: Engine, periods: list[int], tmp_path: Path
) -> None:
    path, settings = tmp_path / "in.jsonl", Settings(source_root=str(tmp_path))
    path.write_text('{"id": "a", "text": "one"}\n')
    with JobWriter(engine, NewJob(SPEC), settings) as writer:
        add_objects(writer, InputBody([path.as_uri()], key="id"), SPEC, settings)
        job = writer.finish()
    failure = ItemFailure(ENCODING_FAILED, ITEM_ERROR_CODES[ENCODING_FAILED])
    ask(engine, fail_chunk, claim_next_chunk(engine), [Item("a", b"")], failure, periods[1])
    fail_and_mend(engine, periods[1])
    ask(engine, fail_chunk, claim_next_chunk(engine), [Item("a", b"")], failure, periods[2])
    path.unlink()
    lines = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert [line["num_results"] for line in lines if line["kind"] == "chunk"] == [0]


@pytest.mark.parametrize("held", ["jobs", "chunks"])
def test_the_mender_waits_for_nobody_and_looks_again(engine: Engine, periods: list[int], held: str) -> None:
    job = encode(engine, submit(engine, make_items(4)), [periods[1]])
    recomputer = Recomputer(engine)
    with engine.begin() as holding:
        holding.execute(text("SET LOCAL statement_timeout = '30s'"))
        holding.execute(text(f"SELECT FROM vectormill.{held} FOR NO KEY UPDATE"))
        ask(engine, fail_period, periods[1], REASON)
        recomputer.recompute()
        assert ask(engine, find_job, job.id).state == "completed"
    recomputer.recompute()
    assert ask(engine, find_job, job.id).state == "queued"


def test_a_job_that_is_being_deleted_is_not_mended(engine: Engine, periods: list[int]) -> None:
    job = encode(engine, submit(engine, make_items(4)), [periods[1]])
    ask(engine, discard_job, job.id)
    fail_and_mend(engine, periods[1])
    assert execute(engine, FIND_CHUNKS, job_id=job.id).one().state == "done"
    assert execute(engine, "SELECT count(repaired_at) FROM vectormill.proofs").scalar_one() == 1


def test_a_build_takes_no_faulty_chunk_for_one_that_was_never_done(
    engine: Engine, periods: list[int]
) -> None:
    encode(engine, submit(engine, [Item("k", b"old")], collection="docs"), [periods[1]])
    encode(engine, submit(engine, [Item("k", b"new")], collection="docs"), [periods[0]])
    fail_and_mend(engine, periods[1])
    building = build(engine)
    twins = execute(engine, "SELECT count(*) FROM vectormill.jobs WHERE generation_id = :id", id=building.id)
    assert twins.scalar_one() == 0


def test_a_chunk_without_any_vector_is_not_suspect(engine: Engine, periods: list[int]) -> None:
    job = submit(engine, make_items(2))
    complete(engine, claim_next_chunk(engine), dict.fromkeys(range(2), ItemFailure(EMPTY_TEXT, "")))
    execute(engine, "UPDATE vectormill.chunks SET proof_id = :id", id=periods[1])
    fail_and_mend(engine, periods[1])
    certified = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert certified[-1]["num_suspect_chunks"] == 0


def test_the_halves_of_a_chunk_that_is_split_while_it_is_looked_for_are_mended(
    engine: Engine, periods: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = begin_again(engine, periods[1])
    complete(engine, claim_next_chunk(engine))
    ask(engine, retry_job, job.id)
    claimed = claim_next_chunk(engine)
    answers = []

    def list_before_others(*given: Any) -> tuple[int | None, Sequence[int]]:
        """Return the first page as if other jobs had submitted chunks meanwhile, and split the chunk then."""
        last, found = list_computed_chunks(*given)
        answers.append(found)
        if len(answers) > 1:
            return last, found
        ask(engine, split_chunk, claimed, "lost twice")
        return 10**9, found

    monkeypatch.setattr("scheduler.reaper.list_computed_chunks", list_before_others)
    fail_and_mend(engine, periods[1])
    assert answers[0] == [claimed.chunk_id]
    ended = encode(engine, job, [periods[2]] * 2)
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed", 5, 0)
    certified = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert certified[-1]["num_suspect_chunks"] == 0
    assert [line["failed_at"] for line in certified if line["kind"] == "proof"] == [None]


@pytest.mark.parametrize("ends", ["some fail", "all fail"])
@pytest.mark.parametrize("collection", [None, "docs"])
def test_a_text_that_fails_when_it_is_encoded_again_leaves_no_faulty_vector(
    engine: Engine, periods: list[int], collection: str | None, ends: str
) -> None:
    job = begin_again(engine, periods[1], collection)
    fail_and_mend(engine, periods[1])
    claimed = claim_next_chunk(engine)
    failure = ItemFailure(EMPTY_TEXT, "")
    if ends == "some fail":
        complete(engine, claimed, {1: failure, 2: failure})
    else:
        items = ask(engine, load_payload, claimed.chunk_id)
        ask(engine, fail_chunk, claimed, items, failure, None)
    complete(engine, claim_next_chunk(engine))
    left = {"some fail": ["k3", "k4"], "all fail": ["k4"]}[ends]
    blocks = list(read_results(engine, job.id))
    found = [key for block in blocks for key, has in zip(block.keys, block.present, strict=True) if has]
    assert found == left
    if collection:
        assert execute(engine, "SELECT key FROM docs ORDER BY key").scalars().all() == left


@pytest.mark.parametrize("obstacle", ["texts", "cancelled"])
def test_chunks_that_cannot_be_encoded_again_are_suspect_and_listed(
    obstacle: str, engine: Engine, periods: list[int]
) -> None:
    failed = periods[1]
    job = submit(engine, make_items(8))
    if obstacle == "texts":
        encode(engine, job, [periods[0], failed])
        execute(
            engine,
            "DELETE FROM vectormill.chunk_payloads WHERE chunk_id = (SELECT max(id) FROM vectormill.chunks)",
        )
    else:
        complete(engine, claim_next_chunk(engine))
        execute(engine, "UPDATE vectormill.chunks SET proof_id = :id WHERE state = 'done'", id=failed)
        ask(engine, cancel_job, job.id)
    before = ask(engine, find_job, job.id)
    fail_and_mend(engine, failed)
    assert ask(engine, find_job, job.id).state == before.state
    assert ask(engine, count_failed_periods) == 1
    (suspect,) = ask(engine, list_suspect_chunks, after=None, limit=10)
    assert (suspect.job_id, suspect.num_items, suspect.worker, suspect.reason) == (job.id, 4, "w", REASON)
    assert suspect.first_item == (4 if obstacle == "texts" else 0)
    if obstacle == "cancelled":
        lines = [line for line in write_certificate_lines(engine, job.id) if b'"suspect": true' in line]
        assert len(lines) == 1


def test_suspects_of_all_jobs_are_listed_page_by_page_without_reading_other_chunks(engine: Engine) -> None:
    jobs = [submit(engine, make_items(4), collection=name) for name in (None, "docs")]
    with engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO vectormill.chunks (job_id, seq, state, first_item, num_items, estimated_tokens, is_suspect)
                SELECT :job_id, number, 'done', number, 1, 1, nullif(number % 7000 = 0, false)
                  FROM generate_series(1, 20000) AS number
            """),
            {"job_id": jobs[0].id},
        )
        connection.execute(
            text("UPDATE vectormill.chunks SET is_suspect = true WHERE job_id = :id"), {"id": jobs[1].id}
        )
        connection.execute(text("ANALYZE vectormill.chunks"))
        values = {"after": 0, "limit": 51}
        (plan,) = connection.execute(text(f"EXPLAIN (FORMAT JSON) {LIST_SUSPECT.text}"), values).scalar_one()
    nodes = [node for node in walk_plan(plan["Plan"]) if node.get("Relation Name") == "chunks"]
    assert [node["Index Name"] for node in nodes] == ["ix_chunks_suspect"]
    with api_client(engine) as api, Client(str(api.base_url)) as client:
        (first,) = api.get("/v1/suspect-chunks", params={"limit": 1}).json()["data"]
        listed = list(client.suspects())
    assert [(each["job_id"], each["collection"]) for each in listed] == [
        (str(jobs[1].id), "docs"),
        *[(str(jobs[0].id), None)] * 2,
    ]
    assert listed[0] == first
    assert [each["first_item"] for each in listed] == [0, 7000, 14000]


def test_a_suspect_chunk_stays_suspect_when_its_failed_items_are_retried(
    engine: Engine, periods: list[int]
) -> None:
    job = submit(engine, make_items(4))
    complete(engine, claim_next_chunk(engine), {1: ItemFailure(EMPTY_TEXT, "")})
    execute(engine, "UPDATE vectormill.chunks SET is_suspect = true")
    ask(engine, retry_job, job.id)
    encode(engine, job, [periods[2]])
    lines = [json.loads(line) for line in write_certificate_lines(engine, job.id)]
    assert [line["suspect"] for line in lines if line["kind"] == "chunk"] == [True]


def test_periods_go_after_the_retention_but_those_of_running_workers_and_those_to_be_repaired(
    engine: Engine, periods: list[int]
) -> None:
    proven, failed, unended = periods
    running = uuid4()
    register_worker(engine, incarnation=running)
    with engine.begin() as connection:
        current = begin_period(connection, "w", running, SPEC.model, {})
        fail_period(connection, failed, REASON)
        assert prune_periods(connection, 3600) == 0
        assert prune_periods(connection, -1) == 2
        left = connection.execute(text("SELECT id FROM vectormill.proofs ORDER BY id")).scalars().all()
    assert left == [failed, current], "the proven one and that of a worker that is gone"
    Recomputer(engine).recompute()
    assert ask(engine, prune_periods, -1) == 1
    assert proven < failed < unended < current


def test_a_chunk_that_was_retried_meanwhile_is_left_to_the_retry(engine: Engine, periods: list[int]) -> None:
    job = submit(engine, make_items(4))
    complete(engine, claim_next_chunk(engine), dict.fromkeys(range(4), ItemFailure(EMPTY_TEXT, "")))
    execute(engine, "UPDATE vectormill.chunks SET proof_id = :id", id=periods[1])
    ask(engine, retry_job, job.id)
    fail_and_mend(engine, periods[1])
    opened = ask(engine, find_job, job.id)
    assert (opened.state, opened.num_done, opened.num_open_chunks) == ("queued", 0, 1)
