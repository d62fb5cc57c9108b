"""A chunk from message to commit, on a real Postgres, with an engine that misbehaves on marked texts."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.obedient_engine import ObedientEngine, encoding_chunks, run_to_end
from tests.protocol import LONG, dispatch_all, make_items, submit, vector_of
from vectormill.domain.errors import ModelError
from vectormill.jobs.chunks import list_truncated_items
from vectormill.jobs.export import read_results
from vectormill.jobs.item import CRASHED_WORKER, EMPTY_TEXT, ENCODING_FAILED, Item, ItemFailure
from vectormill.jobs.jobs import cancel_job, find_job, list_item_errors, retry_job
from vectormill.workers.workers import list_workers
from worker.chunk.chunk_encoder import ChunkEncoder
from worker.chunk.counts import ChunkCounts
from worker.engine.request import EncodeRequest, EncodeResult, EncodingCancelled, EngineStopped, RunnerDied


class MarkedEngine(ObedientEngine):
    """Ends a whole request as a mark in one of its texts says, `b"crash"`, `b"raise"`, …; blank texts fail alone."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.during = threading.Event()
        self.dies_of_blanks = False

    def encode(self, request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        self.num_requests += 1
        self.run_seconds += 0.1
        whole = b" ".join(request.texts)
        blanks = [place for place, given in enumerate(request.texts) if not given.strip()]
        if b"crash" in whole or (self.dies_of_blanks and blanks):
            raise RunnerDied("the model process died")
        for mark, error in MARKS.items():
            if mark in whole:
                raise error
        if b"wait" in whole:
            self.during.set()
            assert cancelled.wait(80), "nobody told that the chunk is to end"
            raise EncodingCancelled
        return replace(
            super().encode(request, cancelled),
            failures={place: ItemFailure(EMPTY_TEXT, "") for place in blanks},
            truncated=np.array([given.startswith(LONG) for given in request.texts], dtype=np.bool_),
            num_reused=2,
            num_passages=5,
        )


MARKS = {
    b"raise": ValueError("no good"),
    b"look up": KeyError("no good"),
    b"stop": EngineStopped(),
    b"other model": ModelError("another revision"),
}


@pytest.fixture
def fake() -> MarkedEngine:
    return MarkedEngine()


@pytest.fixture
def counts() -> ChunkCounts:
    return ChunkCounts()


@pytest.fixture
def encoder(engine: Engine, fake: MarkedEngine, counts: ChunkCounts) -> Iterator[ChunkEncoder]:
    with encoding_chunks(engine, fake, counts=counts, max_attempts=2) as encoder:
        yield encoder
    assert ask(engine, list_workers) == []


def test_a_chunk_is_encoded_and_committed_and_says_what_it_did(engine: Engine, encoder: ChunkEncoder) -> None:
    job = submit(engine, [*make_items(3), Item("empty", b" ")], collection="docs")
    (dispatch,) = dispatch_all(engine)
    result = encoder.encode_chunk(dispatch.chunk_id)
    assert (result["outcome"], result["rows"], result["failed"], result["tokens"]) == ("done", 3, 1, 12)
    assert encoder.encode_chunk(dispatch.chunk_id) == {"outcome": "duplicate"}
    ended = ask(engine, find_job, job.id)
    assert ended.state == "completed_with_errors"
    assert set(ended.stage_seconds) == {"load", "run", "persist", "held", "device"}
    assert ended.stage_seconds["device"] == pytest.approx(0.1)
    assert ended.stage_seconds["persist"] > 0


def test_the_items_that_were_cut_are_known_by_key_and_passages_are_counted(
    engine: Engine, encoder: ChunkEncoder
) -> None:
    items = [Item("a", b"short"), Item("b", LONG + b"b"), Item("c", b" "), Item("d", LONG + b"d")]
    job = submit(engine, items)
    (dispatch,) = dispatch_all(engine)
    encoder.encode_chunk(dispatch.chunk_id)
    ended = ask(engine, find_job, job.id)
    page = ask(engine, list_truncated_items, job.id, after=None, limit=10)
    assert (ended.num_truncated, ended.num_passages, ended.num_reused) == (2, 5, 2)
    assert [(item.item, item.key) for item in page.items] == [(1, "b"), (3, "d")]


@pytest.mark.parametrize(
    ("mark", "code"),
    [
        (b"crash", CRASHED_WORKER),
        (b"raise", ENCODING_FAILED),
        (b"look up", ENCODING_FAILED),  # a LookupError, but not the chunk's texts that are gone
    ],
)
def test_a_text_that_ruins_its_chunk_is_found_by_halving_and_fails_alone(
    engine: Engine, encoder: ChunkEncoder, mark: bytes, code: str
) -> None:
    items = make_items(8)
    items[5] = replace(items[5], text=mark)
    job, outcomes = run_to_end(engine, encoder, submit(engine, items, chunk_max_items=8))
    assert (job.state, job.num_done, job.num_failed) == ("completed_with_errors", 7, 1)
    (error,) = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert (error.key, error.code) == ("k5", code)
    assert outcomes.count("split") == 3  # 8, 4, 2: the item to blame is alone after three halvings
    blocks = list(read_results(engine, job.id))
    present = np.concatenate([block.present for block in blocks])
    vectors = np.concatenate([block.results for block in blocks])[present]
    np.testing.assert_array_equal(vectors, [vector_of(item.text) for item in items if item.text != mark])


def test_the_half_of_a_retried_chunk_in_which_nothing_failed_is_not_encoded_again(
    engine: Engine, encoder: ChunkEncoder, fake: MarkedEngine
) -> None:
    items = make_items(8)
    items[0], items[1] = replace(items[0], text=b" "), replace(items[1], text=b"  ")
    job, _ = run_to_end(engine, encoder, submit(engine, items, chunk_max_items=8))
    assert (job.num_done, job.num_failed) == (6, 2)
    fake.dies_of_blanks = True
    ask(engine, retry_job, job.id)
    job, outcomes = run_to_end(engine, encoder, job)
    assert "split" in outcomes
    assert (job.state, job.num_done, job.num_failed) == ("completed_with_errors", 6, 2)


@pytest.mark.parametrize(("mark", "outcome"), [(b"stop", "handed back"), (b"other model", "other model")])
def test_a_worker_that_cannot_take_a_chunk_hands_it_back_uncounted(
    engine: Engine, encoder: ChunkEncoder, mark: bytes, outcome: str
) -> None:
    job = submit(engine, [Item("k", mark)])
    (dispatch,) = dispatch_all(engine)
    assert encoder.encode_chunk(dispatch.chunk_id)["outcome"] == outcome
    with engine.connect() as connection:
        row = connection.execute(text("SELECT state, attempt, lost FROM vectormill.chunks")).one()
        assert tuple(row) == ("pending", 0, 0)
        assert find_job(connection, job.id).num_retried_chunks == 0


def test_a_cancelled_job_ends_the_chunk_that_is_being_encoded(
    engine: Engine, encoder: ChunkEncoder, fake: MarkedEngine
) -> None:
    job = submit(engine, [Item("k", b"wait")])
    (dispatch,) = dispatch_all(engine)
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(encoder.encode_chunk(dispatch.chunk_id)))
    thread.start()
    assert fake.during.wait(60)
    ask(engine, cancel_job, job.id)
    thread.join(timeout=80)
    assert results == [{"outcome": "cancelled"}]
    assert ask(engine, find_job, job.id).state == "cancelled"


def test_the_ledger_tells_ends_dispatches_and_their_times(
    engine: Engine, encoder: ChunkEncoder, counts: ChunkCounts
) -> None:
    submit(engine, [Item("k", b"stop")])
    (first,) = dispatch_all(engine)
    encoder.encode_chunk(first.chunk_id)
    encoder.encode_chunk(dispatch_all(engine)[0].chunk_id)
    submit(engine, make_items(2))
    (other,) = [dispatch for dispatch in dispatch_all(engine) if dispatch.chunk_id != first.chunk_id]
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.chunks SET queued_at = now() - interval '45 seconds' WHERE id = :id"),
            {"id": other.chunk_id},
        )
    for _ in range(2):
        encoder.encode_chunk(other.chunk_id)
    told = counts.totals()
    ends = {"handed back": 2, "done": 1, "duplicate": 1, "split": 0, "lease lost": 0}
    assert told["chunk_outcomes"] == ends
    assert (told["num_redispatched_chunks"], told["num_stale_completions"]) == (1, 0)
    waits = dict(zip(told["dispatch_seconds"]["bounds"], told["dispatch_seconds"]["counts"], strict=False))
    assert sum(told["dispatch_seconds"]["counts"]) == 3
    assert waits[60] + told["dispatch_seconds"]["counts"][-1] >= 1, "one of them waited for 45 s and more"
    assert told["dispatch_seconds"]["sum"] >= 45
    assert sum(told["claim_to_commit_seconds"]["counts"]) == 1
    assert told["claim_to_commit_seconds"]["sum"] > 0


def test_a_commit_that_the_fence_refuses_is_counted_as_stale(
    engine: Engine,
    encoder: ChunkEncoder,
    fake: MarkedEngine,
    counts: ChunkCounts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = fake.encode

    def lose_the_lease(request: EncodeRequest, cancelled: threading.Event) -> EncodeResult:
        execute(engine, "UPDATE vectormill.chunks SET fence = fence + 1, lease_owner = 'thief'")
        return encode(request, cancelled)

    monkeypatch.setattr(fake, "encode", lose_the_lease)
    submit(engine, make_items(2))
    (dispatch,) = dispatch_all(engine)
    assert encoder.encode_chunk(dispatch.chunk_id) == {"outcome": "lease lost"}
    assert counts.totals()["num_stale_completions"] == 1


def test_a_chunk_whose_lease_was_taken_is_given_up_and_writes_nothing(
    engine: Engine, encoder: ChunkEncoder, fake: MarkedEngine
) -> None:
    submit(engine, [Item("k", b"wait")], collection="docs")
    (dispatch,) = dispatch_all(engine)
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(encoder.encode_chunk(dispatch.chunk_id)))
    thread.start()
    assert fake.during.wait(60)
    execute(engine, "UPDATE vectormill.chunks SET fence = fence + 1, lease_owner = 'thief'")
    thread.join(timeout=80)
    assert results == [{"outcome": "lease lost"}]
    assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 0
    assert execute(engine, "SELECT lease_owner FROM vectormill.chunks").scalar_one() == "thief"


def test_a_commit_whose_answer_was_lost_is_read_again_and_not_repeated(
    engine: Engine, encoder: ChunkEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy.exc import OperationalError

    from vectormill.jobs.completion import complete_chunk
    from worker.chunk import commit as postgres

    calls = []

    def commit_and_lose_the_answer(connection: Any, *arguments: Any) -> bool:
        calls.append(1)
        ended = complete_chunk(connection, *arguments)
        connection.commit()
        if len(calls) == 1:
            raise OperationalError("COMMIT", None, Exception("server closed the connection"))
        return ended

    monkeypatch.setattr(postgres, "complete_chunk", commit_and_lose_the_answer)
    job = submit(engine, make_items(3))
    (dispatch,) = dispatch_all(engine)
    assert encoder.encode_chunk(dispatch.chunk_id)["outcome"] == "done"
    assert len(calls) == 1
    assert ask(engine, find_job, job.id).num_done == 3


def test_a_worker_refuses_to_write_into_a_generation_of_another_vector_space(
    engine: Engine, encoder: ChunkEncoder, fake: MarkedEngine
) -> None:
    job = submit(engine, make_items(2), collection="docs")
    execute(engine, "UPDATE vectormill.generations SET fingerprint = '0123456789abcdef'")
    ended, _ = run_to_end(engine, encoder, job)
    assert (ended.state, fake.num_requests) == ("failed", 0)
    (first, _) = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 0
    assert first.code == "not_stored"
    assert "contains vectors of space 0123456789abcdef, but the job's are of " in first.detail


def test_a_chunk_that_leaves_is_told_when_it_is_held_no_more(engine: Engine) -> None:
    submit(engine, make_items(8))
    held: list[int] = []
    with encoding_chunks(engine) as encoder:
        encoder._on_end = lambda: held.append(encoder._keeper.num_held_tokens)
        dispatches = dispatch_all(engine)
        for dispatch in [*dispatches, dispatches[0]]:  # the last message is a duplicate
            encoder.encode_chunk(dispatch.chunk_id)
    assert held == [0, 0]
