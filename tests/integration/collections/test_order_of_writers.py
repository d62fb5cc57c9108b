"""The newest write of a key wins in every generation, whoever carries it there: as clients and operators meet it."""

from collections.abc import Callable
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.api_server import encoding_meanwhile
from tests.building import BITS, NEXT, ask, build, encode_all, put, rows_of, swap, table_of
from tests.indexers import KeptSource, await_run, contents, indexing, look
from tests.protocol import claim, complete, dispatch_all
from tests.waiting import wait_for
from vectormill.db.chunks.chunks import split_chunk
from vectormill.db.rows.items import delete_items
from vectormill.db.runs.runs import create_run
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.jobs.chunk import Claim
from vectormill.domain.jobs.item import Item
from vectormill.domain.run import COMPLETED, REINDEX

KEYS = [f"k{number}" for number in range(9)]


@pytest.fixture
def kept(engine: Engine) -> Engine:
    """A collection that keeps its texts and has nine rows."""
    put(engine, "seed")
    with engine.begin() as connection:
        connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))
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
        for dispatch in dispatch_all(kept):
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
