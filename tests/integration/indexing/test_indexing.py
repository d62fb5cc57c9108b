"""Indexes that are built, kept, rebuilt, dropped and cleaned up, with writers and searches beside."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from indexer.indexing import build_indexes, drop_before_bulk
from tests.database import ask
from tests.indexed import (
    draw_vectors,
    execute,
    indexes_of,
    make_collection,
    names_of,
    search_collection,
    start_run,
    wish,
)
from tests.protocol import SPEC, vector_of
from tests.waiting import wait_for
from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import upsert_rows
from vectormill.collections.indexes import find_record
from vectormill.db.session import walk_plan
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.runs.run import REINDEX
from vectormill.search.filter import parse_filter
from vectormill.search.filter_sql import compile_filter, name_filter_index
from vectormill.vectors.vector_types import make_rows

NUM_ROWS = 1200


def write(engine: Engine, generation: Generation, keys: list[str], seq: int = 5) -> None:
    kind = SPEC.kept_type
    items = [Item(key, key.encode()) for key in keys]
    rows = make_rows(draw_vectors(len(keys)), kind, None)
    ask(engine, upsert_rows, generation.id, seq, items, rows, SPEC)


def describe(number: int) -> bytes:
    return json.dumps({"lang": ["de", "en", "fr"][number % 3], "year": 1900 + number % 120}).encode()


@pytest.mark.parametrize(
    ("vector_type", "operator_class"),
    [(None, "halfvec_cosine_ops"), ("float32", "vector_cosine_ops"), ("binary", "bit_hamming_ops")],
)
def test_a_live_collection_gets_the_index_that_its_searches_use(
    engine: Engine, vector_type: str | None, operator_class: str
) -> None:
    vectors = draw_vectors(3000, 64)
    generation = make_collection(engine, vectors, spec=replace(SPEC, vector_type=vector_type))
    context, report = start_run(engine)
    build_indexes(context, generation)
    (index,) = indexes_of(engine, generation)
    assert (index.operator_class, index.is_valid, index.options) == (
        operator_class,
        True,
        {"m": 16, "ef_construction": 64},
    )
    assert report["built"][0]["name"] == index.name
    assert report["built"][0]["num_bytes"] > 0
    assert any("m = 16" in reason for reason in report["plan"]["reasons"])
    execute(engine, f"ANALYZE vectormill.{generation.table_name}")
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))  # so small a table is rightly read whole
        found = search_collection(connection, generation, vectors[3], 10)
    assert found["num_rows_read"] is None
    assert found["data"][0]["key"] == "3"


def test_the_planner_takes_the_index_of_a_collection_that_is_not_small(engine: Engine) -> None:
    vectors = draw_vectors(5000, 256)
    generation = make_collection(engine, vectors)
    wish(engine, index_options="""'{"m": 12, "ef_construction": 48}'""")
    build_indexes(start_run(engine)[0], generation)
    execute(engine, f"ANALYZE vectormill.{generation.table_name}")
    found = ask(engine, search_collection, generation, vectors[3], 10)
    assert found["num_rows_read"] is None
    assert found["data"][0]["key"] == "3"


def test_what_is_there_already_is_kept_and_another_run_changes_nothing(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS), describe)
    wish(engine, filters="'[\"lang\"]'", keep_text="true")
    build_indexes(start_run(engine)[0], generation)
    before = names_of(engine, generation)
    assert len(before) == 4
    context, report = start_run(engine)
    build_indexes(context, generation)
    assert names_of(engine, generation) == before
    assert "built" not in report
    assert report["kept"] == [name for name in before if "hnsw" in name]


@pytest.mark.parametrize(
    ("columns", "settings", "spec", "said"),
    [
        ({"index_policy": "'auto'"}, {"index_rows": 5000}, SPEC, "from 5,000 rows on"),
        ({"index_policy": "'none'"}, {}, SPEC, "policy is none"),
        ({"index_policy": "'hnsw'"}, {}, replace(SPEC, vector_type="int8"), "No index works for int8"),
    ],
)
def test_without_an_index_the_report_says_why(
    engine: Engine, columns: dict[str, str], settings: dict[str, Any], spec: EncodingSpec, said: str
) -> None:
    generation = make_collection(engine, draw_vectors(200), spec=SPEC)
    wish(engine, **columns)
    context, report = start_run(engine, **settings)
    build_indexes(context, replace(generation, spec=spec))
    assert names_of(engine, generation) == []
    assert said in report["plan"]["reasons"][0]


def test_an_index_that_somebody_made_by_hand_serves_and_stays(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    execute(
        engine,
        f"CREATE INDEX mine ON vectormill.{generation.table_name} USING hnsw (embedding halfvec_cosine_ops)",
    )
    build_indexes(start_run(engine)[0], generation)
    assert names_of(engine, generation) == ["mine"]
    build_indexes(start_run(engine, options={"drop": True})[0], generation)
    assert names_of(engine, generation) == ["mine"]


def test_another_shape_and_a_rebuild_put_a_new_index_in_the_place_of_the_old_one(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    build_indexes(start_run(engine)[0], generation)
    (first,) = names_of(engine, generation)
    wish(engine, index_options="""'{"m": 8}'""")
    context, report = start_run(engine)
    build_indexes(context, generation)
    (second,) = indexes_of(engine, generation)
    assert (second.options["m"], second.is_valid, second.name != first) == (8, True, True)
    assert report["because"] == "Other options are requested than it was built with."
    build_indexes(start_run(engine, options={"rebuild": True})[0], generation)
    (third,) = names_of(engine, generation)
    assert third == first


def test_an_index_is_built_anew_when_deletions_pass_the_share(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    build_indexes(start_run(engine)[0], generation)
    execute(engine, f"DELETE FROM vectormill.{generation.table_name} WHERE CAST(key AS integer) % 4 = 0")
    wait_for(lambda: removed(engine, generation) >= NUM_ROWS // 4)
    context, report = start_run(engine, index_rebuild_share=0.3)
    build_indexes(context, generation)
    assert report["kept"]
    context, report = start_run(engine)
    build_indexes(context, generation)
    assert report["because"].startswith("25% of its rows")
    assert ask(engine, find_record, generation.id)["num_rows"] == NUM_ROWS * 3 // 4


def removed(engine: Engine, generation: Generation) -> int:
    with engine.connect() as connection:
        counted = text("SELECT pg_stat_get_tuples_deleted(to_regclass(:name))")
        return int(connection.execute(counted, {"name": f"vectormill.{generation.table_name}"}).scalar_one())


def test_writers_and_searches_go_on_while_a_live_index_is_built(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = draw_vectors(6000, 64)
    generation = make_collection(engine, vectors)
    is_over, num_done, failures = threading.Event(), Counter[str](), list[BaseException]()
    kind = generation.spec.kept_type

    def go_on(name: str, act: Callable[[int], None]) -> None:
        number = 0
        try:
            while not is_over.is_set():
                act(number)
                number += 1
                num_done[name] = number
        except BaseException as error:
            failures.append(error)

    def search(number: int) -> None:
        assert ask(engine, search_collection, generation, vectors[number % 6000], 5)["data"]

    def put(number: int) -> None:
        rows = make_rows(vectors[number : number + 1], kind, None)
        ask(engine, upsert_rows, generation.id, 9, [Item(f"new{number}", b"n")], rows, generation.spec)

    acts = {"search": search, "put": put}
    threads = [threading.Thread(target=go_on, args=each) for each in acts.items()]
    older = engine.connect()  # the build waits for a transaction that was there before it
    older.execute(text(f"LOCK TABLE vectormill.{generation.table_name} IN ROW EXCLUSIVE MODE"))
    wanted: dict[str, int] = {}

    def have_gone_on() -> bool:
        return all(num_done[name] >= wanted[name] for name in acts)

    def check() -> None:
        """Lets the build come to its end when one more of each has begun and ended since it was first looked at."""
        if not wanted:
            wanted.update({name: num_done[name] + 2 for name in acts})
        if failures or have_gone_on():
            older.close()

    monkeypatch.setattr("vectormill.collections.indexes.PAUSE_SECONDS", 0.05)
    for thread in threads:
        thread.start()
    build_indexes(start_run(engine, check=check)[0], generation)
    is_over.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert wanted
    assert have_gone_on()
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        found = search_collection(connection, generation, vectors[0], 5)
    assert found["num_rows_read"] is None
    assert {"0", "new0"} <= {match["key"] for match in found["data"]}


def test_the_progress_of_a_build_is_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexer.indexing.REPORT_SECONDS", 0.0)
    monkeypatch.setattr("vectormill.collections.indexes.PAUSE_SECONDS", 0.01)
    generation = make_collection(engine, draw_vectors(6000, 64))
    wish(engine, index_options="""'{"ef_construction": 200}'""")  # longer than a look, on any machine
    seen = []
    context, report = start_run(engine, check=lambda: seen.append(report.get("progress")))
    build_indexes(context, generation)
    loading = [entry for entry in seen if entry and "loading tuples" in entry["phase"]]
    assert loading
    assert 0 <= loading[-1]["share"] <= 1
    assert report["progress"] is None


def test_a_large_load_drops_the_index_and_says_so_unless_searches_use_it(
    engine: Engine, admin: Engine
) -> None:
    vectors = draw_vectors(NUM_ROWS)
    generation = make_collection(engine, vectors)
    build_indexes(start_run(engine)[0], generation)
    context, report = start_run(engine, kind=REINDEX)
    assert drop_before_bulk(context, NUM_ROWS // 10) is None
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        search_collection(connection, generation, vectors[0], 5)
    wait_for(lambda: any(index.last_used_at for index in indexes_of(engine, generation)))
    assert drop_before_bulk(context, NUM_ROWS) is None
    assert "searches use it" in report["kept_for_searches"]
    execute(admin, "SELECT pg_stat_reset()")
    because = drop_before_bulk(context, NUM_ROWS)
    assert because is not None
    assert "1,200 changes to 1,200 rows are more than 30%" in because
    assert names_of(engine, generation) == []
    build_indexes(context, generation)
    assert len(names_of(engine, generation)) == 1


def test_changes_of_metadata_alone_leave_the_vector_index_alone(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(10_000), describe)
    build_indexes(start_run(engine)[0], generation)
    (index,) = indexes_of(engine, generation)
    execute(
        engine,
        f'UPDATE vectormill.{generation.table_name}_attributes SET metadata = metadata || \'{{"lang": "it"}}\'',
    )
    query = text("""
        SELECT pg_stat_get_tuples_updated(to_regclass(:vectors)), pg_stat_get_tuples_updated(to_regclass(:attributes))
    """)
    names = {
        "vectors": f"vectormill.{generation.table_name}",
        "attributes": f"vectormill.{generation.table_name}_attributes",
    }

    def counted() -> tuple[int, int]:
        with engine.connect() as connection:
            vectors, attributes = connection.execute(query, names).one()
            return vectors, attributes

    wait_for(lambda: counted()[1] == 10_000)
    assert counted()[0] == 0
    assert indexes_of(engine, generation)[0].num_bytes == index.num_bytes


def test_fields_that_filters_name_and_kept_texts_have_indexes_of_their_own(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(6000), describe)
    attributes = f"vectormill.{generation.table_name}_attributes"
    wish(engine, filters="""'["lang", "year", "*", "it''s.deep"]'""", keep_text="true", index_policy="'none'")
    context, report = start_run(engine)
    build_indexes(context, generation)
    assert {index.method for index in indexes_of(engine, generation)} == {"btree", "gin"}
    assert len(report["built"]) == 8  # two for each field, one for all metadata, and one for texts
    execute(engine, f"ANALYZE {attributes}")  # or the plans depend on whether autovacuum came by
    for written, expected in (
        ({"year": 1984}, name_filter_index(generation.id, "year")),
        ({"year": {"in": [1984, 1985]}}, name_filter_index(generation.id, "year")),
        ({"year": {"gte": 2018}}, name_filter_index(generation.id, "year")),
        ({"it's.deep": "x"}, name_filter_index(generation.id, "it's.deep")),
        ({"tags": {"contains": "new"}}, name_filter_index(generation.id, "*")),
    ):
        condition = compile_filter(parse_filter(written), "metadata")
        used = find_used_indexes(
            engine, f"SELECT key FROM {attributes} WHERE {condition.sql}", condition.values
        )
        assert used - {f"{expected}_long"} == {expected}, written
    wish(engine, filters="""'["year"]'""", keep_text="false")
    build_indexes(start_run(engine)[0], generation)
    name = name_filter_index(generation.id, "year")
    assert names_of(engine, generation) == [name, f"{name}_long"]


def find_used_indexes(engine: Engine, statement: str, values: dict[str, Any]) -> set[str]:
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL plan_cache_mode = force_custom_plan"))
        (plan,) = connection.execute(text(f"EXPLAIN (FORMAT JSON) {statement}"), values).scalar_one()
    return {node["Index Name"] for node in walk_plan(plan["Plan"]) if "Index Name" in node}


def test_a_vector_of_a_text_that_was_put_after_the_build_is_found(engine: Engine) -> None:
    generation = make_collection(engine, draw_vectors(NUM_ROWS))
    build_indexes(start_run(engine)[0], generation)
    kind = SPEC.kept_type
    rows = make_rows(vector_of(b"late")[None], kind, None)
    with engine.begin() as connection:
        upsert_rows(connection, generation.id, 9, [Item("late", b"late")], rows, SPEC)
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        found = search_collection(connection, generation, vector_of(b"late"), 1)
    assert (found["num_rows_read"], found["data"][0]["key"]) == (None, "late")
