"""Collections of scores and of records, beside those of vectors. Real Postgres, no model."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from tests.building import build, encode_all, swap
from tests.database import ask, execute
from tests.kinds import LABELS, RECORDS, SCORES, grouped_of, numbers_of, records_of
from tests.protocol import SPEC, claim_next, make_items, submit
from vectormill.collections import generation_tables
from vectormill.collections.collection import HNSW, CollectionOptions
from vectormill.collections.collections import create_collection, find_generation
from vectormill.collections.exports import Inclusion, compose_statement
from vectormill.collections.items import find_item
from vectormill.db.session import walk_plan
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SpecMismatch, WrongKind
from vectormill.jobs.chunk import ChunkOutcome
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.export import read_results
from vectormill.jobs.item import UNSTORABLE_RECORD, Item, join_pair
from vectormill.jobs.jobs import find_job, list_item_errors
from vectormill.ragged import Ragged
from vectormill.results.table import choose_kind

PAIR = Item("pair", join_pair("einsätze".encode(), b"second"), b'{"page": 7}')
KEEPING = CollectionOptions(keep_text=True)


def fill(engine: Engine, spec: EncodingSpec, *items: Item) -> Any:
    job = submit(engine, items, collection="docs", spec=spec)
    encode_all(engine)
    return ask(engine, find_job, job.id)


def select(engine: Engine, statement: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in execute(engine, statement)]


def test_scores_are_columns_of_the_view(engine: Engine) -> None:
    ask(engine, create_collection, "docs", SCORES, KEEPING, 100)
    alone = Item("alone", b"one text")
    assert fill(engine, SCORES, PAIR, alone).state == "completed"
    found = select(
        engine,
        "SELECT key, score, label, probabilities, metadata, text, text_pair FROM docs ORDER BY key DESC",
    )
    for row, item in zip(found, (PAIR, alone), strict=True):
        numbers = numbers_of(item.text)
        assert row[:3] == (item.key, pytest.approx(float(numbers.max())), LABELS[numbers.argmax()])
        assert row[3] == pytest.approx(dict(zip(LABELS, numbers.tolist(), strict=True)))
    assert found[0][4:] == ({"page": 7}, "einsätze", "second")
    assert found[1][4:] == (None, "one text", None)


def test_a_score_without_labels_has_none(engine: Engine) -> None:
    spec = replace(SCORES, labels=(), dimensions=1)
    ask(engine, create_collection, "docs", spec, KEEPING, 100)
    fill(engine, spec, PAIR)
    assert select(engine, "SELECT score, label, probabilities FROM docs") == [(1.0, None, None)]


def test_records_lie_in_the_view_by_type(engine: Engine) -> None:
    ask(engine, create_collection, "docs", RECORDS, KEEPING, 100)
    assert fill(engine, RECORDS, *make_items(3), Item("quoted", b'a "b" \\u0000 \t c', b"{}")).num_done == 4
    found = select(engine, "SELECT key, output -> '人物', output, metadata, text FROM docs ORDER BY key")
    assert found[0] == ("k0", grouped_of(b"text k 0")["人物"], grouped_of(b"text k 0"), None, "text k 0")
    assert found[3][2] == grouped_of(b'a "b" \\u0000 \t c')
    spans = "SELECT jsonb_path_query(output, '$.人物[*][0].span') #>> '{}' FROM docs WHERE key = 'k1'"
    assert select(engine, spans) == [("text k 1",), ("text k 1",)]


def test_a_job_reads_its_scores_out_of_the_collection_in_its_own_order(engine: Engine) -> None:
    items = make_items(10)[::-1]
    job = fill(engine, SCORES, *items)
    blocks = list(read_results(engine, job.id))
    assert [key for block in blocks for key in block.keys] == [item.key for item in items]
    found = np.concatenate([block.results for block in blocks])
    np.testing.assert_array_equal(found, np.stack([numbers_of(item.text) for item in items]))


def test_a_job_reads_its_records_out_of_the_collection_as_a_list(engine: Engine) -> None:
    items = make_items(10)[::-1]
    job = fill(engine, RECORDS, *items)
    blocks = list(read_results(engine, job.id))
    assert [key for block in blocks for key in block.keys] == [item.key for item in items]
    found = [json.loads(record or b"") for block in blocks for record in block.results]
    in_order = [sorted(records_of(item.text), key=lambda path: path[0]["type"]) for item in items]
    assert found == in_order


@pytest.mark.parametrize("spec", [SPEC, SCORES, RECORDS], ids=lambda spec: spec.task)
def test_a_collection_never_changes_its_kind(engine: Engine, spec: EncodingSpec) -> None:
    fill(engine, spec, *make_items(1))
    kept = {"embed": "vectors", "score": "scores", "extract": "records"}
    for other in (SPEC, SCORES, RECORDS):
        if other != spec:
            gives = f"contains {kept[spec.task]}, but the task {other.task} produces {kept[other.task]}"
            said = f"{gives}.* or the task {spec.task} "
            with pytest.raises(WrongKind, match=said):
                submit(engine, make_items(1), collection="docs", spec=other)
            with pytest.raises(WrongKind, match=said):
                build(engine, other)
    with pytest.raises(SpecMismatch, match="revision is '1', not '2'"):
        submit(engine, make_items(1), collection="docs", spec=replace(spec, revision="2"))
    assert ask(engine, find_generation, "docs").kind == kept[spec.task]


def test_no_index_of_vectors_is_wished_for_what_has_none(engine: Engine) -> None:
    with pytest.raises(WrongKind, match="An HNSW index needs vectors, but collection 'docs' contains scores"):
        ask(engine, create_collection, "docs", SCORES, CollectionOptions(index_policy=HNSW), 100)
    ask(engine, create_collection, "docs", SPEC, CollectionOptions(index_policy=HNSW), 100)


BAD_RECORDS = (
    b'[[{"type":"a","span":"x\\u0000y","offset":[0,3]}]]',
    b'[[{"type":"a\\u0000","span":"","offset":[0,0]}]]',
    b'[[{"type":"a","span":"\\ud800","offset":[0,1]}]]',
    b'[[{"type":"a","span":"\xff","offset":[0,1]}]]',
    b"[[]]",
    b'{"a": 1}',
    b"[[" + b"[" * 100_000,
)


def test_records_that_jsonb_refuses_fail_their_item_and_no_other(engine: Engine) -> None:
    for bad in BAD_RECORDS:
        commit_record(engine, bad)


def commit_record(engine: Engine, bad: bytes) -> None:
    good = b'[[{"type":"a","span":"a\\\\u0000","offset":[0,8]}]]'
    items = make_items(3)
    job = submit(engine, items, collection="docs", spec=RECORDS)
    claimed = claim_next(engine)
    rows = [np.frombuffer(row, dtype=np.uint8) for row in (good, bad, b"[]")]
    results, everything = Ragged.from_rows(rows, np.uint8), np.arange(3)
    assert ask(engine, complete_chunk, claimed, items, everything, results, ChunkOutcome({}, 3, 3))
    (error,) = ask(engine, list_item_errors, job.id, after=None, limit=10)
    ended = ask(engine, find_job, job.id)
    assert (error.key, error.code) == ("k1", UNSTORABLE_RECORD)
    assert (ended.state, ended.num_done, ended.num_failed) == ("completed_with_errors", 2, 1)
    found = select(engine, "SELECT key, output FROM docs ORDER BY key")
    assert found == [("k0", {"a": [[{"type": "a", "span": "a\\u0000", "offset": [0, 8]}]]}), ("k2", {})]


def test_a_swap_replaces_a_view_of_scores_in_place_whatever_its_labels(engine: Engine) -> None:
    fill(engine, SCORES, Item("k", b"text"))
    execute(engine, "CREATE VIEW mine AS SELECT key, probabilities FROM docs")
    others = replace(SCORES, labels=("a", "b"), dimensions=2)
    building = build(engine, others)
    fill(engine, SCORES, Item("k", b"text"))
    swap(engine, building)
    ((probabilities,),) = select(engine, "SELECT probabilities FROM mine")
    assert probabilities == pytest.approx(dict(zip("ab", numbers_of(b"text", 2).tolist(), strict=True)))


@pytest.mark.parametrize("spec", [SCORES, RECORDS], ids=lambda spec: spec.task)
def test_rows_that_fill_several_arrays_are_all_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, spec: EncodingSpec
) -> None:
    monkeypatch.setattr(generation_tables, "MAX_ARRAY_BYTES", 100)
    items = make_items(20)
    job = submit(engine, items, collection="docs", spec=spec, chunk_max_items=20)
    encode_all(engine)
    assert ask(engine, find_job, job.id).num_done == 20
    for item in items:
        kept = ask(engine, find_item, "docs", item.key)
        assert kept.results is not None
        if spec == SCORES:
            np.testing.assert_array_equal(kept.results[0], numbers_of(item.text))
        else:
            assert json.loads(kept.results[0]) == grouped_of(item.text)


MANY = """
    INSERT INTO vectormill.{table} (key, content_hash, {columns}, job_seq)
    SELECT 'k' || to_char(number, 'FM000000'), content_hash, {columns}, 1
      FROM vectormill.{table}, generate_series(1, 20000) AS number
"""


MANY_ATTRIBUTES = """
    INSERT INTO vectormill.{table}_attributes (key, metadata, job_seq)
    SELECT key, '{{}}', 1 FROM vectormill.{table} WHERE key <> 'a'
"""


@pytest.mark.parametrize("spec", [SCORES, RECORDS], ids=lambda spec: spec.task)
def test_what_is_asked_often_reads_no_more_rows_than_it_has_to(engine: Engine, spec: EncodingSpec) -> None:
    fill(engine, spec, Item("a", b"text"))
    generation = ask(engine, find_generation, "docs")
    columns = ", ".join(column.name for column in choose_kind(spec).columns(spec))
    with engine.begin() as connection:
        for statement in (MANY, MANY_ATTRIBUTES):
            connection.execute(text(statement.format(table=generation.table_name, columns=columns)))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("ANALYZE"))
    page = compose_statement(generation, Inclusion(text=True))
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        values = {"after": "k010000", "limit": 500, "most_bytes": 1 << 20}
        plans = {
            "page": explain(driver, page.as_string(driver), values),
            "one row of the view": explain(driver, "SELECT * FROM docs WHERE key = 'k000007'", {}),
            "all rows": explain(driver, f"SELECT key, {columns.partition(',')[0]} FROM docs", {}),
        }
    for name in ("page", "one row of the view"):
        assert "Seq Scan" not in [node["Node Type"] for node in plans[name]], name
    # Neither attributes nor probabilities, which nobody asked for.
    assert [node["Node Type"] for node in plans["all rows"]] == ["Seq Scan"]


def explain(driver: Any, statement: str, values: dict[str, Any]) -> list[Any]:
    (plan,) = driver.execute("EXPLAIN (FORMAT JSON) " + statement, values or None).fetchone()[0]
    return list(walk_plan(plan["Plan"]))


@pytest.mark.parametrize("spec", [SCORES, RECORDS], ids=lambda spec: spec.task)
def test_an_expression_of_ones_own_may_have_an_index(engine: Engine, spec: EncodingSpec) -> None:
    fill(engine, spec, *make_items(3))
    table = ask(engine, find_generation, "docs").table_name
    of = "(score)" if spec == SCORES else "USING gin (output)"
    condition = "score > 0.5" if spec == SCORES else "output ? '人物'"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE INDEX mine ON vectormill.{table} {of}"))
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        driver = connection.connection.driver_connection
        plan = explain(driver, f"SELECT key FROM docs WHERE {condition}", {})
    assert "mine" in [node.get("Index Name") for node in plan]
