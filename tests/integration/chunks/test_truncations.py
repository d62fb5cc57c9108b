"""Items that were cut: noted with their chunk, kept through splits and retries, listed in pages, gone with the job."""

from dataclasses import replace

import httpx
import numpy as np
import pytest
from sqlalchemy import Engine, text

from tests.api_server import assert_problem, encode_waiting
from tests.api_server import submit as submit_over_http
from tests.database import ask, execute, load_payload
from tests.protocol import LONG, SPEC, claim_next, complete, stack, submit
from vectormill.jobs import chunks as chunk_writes
from vectormill.jobs.chunk import ChunkOutcome
from vectormill.jobs.chunks import list_truncated_items, split_chunk
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR, ZERO_VECTOR, Item, ItemFailure
from vectormill.jobs.job import Job
from vectormill.jobs.jobs import delete_job, find_job, list_item_errors, retry_job
from vectormill.jobs.partitions import delete_removed
from vectormill.ragged import Ragged

FAILED = ItemFailure(ENCODING_FAILED, "")
API_SETTINGS = {"chunk_max_items": 4}


def make_items(count: int, long: set[int]) -> list[Item]:
    return [Item(f"k{i}", (LONG if i in long else b"short ") + b"%d" % i) for i in range(count)]


def list_keys(engine: Engine, job: Job, limit: int = 100) -> list[list[str]]:
    """All pages."""
    pages: list[list[str]] = []
    after = None
    while True:
        page = ask(engine, list_truncated_items, job.id, after=after, limit=limit)
        pages.append([item.key for item in page.items])
        if not page.has_more:
            return pages
        after = page.items[-1].item


def encode_all(engine: Engine, job: Job, failures: dict[int, ItemFailure] | None = None) -> Job:
    while not complete(engine, claim_next(engine), failures):
        pass
    return ask(engine, find_job, job.id)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 100])
def test_pages_of_any_size_list_every_item_that_was_cut_once_and_in_order(engine: Engine, limit: int) -> None:
    long = {0, 3, 4, 5, 6, 7, 13, 19}  # chunks of four: the first and last of one, all of one, none of one
    job = submit(engine, make_items(20, long))
    ended = encode_all(engine, job)
    assert ended.num_truncated == len(long)
    pages = list_keys(engine, job, limit)
    assert [key for page in pages for key in page] == [f"k{i}" for i in sorted(long)]
    assert {len(page) for page in pages[:-1]} <= {limit}


def test_a_page_reads_a_bounded_number_of_payloads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_writes, "_CHUNKS_PER_PAGE", 2)
    job = submit(engine, make_items(20, {1, 5, 9, 13, 17}))
    encode_all(engine, job)
    # A page begins with the chunk in which the one before ended, and that one may have nothing left.
    assert list_keys(engine, job) == [["k1", "k5"], ["k9"], ["k13"], ["k17"]]


def test_a_retry_adds_what_it_cuts_to_what_was_cut_before(engine: Engine) -> None:
    job = submit(engine, make_items(4, {0, 2}))
    ended = encode_all(engine, job, {2: FAILED})
    assert (ended.num_truncated, list_keys(engine, job)) == (1, [["k0"]])  # an item that failed was not cut
    ask(engine, retry_job, job.id)
    assert encode_all(engine, job).num_truncated == 2
    assert list_keys(engine, job) == [["k0", "k2"]]


def test_the_halves_of_a_split_chunk_keep_what_was_cut_before(engine: Engine) -> None:
    job = submit(engine, make_items(8, {1, 3, 4, 6}), chunk_max_items=4)
    encode_all(engine, job, {2: FAILED})
    ask(engine, retry_job, job.id)
    ask(engine, split_chunk, claim_next(engine), "it ended its workers")
    assert list_keys(engine, job) == [["k1", "k3", "k4"]]  # k6 had failed
    encode_all(engine, job)
    assert list_keys(engine, job) == [["k1", "k3", "k4", "k6"]]
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT items FROM vectormill.chunk_truncations ORDER BY chunk_id"))
        assert sorted(row.items for row in rows) == [[0, 2], [1], [1]]


@pytest.mark.parametrize(
    "factor", [1e6, 0.0, 1e-12, np.nan, np.inf]
)  # of which float16 makes infinity or zero
def test_a_text_that_its_collection_cannot_hold_is_not_counted_as_cut(engine: Engine, factor: float) -> None:
    job = submit(engine, make_items(2, {0, 1}), collection="docs", spec=replace(SPEC, normalize=False))
    claimed = claim_next(engine)
    with engine.begin() as connection:
        items = load_payload(connection, claimed.chunk_id)
        vectors = stack(items)
        vectors[0] *= factor
        outcome = ChunkOutcome({}, 1, 1, truncated=[0, 1])
        complete_chunk(connection, claimed, items, np.arange(2), Ragged.from_matrix(vectors), outcome)
    assert ask(engine, find_job, job.id).num_truncated == 1
    assert list_keys(engine, job) == [["k1"]]
    (error,) = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert (error.key, error.code) == ("k0", ZERO_VECTOR if factor < 1 else NON_FINITE_VECTOR)


def test_a_worker_that_lost_its_lease_notes_nothing(engine: Engine) -> None:
    from vectormill.domain.errors import LeaseLost

    job = submit(engine, make_items(2, {0}))
    claimed = claim_next(engine)
    with pytest.raises(LeaseLost):
        complete(engine, replace(claimed, fence=claimed.fence - 1))
    assert list_keys(engine, job) == [[]]


def test_what_was_cut_goes_with_the_job(engine: Engine) -> None:
    job = submit(engine, make_items(4, {0}))
    encode_all(engine, job)
    ask(engine, delete_job, job.id)
    ask(engine, delete_removed, 1)
    assert execute(engine, "SELECT count(*) FROM vectormill.chunk_truncations").scalar_one() == 0


def test_the_keys_of_cut_texts_are_listed_over_http_page_by_page(
    client: httpx.Client, engine: Engine
) -> None:
    items = [
        {"key": f"k{i}", "text": f"{'long' if i % 3 == 0 else 'short'} text number {i}"} for i in range(12)
    ]
    job = submit_over_http(client, items)
    path = f"/v1/jobs/{job['id']}/truncated"
    assert client.get(path).json() == {"data": [], "next": None}
    encode_waiting(engine)
    assert client.get(f"/v1/jobs/{job['id']}").json()["truncated_items"] == 4
    first = client.get(path, params={"limit": 3}).json()
    second = client.get(path, params={"limit": 3, "after": first["next"]}).json()
    assert [item["key"] for item in first["data"] + second["data"]] == ["k0", "k3", "k6", "k9"]
    assert second["next"] is None
    assert_problem(client.get(path, params={"limit": 0}), 422, "invalid-request")
    assert_problem(client.get(path, params={"after": "x"}), 422, "invalid-cursor")


def test_the_keys_of_cut_texts_come_through_the_client(client: httpx.Client, engine: Engine) -> None:
    from vectormill.client import Client

    items = [{"key": f"k{i}", "text": f"long {i}"} for i in range(150)]  # more than a page
    job = submit_over_http(client, items)
    encode_waiting(engine)
    with Client(str(client.base_url)) as other:
        assert [item["key"] for item in other.truncated(job["id"])] == [item["key"] for item in items]
