"""A fill that is copied without indexes leaves the rows that upserts would leave, whoever else writes and dies."""

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection as Pipe
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from sqlalchemy import Engine, text

from indexer.reindexing import end_fill
from scheduler.reaper import Recomputer
from scheduler.scrubber import Scrubber
from tests.api_server import encoding_meanwhile
from tests.building import NEXT, build, encode_all, make_context, make_run, put, swap
from tests.database import ask, execute
from tests.indexers import ListedSource, await_run, indexing, row
from tests.integration.collections.test_rebuilds import start
from tests.integration.crashes.points import CrashPoints
from tests.integration.crashes.victims import Servers, running, watched_engine
from tests.integration.rows.test_upserts import ITEMS
from tests.kept_rows import read_rows
from tests.kinds import MANY, RECORDS, SCORES
from tests.protocol import SPEC, claim, complete, dispatch_all, results_of, submit, vector_of
from vectormill.collections.bulk_loads import begin_bulk_load, copy_rows, has_bulk_load
from vectormill.collections.collection import CollectionOptions, Generation
from vectormill.collections.collections import (
    change_collection,
    create_collection,
    find_building,
    find_generation,
)
from vectormill.collections.descriptions import describe_collection
from vectormill.collections.generation_tables import attributes_name, filled_names, upsert_rows
from vectormill.collections.generations import discard_generation, prune_retired_generations
from vectormill.collections.indexes import analyze_table
from vectormill.collections.items import delete_items
from vectormill.collections.removals import drop_orphaned_tables, remove_collection
from vectormill.collections.tombstones import delete_scrubbed
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import Conflict
from vectormill.domain.task import RECORD, REPRESENTATIONS, VECTOR
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.jobs.chunk import Claim
from vectormill.jobs.item import EMPTY_TEXT, Item, ItemFailure, Items
from vectormill.jobs.job import Job, NewJob
from vectormill.jobs.jobs import draw_seq
from vectormill.jobs.submission import JobWriter
from vectormill.results.kind import take_objects
from vectormill.results.records import group_records
from vectormill.results.table import choose_kind
from vectormill.runs.run import COMPLETED
from vectormill.settings import Settings
from vectormill.vectors.quantization import measure_ranges
from vectormill.vectors.vector_types import make_rows
from vectormill.workers.proofs import begin_period, fail_period

KEEPING = CollectionOptions(keep_text=True)
LIST_TABLES = text("""
    SELECT relname FROM pg_class WHERE relname ~ '^generation_[0-9]+_fill' AND relkind = 'r' ORDER BY relname
""")
SUM_BYTES = text(
    "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE relname ~ '^generation_' AND relkind = 'r'"
)
# This describes a generation's tables without its number.
DESCRIBE_TABLES = text("""
    SELECT replace(class.relname, :id, 'N'), class.reloptions,
           (SELECT array_agg(replace(pg_get_indexdef(indexrelid), :id, 'N')
                             ORDER BY CAST(CAST(indexrelid AS regclass) AS text))
              FROM pg_index WHERE indrelid = class.oid),
           (SELECT array_agg(CAST((attname, format_type(atttypid, atttypmod), attnotnull, attgenerated) AS text)
                             ORDER BY attnum)
              FROM pg_attribute WHERE attrelid = class.oid AND attnum > 0 AND NOT attisdropped),
           (SELECT replace(conname, :id, 'N') FROM pg_constraint WHERE conrelid = class.oid AND contype = 'p')
      FROM pg_class AS class
     WHERE class.oid IN (to_regclass('vectormill.generation_' || :id),
                         to_regclass('vectormill.generation_' || :id || '_attributes'))
     ORDER BY 1
""")


def begin(
    engine: Engine, items: Sequence[Item], spec: EncodingSpec = NEXT, chunk_max_items: int = 2
) -> tuple[Generation, Job]:
    """Queue the job of a run that fills a new generation beside the live one."""
    building = build(engine, spec)
    new_job = NewJob(
        spec, collection="docs", id=uuid4(), seq=ask(engine, draw_seq), generation_id=building.id
    )
    assert new_job.id is not None
    ask(engine, begin_bulk_load, building, new_job.id)
    with JobWriter(engine, new_job, Settings(chunk_max_items=chunk_max_items)) as writer:
        for item in items:
            writer.add(item)
        return building, writer.finish()


def end(engine: Engine, building: Generation) -> None:
    end_fill(make_context(engine, make_run(building, seq=1)), building.id)


def claim_all(engine: Engine) -> list[Claim]:
    claims = [claim(engine, dispatch.chunk_id) for dispatch in dispatch_all(engine)]
    return [each for each in claims if each is not None]


def count(engine: Engine, table: str) -> int:
    number: int = execute(engine, f"SELECT count(*) FROM vectormill.{table}").scalar_one()
    return number


def texts_of(engine: Engine, generation: Generation) -> dict[str, tuple[str, str]]:
    return {key: found.content for key, found in ask(engine, read_rows, generation.id).items()}


@pytest.mark.parametrize("keep_text", [False, True])
@pytest.mark.parametrize(
    "spec",
    [
        *(replace(SPEC, dimensions=13, vector_type=vector_type) for vector_type in VECTOR_TYPES),
        SCORES,
        replace(SCORES, labels=(), dimensions=1),
        RECORDS,
        MANY,
    ],
    ids=[*VECTOR_TYPES, "scores", "scores without labels", "records", "representations"],
)
def test_copied_rows_are_those_that_an_upsert_writes(
    engine: Engine, spec: EncodingSpec, keep_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.collections.bulk_loads.PART_BYTES", 100)  # parts of one row or two
    items = [*ITEMS, Item("bare", b"bare"), Item("carried", b"carried", b'{"a":"\\u00e9"}')]
    columns = replace(Items.of(items), places=[*range(3, len(items) + 3)])
    if spec.result == VECTOR:
        vectors = np.random.default_rng(3).standard_normal((len(items), spec.dimensions)).astype(np.float32)
        results: Any = make_rows(vectors, VECTOR_TYPES[str(spec.vector_type)], measure_ranges(vectors))
    elif spec.result == RECORD:
        ragged = results_of(spec, items)
        results = take_objects([group_records(ragged.row(place).tobytes()) for place in range(len(items))])
    elif spec.result == REPRESENTATIONS:
        ragged = results_of(spec, items)
        results = take_objects([ragged.row(place).tobytes() for place in range(len(items))])
    else:
        results = results_of(spec, items).matrix.reshape(len(items), spec.dimensions)
    found = []
    for name in ("upserted", "copied"):
        with engine.begin() as connection:
            create_collection(connection, name, spec, KEEPING, 100)
            generation = find_generation(connection, name)
            if name == "upserted":
                upsert_rows(connection, generation.id, 2, columns, results, spec, keep_text=keep_text)
            else:
                begin_bulk_load(connection, generation, uuid4())
                driver = connection.connection.driver_connection
                assert driver is not None
                with driver.cursor() as cursor:
                    copy_rows(cursor, generation.id, 2, columns, results, spec, keep_text=keep_text)
            middle = "" if name == "upserted" else "_fill"
            for end_of_name in ("", "_attributes"):
                table = f"vectormill.generation_{generation.id}{middle}{end_of_name}"
                rows = connection.execute(text(f"SELECT CAST(row AS text) FROM {table} AS row ORDER BY key"))
                found.append(list(rows.scalars()))
    assert len(found[0]) == len(items)
    assert found[:2] == found[2:]
    assert choose_kind(spec).result == spec.result


def test_the_rows_of_a_build_are_copied_and_its_tables_end_as_any_others(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    put(engine, "k1", "k2", "gone")
    encode_all(engine)
    rows = [row(f"k{number}", f"text {number}", page=number) for number in range(6)]
    building, _ = begin(engine, rows)
    put(engine, "twin")
    encode_all(engine)
    assert count(engine, f"generation_{building.id}_fill") == 6
    assert count(engine, building.table_name) == 1
    described = ask(engine, lambda connection: describe_collection(connection, "docs"))
    shown = next(each for each in described.generations if each.id == building.id)
    assert shown.table_bytes >= 8192
    assert described.row.num_bytes == execute(engine, SUM_BYTES).scalar_one()
    end(engine, building)
    assert texts_of(engine, building).keys() == {*(f"k{number}" for number in range(6)), "twin"}
    live = ask(engine, find_generation, "docs")
    assert execute(engine, LIST_TABLES).all() == []
    assert not ask(engine, has_bulk_load, building.id)
    of_live, of_built = (execute(engine, DESCRIBE_TABLES, id=str(each.id)).all() for each in (live, building))
    assert len(of_built) == 2
    assert of_built == of_live
    put(engine, "k1", "later")
    encode_all(engine)
    swap(engine, building)
    assert texts_of(engine, building)["k1"] == ("text k1", "")


def test_of_a_key_in_the_fill_and_beside_it_the_later_row_stays_with_its_own_metadata(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building = build(engine)
    older = submit(
        engine,
        [row("older", "old", page=0), row("bare", "old", page=0)],
        collection="docs",
    )
    building, job = begin(engine, [row(key, "filled", page=1) for key in ("older", "newer", "stripped")])
    assert older.seq < job.seq
    begin_items = [row("newer", "put", page=2), row("stripped", "put"), row("other", "put")]
    submit(engine, begin_items, collection="docs")
    for claimed in claim_all(engine):
        complete(engine, claimed)
    end(engine, building)
    assert texts_of(engine, building) == {
        "older": ("filled", '{"page":1}'),
        "bare": ("old", '{"page":0}'),
        "newer": ("put", '{"page":2}'),
        "stripped": ("put", ""),
        "other": ("put", ""),
    }


@pytest.mark.parametrize("ends", ["encoded", "fails"])
@pytest.mark.parametrize("when", ["open", "closed", "merged"])
def test_rows_of_a_fill_that_are_encoded_again_replace_the_faulty_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, when: str, ends: str
) -> None:
    put(engine, "seed")
    building, job = begin(engine, [row(key, "filled", page=1) for key in ("k1", "k2", "k3", "k4")])
    period = ask(engine, begin_period, "w", uuid4(), NEXT.model, {})
    encode_all(engine)
    faulty = "UPDATE vectormill.chunks SET proof_id = :period WHERE job_id = :job AND seq = 0"
    execute(engine, faulty, period=period, job=job.id)
    wrong = "[" + ",".join(["0.5"] * SPEC.dimensions) + "]"
    table = f"vectormill.generation_{building.id}_fill"
    execute(engine, f"UPDATE {table} SET embedding = '{wrong}' WHERE key < 'k3'")

    def mend() -> None:
        ask(engine, fail_period, period, "its vector has changed")
        Recomputer(engine).recompute()
        (again,) = claim_all(engine)
        failure = ItemFailure(EMPTY_TEXT, "")
        complete(engine, again, {1: failure} if ends == "fails" else None)

    def begin_to_merge(*given: Any) -> None:
        if given[1] == filled_names(building.id)[0]:
            mend()
        analyze_table(*given)

    if when == "open":
        mend()
    elif when == "closed":
        monkeypatch.setattr("indexer.reindexing.analyze_table", begin_to_merge)
    end(engine, building)
    if when == "merged":
        mend()
    swap(engine, building)
    rows = execute(
        engine, "SELECT key, embedding::real[] AS vector FROM docs WHERE key <> 'seed' ORDER BY key"
    ).all()
    left = ["k1", "k3", "k4"] if ends == "fails" else ["k1", "k2", "k3", "k4"]
    assert [each.key for each in rows] == left
    for each in rows:
        assert np.allclose(each.vector, vector_of(b"filled"), atol=1e-3), each.key


def test_a_later_row_without_metadata_leaves_none_of_the_fill(engine: Engine) -> None:
    put(engine, "seed")
    building, _ = begin(engine, [row(key, "filled", page=1) for key in ("stripped", "stays")])
    encode_all(engine)
    put(engine, "stripped")
    encode_all(engine)
    end(engine, building)
    assert count(engine, building.table_name) == 3
    with engine.connect() as connection:
        attributes = text(f"SELECT key FROM vectormill.{attributes_name(building.id)}")
        assert list(connection.execute(attributes).scalars()) == ["stays"]


def test_what_is_deleted_during_a_fill_stays_deleted_and_what_is_put_again_is_there(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building, _ = begin(engine, [row(key, "filled", page=1) for key in ("gone", "back", "stays", "late")])
    first, *others = claim_all(engine)
    complete(engine, first)
    ask(engine, delete_items, "docs", ["gone", "back", "late"])
    for claimed in others:
        complete(engine, claimed)
    submit(engine, [row("back", "put")], collection="docs")
    for claimed in claim_all(engine):
        complete(engine, claimed)
    end(engine, building)
    assert texts_of(engine, building) == {"stays": ("filled", '{"page":1}'), "back": ("put", "")}


def test_a_deleted_text_goes_from_an_unfinished_fill_before_its_tombstone_does(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building, _ = begin(engine, [row("gone", "a confession", page=1), row("stays", "filled")])
    encode_all(engine)
    ask(engine, delete_items, "docs", ["gone"])
    Scrubber(engine).scrub(lambda: False)
    for name in filled_names(building.id):
        assert count(engine, name) == 1
    assert ask(engine, delete_scrubbed, 0.0) == 1
    end(engine, building)
    assert texts_of(engine, building) == {"stays": ("filled", "")}


def test_a_commit_after_the_fill_was_closed_is_not_lost(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building, _ = begin(engine, [row(key, "filled") for key in ("a", "b", "c")], chunk_max_items=1)
    first, second, third = claim_all(engine)
    assert first.is_fill
    complete(engine, first)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("indexer.reindexing.finish_bulk_load", lambda *_: None)
        end(engine, building)
    complete(engine, second)
    assert count(engine, building.table_name) == 1
    end(engine, building)
    complete(engine, third)
    assert texts_of(engine, building).keys() == {"a", "b", "c"}


def test_a_job_in_the_place_of_one_that_has_copied_rows_upserts_its_own(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building, _ = begin(engine, [row("a", "filled"), row("b", "filled")], chunk_max_items=1)
    complete(engine, claim_all(engine)[0])
    _, again = begin(engine, [row("a", "again"), row("b", "again")])
    (claimed,) = [each for each in claim_all(engine) if each.job_id == again.id]
    assert not claimed.is_fill
    complete(engine, claimed)
    end(engine, building)
    assert texts_of(engine, building) == {"a": ("again", ""), "b": ("again", "")}


def test_a_discarded_or_removed_fill_leaves_no_table(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building, _ = begin(engine, [row("a", "filled")])
    encode_all(engine)
    assert len(execute(engine, LIST_TABLES).all()) == 2
    ask(engine, discard_generation, building.id)
    assert prune_retired_generations(engine, 1e9) == 1
    begin(engine, [row("a", "filled")])
    encode_all(engine)
    remove_collection(engine, "docs")
    assert drop_orphaned_tables(engine) == 6
    assert execute(engine, LIST_TABLES).all() == []


def test_texts_of_a_fill_count_among_those_that_another_language_would_parse_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.collections.collections.MOST_REWRITTEN_TEXTS", 3)
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    begin(engine, [row(str(number), "filled") for number in range(4)])
    encode_all(engine)
    with pytest.raises(Conflict, match="would block"):
        change_collection(engine, "docs", language="english")


def test_a_language_that_is_chosen_during_a_fill_is_that_of_its_rows(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    building, _ = begin(engine, [row("a", "running dogs")])
    encode_all(engine)
    change_collection(engine, "docs", language="english")
    end(engine, building)
    with engine.connect() as connection:
        found = connection.execute(
            text(f"SELECT search @@ 'run'::tsquery FROM vectormill.{building.table_name}_attributes")
        )
        assert found.scalar_one()


def test_a_run_copies_into_an_empty_build_and_upserts_into_one_that_has_more_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[str] = []

    def note(
        cursor: Any, generation_id: int, job_seq: int, items: Items, *arguments: Any, **options: Any
    ) -> None:
        filled.extend(items.keys)
        copy_rows(cursor, generation_id, job_seq, items, *arguments, **options)

    monkeypatch.setattr("vectormill.jobs.completion.copy_rows", note)
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    rows = [row(f"k{number}", f"text {number}", page=number) for number in range(6)]
    with indexing(engine, ListedSource(rows)), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, NEXT, confirm=True))
        assert (run.state, run.error) == (COMPLETED, None)
        assert sorted(filled) == [each.key for each in rows]
        filled.clear()
    third = replace(SPEC, revision="3")
    building, _ = begin(engine, rows, third)
    encode_all(engine)  # and then the run broke off
    filled.clear()
    with indexing(engine, ListedSource([*rows, row("new", "new")])), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, third, confirm=True))
    assert (run.state, run.counts.num_new) == (COMPLETED, 1)
    assert run.report["swapping"]["live"] == building.id
    assert filled == []
    assert texts_of(engine, building).keys() == {*(each.key for each in rows), "new"}


def commit_in_worker(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    engine = watched_engine(servers, points)
    (claimed,) = claim_all(engine)
    complete(engine, claimed)


def test_a_worker_killed_between_copy_and_commit_leaves_each_row_once(
    database_url: str, engine: Engine
) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    servers = Servers(database_url, "")
    building, _ = begin(engine, [row("a", "filled", page=1), row("b", "filled")])
    seen: list[str] = []
    while not seen or seen[-1] != "after COMMIT" or "before COPY_RESULTS" not in seen:
        execute(engine, "UPDATE vectormill.chunks SET state = 'pending', lease_until = NULL")
        with running(commit_in_worker, servers, last=len(seen)) as victim:
            seen = victim.hear_all()
        is_there = "before COPY_RESULTS" in seen and seen[-1] == "after COMMIT"
        assert count(engine, f"generation_{building.id}_fill") == (2 if is_there else 0), seen[-1]
    assert {"before COPY_ATTRIBUTES", "before COMMIT"} <= set(seen)
    end(engine, building)
    assert texts_of(engine, building) == {"a": ("filled", '{"page":1}'), "b": ("filled", "")}


def end_in_indexer(servers: Servers, points: CrashPoints, pipe: Pipe) -> None:
    engine = watched_engine(servers, points)
    building = ask(engine, find_building, "docs")
    assert building is not None
    end(engine, building)


@pytest.mark.timeout(300)
def test_an_indexer_killed_at_any_step_of_ending_a_fill_leaves_it_to_another_one(
    database_url: str, engine: Engine
) -> None:
    ask(engine, create_collection, "docs", SPEC, KEEPING, 100)
    servers = Servers(database_url, "")
    building, _ = begin(engine, [row(key, "filled", page=1) for key in ("gone", "newer", "stays")])
    encode_all(engine)
    submit(engine, [row("newer", "put"), row("other", "put")], collection="docs")
    encode_all(engine)
    ask(engine, delete_items, "docs", ["gone"])
    seen: list[str] = []
    while not seen or "before FORGET_BULK_LOAD" not in seen or seen[-1] != "after COMMIT":
        with running(end_in_indexer, servers, last=len(seen)) as victim:
            seen = victim.hear_all()
        assert len(seen) < 100
        # The comparison at the end shows rows that an interrupted step has left in neither table, or in both.
    steps = {
        "CLOSE_BULK_LOAD",
        "INDEX_KEYS",
        "INDEX_DOCUMENTS",
        "MERGE_ROWS",
        "REMOVE_DELETED",
        "EXCHANGE_TABLES",
    }
    assert {f"before {step}" for step in steps} <= set(seen)
    end(engine, building)
    assert texts_of(engine, building) == {
        "newer": ("put", ""),
        "stays": ("filled", '{"page":1}'),
        "other": ("put", ""),
    }
