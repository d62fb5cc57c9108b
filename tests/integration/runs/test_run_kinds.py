"""Runs of collections of scores and of records: the same life as that of vectors, with what is theirs in every row."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine, text

from tests.api_server import encoding_meanwhile
from tests.database import ask
from tests.indexers import (
    ListedSource,
    await_run,
    contents,
    count_encoded,
    indexing,
    row,
    start_run,
    wanted,
)
from tests.kinds import RECORDS, SCORES, grouped_of, numbers_of
from vectormill.cli.collections import print_check
from vectormill.collections.collection import CollectionOptions
from vectormill.collections.collections import create_collection, find_generation
from vectormill.collections.items import find_item
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item, join_pair, split_pair
from vectormill.models.registry import Registry
from vectormill.runs.run import CHECK, Run, RunCounts
from vectormill.settings import Settings
from vectormill.sources.own_texts import OwnTextReader
from vectormill.sources.reader import SourcePlace

OTHERS = pytest.mark.parametrize("spec", [SCORES, RECORDS], ids=lambda spec: spec.task)


def of_kind(spec: EncodingSpec, items: Iterable[Item]) -> list[Item]:
    """The items as they are, or every other one as a pair where the kind has pairs."""
    if spec != SCORES:
        return list(items)
    return [
        replace(item, text=join_pair(item.text, b"second")) if number % 2 else item
        for number, item in enumerate(items)
    ]


def assert_results_fit(engine: Engine, items: Iterable[Item], spec: EncodingSpec) -> None:
    """Each row has what comes of its own text, and the text, or both of a pair, beside it."""
    for item in items:
        kept = ask(engine, find_item, "docs", item.key)
        assert kept.results is not None
        if spec == SCORES:
            np.testing.assert_array_equal(kept.results[0], numbers_of(item.text))
        else:
            assert json.loads(kept.results[0]) == grouped_of(item.text)
        first, second = split_pair(item.text)
        assert kept.text == first.decode()
        assert kept.text_pair == (None if second is None else second.decode())


@OTHERS
def test_a_run_makes_the_collection_what_its_source_is(engine: Engine, spec: EncodingSpec) -> None:
    ask(engine, create_collection, "docs", spec, CollectionOptions(keep_text=True), 100)
    before = of_kind(spec, (row(f"k{number}", f"text {number}", page=number) for number in range(12)))
    after = [
        *before[:6],
        replace(before[6], metadata=b'{"page":99}'),
        replace(before[7], text=before[7].text + b" changed"),
        replace(before[8], text=before[9].text),  # two that change places
        replace(before[9], text=before[8].text),
        Item("renamed", before[11].text, b'{"page":11}'),
        Item("new", b"a new text"),
        Item("broken", b" "),
    ]
    step(engine, spec, before, RunCounts(12, num_new=12), 12)
    step(engine, spec, before, RunCounts(12, 12), 12)
    counts = RunCounts(13, 6, 1, num_new=2, num_changed=1, num_moved=3, num_deleted=1, num_failed=1)
    run = step(engine, spec, after, counts, 15)
    assert run.report["indexing"]["because"].endswith("have no vector index.")
    with indexing(engine, ListedSource(after[:5])):
        held = await_run(engine, start_run(engine))
    assert held.state == "held"
    assert contents(engine) == wanted(after[:-1])


def step(engine: Engine, spec: EncodingSpec, items: list[Item], counts: RunCounts, num_encoded: int) -> Run:
    """A run of this source, after which the collection is what the source is; the texts of all runs are counted."""
    with indexing(engine, ListedSource(items)), encoding_meanwhile(engine):
        run = await_run(engine, start_run(engine, max_change_share=0.5))
    assert run.error is None
    assert run.counts == counts
    assert count_encoded(engine) == num_encoded
    sound = [item for item in items if item.text.strip()]
    assert contents(engine) == wanted(sound)
    assert_results_fit(engine, sound, spec)
    return run


@OTHERS
def test_a_collection_that_keeps_its_texts_is_built_anew_from_itself(
    engine: Engine, spec: EncodingSpec
) -> None:
    ask(engine, create_collection, "docs", spec, CollectionOptions(keep_text=True), 100)
    items = of_kind(spec, (row(f"k{number}", f"text {number}", page=number) for number in range(6)))
    with indexing(engine, ListedSource(items)), encoding_meanwhile(engine):
        await_run(engine, start_run(engine))
    place = SourcePlace(engine, Settings(), Registry({}), collection="docs")
    read = [item for batch in OwnTextReader(place).read() for item in batch]
    # What Postgres wrote of the metadata has other white space.
    assert {item.key: item.text for item in read} == {item.key: item.text for item in items}


BROKEN: list[tuple[EncodingSpec, str, str]] = [
    (SCORES, "UPDATE {table} SET score = 'NaN' WHERE key = 'k3'", r"1 scores are not numbers.*\('k3'\)"),
    (SCORES, "UPDATE {table} SET score = 1.5 WHERE key = 'k3'", r"are out of range \('k3'\)"),
    (SCORES, "UPDATE {table} SET numbers = '[1,0,0]' WHERE key = 'k3'", r"less than 0.98; 1 differ \('k3'\)"),
    (SCORES, "UPDATE {attributes} SET text_pair = 'x' WHERE key = 'k3'", r"do not match their scores \('k3'"),
    (RECORDS, "UPDATE {table} SET output = '[]' WHERE key = 'k3'", r"1 records are not objects of types \('k3'\)"),
    (RECORDS, "UPDATE {table} SET output = '{{}}' WHERE key = 'k3'", "less than 1; 1 differ"),
    (RECORDS, "UPDATE {attributes} SET text = 'x' WHERE key = 'k3'", r"do not match their records \('k3'"),
]  # fmt: skip


@OTHERS
def test_a_check_finds_what_is_wrong_and_names_it(
    engine: Engine, spec: EncodingSpec, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(engine, create_collection, "docs", spec, CollectionOptions(keep_text=True), 100)
    items = of_kind(spec, (row(f"k{number}", f"text {number}") for number in range(8)))
    with indexing(engine, ListedSource(items)), encoding_meanwhile(engine):
        await_run(engine, start_run(engine))
        report = check(engine)
        assert (report["problems"], report["is_good"]) == ([], True)
        assert report["texts"]["num_compared"] == report["hashes"]["num_compared"] == 8
        assert report["texts"]["smallest"] > 0.999
        generation = ask(engine, find_generation, "docs")
        assert report[generation.kind]["num_rows"] == 8
        assert report["unchecked"] == [f"Recall: {generation.kind} have no vector index."]
        print_check("docs", report)
        shown = capsys.readouterr().out
        assert re.search(rf"{generation.kind}\s+8 rows, 0 invalid", shown)
        assert "No problems found." in shown
        table = f"vectormill.{generation.table_name}"
        names = {"table": table, "attributes": f"{table}_attributes"}
        for of, statement, said in BROKEN:
            if of != spec:
                continue
            with engine.begin() as connection:
                for name in names.values():
                    connection.execute(text(f"CREATE TABLE {name}_before AS SELECT * FROM {name}"))
                connection.execute(text(statement.format(**names)))
            assert_found(check(engine), said)
            mend(engine, names, statement)


def check(engine: Engine) -> dict[str, Any]:
    run = await_run(engine, start_run(engine, kind=CHECK))
    assert (run.state, run.error) == ("completed", None)
    report: dict[str, Any] = dict(run.report["checking"])
    return report


def assert_found(report: dict[str, Any], said: str) -> None:
    assert report["is_good"] is False
    assert any(re.search(said, problem) for problem in report["problems"]), report["problems"]


def mend(engine: Engine, names: dict[str, str], statement: str) -> None:
    """Takes the change back."""
    name = names["attributes" if "{attributes}" in statement else "table"]
    column = statement.split(" SET ")[1].split(" ", 1)[0]
    with engine.begin() as connection:
        connection.execute(
            text(
                f"UPDATE {name} AS now SET {column} = was.{column} FROM {name}_before AS was WHERE now.key = was.key"
            )
        )
        for each in names.values():
            connection.execute(text(f"DROP TABLE {each}_before"))
