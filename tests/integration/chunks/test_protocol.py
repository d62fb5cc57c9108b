"""The chunk protocol on a real Postgres, step by step, without Celery."""

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, text

from scheduler.pruner import Pruner
from tests.database import ask, execute
from tests.kinds import MANY, RECORDS, SCORES
from tests.protocol import (
    SPEC,
    claim,
    claim_next,
    complete,
    dispatch_all,
    make_items,
    submit,
    vector_of,
)
from vectormill.collections import collections
from vectormill.collections.collection import Generation
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import (
    Conflict,
    DuplicateKey,
    EmptyJob,
    LeaseLost,
    WrongJobState,
)
from vectormill.jobs.chunks import claim_chunk, renew_leases
from vectormill.jobs.completion import cancel_chunk
from vectormill.jobs.export import read_results
from vectormill.jobs.item import EMPTY_TEXT, Item, ItemFailure
from vectormill.jobs.jobs import cancel_job, find_job, list_item_errors, list_jobs, lock_job, retry_job
from vectormill.jobs.transitions import (
    rescue_expired_chunks,
    rescue_unclaimed_chunks,
)


def run_to_end(engine: Engine) -> None:
    for dispatch in dispatch_all(engine):
        claimed = claim(engine, dispatch.chunk_id)
        assert claimed is not None
        complete(engine, claimed)


def job_of(engine: Engine, job_id: object):  # type: ignore[no-untyped-def]
    return ask(engine, find_job, job_id)  # type: ignore[arg-type]


def test_every_item_of_a_job_gets_its_own_vector_in_the_order_of_submission(engine: Engine) -> None:
    items = make_items(10)
    job = submit(engine, items)
    assert (job.state, job.num_items, job.num_chunks) == ("queued", 10, 3)
    run_to_end(engine)
    job = job_of(engine, job.id)
    assert (job.state, job.num_done, job.num_failed, job.num_open_chunks) == ("completed", 10, 0, 0)
    assert job.num_tokens == 100
    assert job.padding_waste == pytest.approx(1 - 100 / 120)
    assert job.stage_seconds == {"run": 1.5}
    assert job.num_reused == 3  # one a chunk
    blocks = list(read_results(engine, job.id))
    assert [key for block in blocks for key in block.keys] == [item.key for item in items]
    vectors = np.concatenate([block.results for block in blocks])
    np.testing.assert_array_equal(vectors, np.stack([vector_of(item.text) for item in items]))


def test_a_worker_that_lost_its_lease_writes_nothing(engine: Engine) -> None:
    submit(engine, make_items(4), collection="docs")
    zombie = claim_next(engine, "zombie", lease_seconds=-1)
    thief = claim(engine, zombie.chunk_id, "thief")
    assert thief is not None
    assert thief.fence == zombie.fence + 1
    assert (thief.lost, thief.lapsed, thief.attempt) == (0, 1, 1)
    assert ask(engine, lock_job, thief.job_id).num_retried_chunks == 1
    with pytest.raises(LeaseLost):
        complete(engine, zombie)
    assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 0
    assert complete(engine, thief) is True
    with pytest.raises(LeaseLost):
        complete(engine, thief)


def test_a_message_that_names_a_chunk_of_another_model_claims_nothing(engine: Engine) -> None:
    submit(engine, make_items(2))
    (dispatch,) = dispatch_all(engine)
    assert ask(engine, claim_chunk, dispatch.chunk_id, "forger", "another", 30) is None
    assert claim(engine, dispatch.chunk_id) is not None


def test_a_duplicate_message_claims_nothing(engine: Engine) -> None:
    submit(engine, make_items(4))
    first = claim_next(engine)
    assert claim(engine, first.chunk_id, "other") is None
    complete(engine, first)
    assert claim(engine, first.chunk_id, "other") is None


@pytest.mark.parametrize("spec", [SPEC, SCORES, RECORDS, MANY], ids=lambda spec: spec.result)
def test_an_older_job_never_overwrites_a_newer_one(engine: Engine, spec: EncodingSpec) -> None:
    old = submit(engine, [Item("k", b"old text")], collection="docs", spec=spec)
    new = submit(engine, [Item("k", b"new text")], collection="docs", spec=spec)
    by_job = {dispatch.job_id: dispatch.chunk_id for dispatch in dispatch_all(engine)}
    for job in (new, old):
        claimed = claim(engine, by_job[job.id])
        assert claimed is not None
        complete(engine, claimed)
    assert execute(engine, "SELECT job_seq FROM docs").scalar_one() == new.seq
    # Of the older text nothing is kept any more, so nothing is given.
    assert not next(read_results(engine, old.id)).present[0]
    assert next(read_results(engine, new.id)).present[0]


def test_one_bad_item_fails_alone_and_is_retried_alone(engine: Engine) -> None:
    for collection in (None, "docs"):
        job = submit(engine, make_items(6), collection=collection)
        first, second = (claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine))
        assert first is not None
        assert second is not None
        complete(engine, first, {2: ItemFailure(EMPTY_TEXT, "empty")})
        assert complete(engine, second) is True
        ended = job_of(engine, job.id)
        assert (ended.state, ended.num_done, ended.num_failed) == ("completed_with_errors", 5, 1)
        with engine.connect() as connection:
            assert [error.key for error in list_item_errors(connection, job.id, after=None, limit=10)] == [
                "k2"
            ]
            assert list_item_errors(connection, job.id, after=2, limit=10) == []
        assert next(read_results(engine, job.id)).present.tolist() == [True, True, False, True]
        assert ask(engine, retry_job, job.id).state == "queued"
        again = claim_next(engine)
        assert again.only_items == (2,)
        assert complete(engine, again) is True
        ended = job_of(engine, job.id)
        assert (ended.state, ended.num_done, ended.num_failed) == ("completed", 6, 0)
        vectors = np.concatenate([block.results for block in read_results(engine, job.id)])
        np.testing.assert_allclose(vectors, [vector_of(item.text) for item in make_items(6)], atol=1e-3)
        with engine.begin() as connection, pytest.raises(WrongJobState):
            retry_job(connection, job.id)


def test_expired_leases_and_lost_dispatches_go_back_to_pending(engine: Engine) -> None:
    job = submit(engine, make_items(8))
    first, second = dispatch_all(engine)
    claim(engine, first.chunk_id, lease_seconds=-1)
    assert ask(engine, rescue_expired_chunks) == 1
    assert ask(engine, rescue_unclaimed_chunks, timeout_seconds=60) == 0
    assert ask(engine, rescue_unclaimed_chunks, timeout_seconds=-1) == 1
    assert [dispatch.chunk_id for dispatch in dispatch_all(engine)] == [first.chunk_id, second.chunk_id]
    assert ask(engine, lock_job, job.id).num_retried_chunks == 1


def test_a_heartbeat_renews_leases_and_tells_of_lost_ones_and_of_cancelled_jobs(engine: Engine) -> None:
    submit(engine, make_items(4))
    held = claim_next(engine)
    lost = claim_next_of_new_job(engine)
    claim(engine, lost.chunk_id, "thief")
    assert ask(engine, renew_leases, [held, lost], 30) == {held.chunk_id: "running"}
    ask(engine, cancel_job, held.job_id)
    assert ask(engine, renew_leases, [held], 30) == {held.chunk_id: "cancelling"}


def claim_next_of_new_job(engine: Engine):  # type: ignore[no-untyped-def]
    submit(engine, make_items(4))
    return claim_next(engine, lease_seconds=-1)


def test_cancelling_ends_waiting_chunks_now_and_leased_ones_when_their_worker_hears(engine: Engine) -> None:
    job = submit(engine, make_items(12))
    held = claim_next(engine)
    assert ask(engine, cancel_job, job.id).state == "cancelling"
    assert ask(engine, cancel_job, job.id).num_open_chunks == 1
    assert dispatch_all(engine) == []
    ask(engine, cancel_chunk, held)
    assert job_of(engine, job.id).state == "cancelled"
    assert ask(engine, cancel_job, job.id).state == "cancelled"


@pytest.mark.parametrize("count", [4, 4 * 8 * 3])  # in one transaction, and in parts
def test_a_refused_submission_leaves_nothing_behind(engine: Engine, count: int) -> None:
    with pytest.raises(DuplicateKey, match=f"item 2 and item {count + 1} have the same key, "):
        submit(engine, [*make_items(count), make_items(2)[1]], collection="docs")
    with pytest.raises(EmptyJob):
        submit(engine, [])
    assert ask(engine, list_jobs, state=None, before_seq=None, limit=10) == []
    Pruner(engine, retention_seconds=1e9, upload_timeout_seconds=1e9).prune()
    with engine.connect() as connection:
        for table in ("jobs", "chunks", "chunk_payloads", "collections"):
            assert connection.execute(text(f"SELECT count(*) FROM vectormill.{table}")).scalar_one() == 0


def test_a_collection_that_another_first_job_has_made_meanwhile_is_no_foreign_table(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first jobs of one collection at once: the second looked before the first had made it, and asks afterwards."""
    find = collections.find_generation

    def find_and_be_overtaken(connection: Connection, name: str) -> Generation:
        try:
            return find(connection, name)
        finally:
            monkeypatch.undo()
            submit(engine, make_items(1), collection="docs")

    monkeypatch.setattr(collections, "find_generation", find_and_be_overtaken)
    assert submit(engine, make_items(2), collection="docs").num_items == 2


def test_a_collection_never_takes_the_name_of_a_table_that_is_not_its_own(engine: Engine) -> None:
    execute(engine, "CREATE TABLE public.customers (id int)")
    for name in ("customers", "jobs"):
        with pytest.raises(Conflict, match=name):
            submit(engine, make_items(1), collection=name)


LEFT_SECONDS = text("SELECT extract(epoch FROM lease_until - now()) FROM vectormill.chunks WHERE id = :id")


def test_of_all_commits_of_a_job_exactly_one_is_told_that_it_ended_it(engine: Engine) -> None:
    submit(engine, make_items(12))
    claims = [claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine)]
    assert [complete(engine, claimed) for claimed in claims if claimed] == [False, False, True]


def test_a_worker_that_lost_its_lease_does_not_renew_its_successors(engine: Engine) -> None:
    submit(engine, make_items(4))
    zombie = claim_next(engine, "zombie", lease_seconds=-1)
    assert claim(engine, zombie.chunk_id, "thief", lease_seconds=30) is not None
    assert ask(engine, renew_leases, [zombie], 3600) == {}
    assert execute(engine, LEFT_SECONDS, id=zombie.chunk_id).scalar_one() < 60


def test_a_job_keeps_its_idempotency_key_however_long_nothing_moves_in_it(engine: Engine) -> None:
    job = submit(engine, make_items(4), idempotency_key="k")
    execute(engine, "UPDATE vectormill.jobs SET updated_at = now() - interval '1 day'")
    assert submit(engine, make_items(4), idempotency_key="k").id == job.id
