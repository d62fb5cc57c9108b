"""The newest write of a key wins in every generation, whoever carries it there: as clients and operators meet it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, text

from scheduler.scrubber import Scrubber
from tests.api_server import encoding_meanwhile
from tests.building import BITS, NEXT, build, encode_all, put, rows_of, swap, table_of
from tests.database import ask, execute
from tests.indexers import (
    KeptSource,
    ListedSource,
    await_run,
    contents,
    indexing,
    look,
    row,
    start_run,
    wanted,
)
from tests.protocol import claim, complete, complete_on, dispatch_all, submit
from tests.waiting import wait_for
from vectormill.collections.collections import find_generation
from vectormill.collections.generations import discard_generation, roll_back
from vectormill.collections.items import delete_items, remove_items
from vectormill.collections.tombstones import delete_scrubbed
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.chunk import Claim
from vectormill.jobs.chunks import split_chunk
from vectormill.jobs.dual_writes import cancel_unwanted_jobs
from vectormill.jobs.item import ENCODING_FAILED, Item, ItemFailure
from vectormill.jobs.jobs import draw_seq, retry_job
from vectormill.runs.run import COMPLETED, REINDEX, Run
from vectormill.runs.runs import create_run

KEYS = [f"k{number}" for number in range(9)]


@pytest.fixture
def kept(engine: Engine) -> Engine:
    """A collection that keeps its texts and has nine rows."""
    put(engine, "seed")
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")
    encode_all(engine)
    ask(engine, delete_items, "docs", ["seed"])
    put(engine, *KEYS, content="old")
    encode_all(engine)
    return engine


def start(engine: Engine, spec: EncodingSpec | None = NEXT) -> UUID:
    run = ask(engine, lambda connection: create_run(connection, "docs", REINDEX, spec=spec))
    assert run is not None
    return run.id


def texts_of(engine: Engine) -> dict[str, tuple[str, bool]]:
    """By key the kept text, and whether its hash is that of the row."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT key, text, content_hash FROM docs"))
        return {
            row.key: (row.text, Item(row.key, row.text.encode()).content_hash() == bytes(row.content_hash))
            for row in rows
        }


def rebuild_from_own_texts(engine: Engine, before_encoding: Callable[[], object] = lambda: None) -> None:
    """Another spec, read from the collection; workers begin when the run has read all of it."""
    source = KeptSource()
    with indexing(engine, source, on_open=source.open):
        run_id = start(engine)
        wait_for(lambda: look(engine, run_id).job_id is not None, 20, "the run submitted its job")
        before_encoding()
        with encoding_meanwhile(engine):
            run = await_run(engine, run_id)
    assert (run.state, run.error) == (COMPLETED, None)


def test_a_job_that_was_queued_when_a_build_from_own_texts_began_is_not_lost(kept: Engine) -> None:
    put(kept, *KEYS, content="new")
    rebuild_from_own_texts(kept)
    assert texts_of(kept) == {key: (f"new {key}", True) for key in KEYS}


def test_rows_that_a_build_carries_keep_the_place_that_they_had(kept: Engine) -> None:
    before = rows_of(kept, "docs")
    rebuild_from_own_texts(kept)
    assert rows_of(kept, "docs") == before


def test_a_chunk_of_carried_rows_that_is_split_keeps_their_places(kept: Engine) -> None:
    put(kept, "k0", content="later")
    encode_all(kept)
    before = rows_of(kept, "docs")

    def split() -> None:
        for dispatch in wait_for(lambda: dispatch_all(kept), 20, "the whole job was queued"):
            claimed = claim(kept, dispatch.chunk_id)
            assert claimed is not None
            ask(kept, split_chunk, claimed, "lost twice")

    rebuild_from_own_texts(kept, split)
    assert rows_of(kept, "docs") == before


def claims_of(engine: Engine) -> list[Claim]:
    return [claimed for each in dispatch_all(engine) if (claimed := claim(engine, each.chunk_id)) is not None]


def test_a_second_twin_has_the_place_of_its_original(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    build(engine)
    job = put(engine, "gone", "stays", content="first")
    ask(engine, delete_items, "docs", ["gone"])
    later = put(engine, "stays", content="second")
    second = build(engine, BITS)
    encode_all(engine)
    assert rows_of(engine, table_of(second)) == {"stays": later.seq}, "a deleted key came back"
    swap(engine, second)
    assert contents(engine)["stays"][0] == Item("stays", b"second stays").content_hash()
    assert job.seq < later.seq


def test_what_an_open_job_has_written_before_a_build_is_for_its_source_to_tell(engine: Engine) -> None:
    job = put(engine, "gone", "failed", "waits", content="first", chunk_max_items=1)
    gone, failed, _ = claims_of(engine)
    complete(engine, gone)
    complete(
        engine,
        failed,
        {0: ItemFailure(ENCODING_FAILED, "This text cannot be encoded, as this test wants it.")},
    )
    put(engine, "gone", content="second")
    (later,) = claims_of(engine)
    complete(engine, later)
    building = build(engine)
    encode_all(engine)
    assert rows_of(engine, table_of(building)) == {"failed": job.seq, "waits": job.seq}


def test_a_twin_that_is_open_after_a_swap_has_a_twin_in_the_same_place(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    first = build(engine)
    job = put(engine, "gone", "stays", content="first")
    swap(engine, first)
    ask(engine, delete_items, "docs", ["gone"])
    later = put(engine, "stays", content="second", spec=NEXT)
    second = build(engine, BITS)
    claims = claims_of(engine)
    for claimed in sorted(claims, key=lambda each: -each.job_seq):
        complete(engine, claimed)
    assert rows_of(engine, table_of(second)) == {"stays": later.seq}
    assert {claimed.job_seq for claimed in claims} == {job.seq, later.seq}


@pytest.mark.parametrize(
    ("before", "source"),
    [
        (row("k", "text"), row("k", "text", page=1)),
        (row("k", "text", page=1), row("k", "text")),
    ],
    ids=["metadata comes", "metadata goes"],
)
@pytest.mark.parametrize("when", ["while it reads", "after its end"])
def test_a_row_whose_metadata_alone_a_run_has_changed_is_not_parted_by_an_older_job(
    engine: Engine, before: Item, source: Item, when: str
) -> None:
    submit(engine, [before], collection="docs")
    encode_all(engine)
    submit(engine, [row("k", "older than the run", page=2)], collection="docs")
    (older,) = claims_of(engine)

    def commit(position: int) -> None:
        if when == "while it reads" and position:
            wait_for(count_compared, 20, "the first row was compared")
            complete(engine, older)

    def count_compared() -> int:
        number: int = execute(engine, "SELECT sum(num_seen) FROM vectormill.runs").scalar_one()
        return number

    rows = [source, row("l", "another")]
    with indexing(engine, ListedSource(rows, batch=1, before=commit)), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, None))
    assert (run.state, run.error) == (COMPLETED, None)
    if when == "after its end":
        complete(engine, older)
    assert contents(engine) == wanted(rows)


def test_a_commit_that_overlaps_a_run_s_removal_leaves_no_attributes(engine: Engine) -> None:
    submit(engine, [row("k", "text")], collection="docs")
    encode_all(engine)
    submit(engine, [row("k", "older", page=1)], collection="docs")
    (older,) = claims_of(engine)
    generation = ask(engine, find_generation, "docs")
    seq = ask(engine, draw_seq)

    def remove() -> None:
        ask(engine, remove_items, generation, ["k"], [seq])

    with engine.begin() as connection, ThreadPoolExecutor(1) as pool:
        complete_on(connection, older)
        removal = pool.submit(remove)
        wait_for(lambda: ask(engine, count_waiting) == 1, 20, "the removal waited")
        connection.commit()
        removal.result(20)
    assert rows_of(engine, table_of(generation)) == {}
    with engine.connect() as connection:
        attributes = text(f"SELECT key FROM {table_of(generation)}_attributes")
        assert connection.execute(attributes).scalars().all() == []


def count_waiting(connection: Connection) -> int:
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    number: int = connection.execute(text(waiting)).scalar_one()
    return number


def finish_run(engine: Engine, *rows: Item) -> Run:
    """A run that reads all of these rows from outside, beside workers who do nothing else."""
    with indexing(engine, ListedSource(list(rows))), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine, confirm=True))
    assert (run.state, run.error) == (COMPLETED, None)
    return run


def test_a_key_that_a_run_has_removed_is_not_brought_back_by_an_older_job(engine: Engine) -> None:
    put(engine, "gone", "stays", content="former")
    encode_all(engine)
    put(engine, "gone", content="older than the run")
    (older,) = claims_of(engine)
    assert finish_run(engine, row("stays", "former stays")).counts.num_deleted == 1
    complete(engine, older)
    assert set(rows_of(engine, "docs")) == {"stays"}
    later = put(engine, "gone", content="later")
    encode_all(engine)
    assert rows_of(engine, "docs")["gone"] == later.seq
    Scrubber(engine).scrub(lambda: False)
    assert ask(engine, delete_scrubbed, -1) == 1
    assert execute(engine, "SELECT count(*) FROM vectormill.tombstones").scalar_one() == 0


def test_a_key_that_a_run_has_removed_does_not_come_back_by_a_rollback(engine: Engine) -> None:
    put(engine, "gone", "stays")
    encode_all(engine)
    former = table_of(ask(engine, find_generation, "docs"))
    building = build(engine)
    encode_all(engine)
    swap(engine, building)
    put(engine, "gone", "stays", spec=NEXT)
    encode_all(engine)
    finish_run(engine, row("stays", "text stays"))
    assert set(rows_of(engine, former)) == {"stays"}


def test_a_text_of_a_run_that_cannot_be_encoded_is_not_followed_by_that_of_an_older_job(
    engine: Engine,
) -> None:
    put(engine, "k", content="former")
    encode_all(engine)
    put(engine, "k", content="older than the run")
    (older,) = claims_of(engine)
    with indexing(engine, ListedSource([row("k", "newest")])):
        run_id = start_run(engine, confirm=True)
        (newest,) = wait_for(lambda: claims_of(engine), 20, "the job of the run was queued")
        complete(engine, newest, {0: ItemFailure(ENCODING_FAILED, "so it is")})
        run = await_run(engine, run_id)
    assert run.counts.num_failed == 1
    complete(engine, older)
    assert rows_of(engine, "docs") == {}
    assert newest.job_id is not None
    ask(engine, retry_job, newest.job_id)
    encode_all(engine)
    assert rows_of(engine, "docs") == {"k": run.seq}


def test_a_job_outlives_the_generation_that_was_live_when_it_was_submitted(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    first = ask(engine, find_generation, "docs")
    second = build(engine)
    job = put(engine, "new")
    swap(engine, second)
    ask(engine, discard_generation, first.id)
    for _ in range(2):  # rounds of the scheduler
        cancel_unwanted_jobs(engine)
    encode_all(engine)
    assert rows_of(engine, "docs") == {"new": job.seq}


def test_a_job_of_a_generation_that_is_given_up_while_a_rollback_carries_it_is_not_lost(kept: Engine) -> None:
    swap(kept, build(kept))
    encode_all(kept)
    job = put(kept, "new", spec=NEXT)
    undone = ask(kept, roll_back, "docs")
    ask(kept, discard_generation, undone.retired.id)
    cancel_unwanted_jobs(kept)
    source = KeptSource()
    with indexing(kept, source, on_open=source.open), encoding_meanwhile(kept):
        run = await_run(kept, undone.run_id)
    assert (run.state, run.error) == (COMPLETED, None)
    assert rows_of(kept, "docs")["new"] == job.seq


def test_a_job_that_a_worker_holds_through_a_rollback_is_in_the_generation_that_is_live_again(
    kept: Engine,
) -> None:
    swap(kept, build(kept))
    encode_all(kept)
    job = put(kept, "new", spec=NEXT)
    (held,) = [claimed for claimed in claims_of(kept) if claimed.job_id == job.id]
    undone = ask(kept, roll_back, "docs")
    source = KeptSource()
    with indexing(kept, source, on_open=source.open), encoding_meanwhile(kept):
        run = await_run(kept, undone.run_id)
    assert (run.state, run.error) == (COMPLETED, None)
    complete(kept, held)
    encode_all(kept)
    assert rows_of(kept, "docs")["new"] == job.seq
