"""Runs that build a generation of another vector space, by the real indexer; a stand-in encodes."""

from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.api_server import encoding_meanwhile
from tests.building import BITS, NEXT, encode_all, put, rows_of
from tests.database import ask, execute
from tests.indexers import ListedSource, await_run, contents, indexing, row, wanted
from tests.kinds import RECORDS, SCORES
from tests.protocol import SPEC
from vectormill.collections.collection import RETIRED
from vectormill.collections.collections import find_building, find_generation
from vectormill.collections.generations import roll_back
from vectormill.domain.encoding import EncodingSpec
from vectormill.runs.run import COMPLETED, FAILED, REINDEX
from vectormill.runs.runs import create_run
from vectormill.sources.own_texts import OwnTextReader

ROWS = [row(f"k{number}", f"text {number}", page=number) for number in range(20)]


def start(engine: Engine, spec: EncodingSpec | None, **options: Any) -> UUID:
    run = ask(engine, create_run, "docs", REINDEX, spec=spec, options=options)
    assert run is not None
    return run.id


@pytest.mark.parametrize(
    ("first", "spec"),
    [
        (SPEC, NEXT),
        (SPEC, BITS),
        (SCORES, replace(SCORES, labels=("no", "yes"), dimensions=2)),
        (RECORDS, replace(RECORDS, extract_schema='{"机构":null}')),
        (RECORDS, replace(RECORDS, confidences=True)),
    ],
    ids=["same column", "another column", "other labels", "another schema", "confidences"],
)
def test_a_run_for_another_space_builds_checks_and_swaps(
    engine: Engine, first: EncodingSpec, spec: EncodingSpec
) -> None:
    put(engine, "k0", "vanished", spec=first)
    encode_all(engine)
    before = ask(engine, find_generation, "docs")
    with indexing(engine, ListedSource(ROWS)), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, spec))
        assert (run.state, run.error) == (COMPLETED, None)
        assert run.report["checking"]["is_good"] is True
        assert run.report["checking"]["texts"]["num_compared"] >= 8
        live = ask(engine, find_generation, "docs")
        assert live.spec == spec
        assert run.report["swapping"]["live"] == live.id
        assert contents(engine) == wanted(ROWS)
        again = await_run(engine, start(engine, spec))
        assert (again.state, again.counts.num_unchanged) == (COMPLETED, 20)
        assert ask(engine, find_generation, "docs") == live
    assert ask(engine, roll_back, "docs").live.id == before.id
    assert set(contents(engine)) == {"k0", "vanished"}
    assert ask(engine, roll_back, "docs").live.id == live.id
    with engine.connect() as connection:
        state = text("SELECT state FROM vectormill.generations WHERE id = :id")
        assert connection.execute(state, {"id": before.id}).scalar_one() == RETIRED


def test_what_clients_put_during_a_build_is_there_before_and_after_the_swap(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)

    def meanwhile(position: int) -> None:
        put(engine, f"new{position}", "k3", content="newer")
        assert f"new{position}" not in rows_of(engine, "docs")

    with indexing(engine, ListedSource(ROWS, before=meanwhile)), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, NEXT))
    assert (run.state, run.error) == (COMPLETED, None)
    found = contents(engine)
    assert set(found) == set(wanted(ROWS)) | {f"new{position}" for position in range(0, 20, 3)}
    assert found["k3"] != wanted(ROWS)["k3"]


def test_a_failed_canary_ends_the_run_with_its_reason_and_leaves_the_live_generation(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    live = ask(engine, find_generation, "docs")
    with indexing(engine, ListedSource(ROWS)), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, NEXT, least_cosine=1.5))
        assert run.state == FAILED
        assert "was not made live: Of 8 texts that were encoded again, the worst agrees to" in (
            run.error or ""
        )
        assert ask(engine, find_generation, "docs") == live
        unfit = ask(engine, find_building, "docs")
        assert unfit is not None
        assert set(rows_of(engine, "docs")) == {"old"}
        again = await_run(engine, start(engine, NEXT))
        assert again.state == COMPLETED
        assert ask(engine, find_generation, "docs").id not in (live.id, unfit.id)


def test_a_view_that_others_depend_on_ends_the_run_with_their_names(engine: Engine) -> None:
    put(engine, "old")
    encode_all(engine)
    execute(engine, "CREATE VIEW mine AS SELECT key FROM docs")
    with indexing(engine, ListedSource(ROWS)), encoding_meanwhile(engine):
        run = await_run(engine, start(engine, replace(BITS, revision="3")))
    assert run.state == FAILED
    assert "view mine depends on view docs" in (run.error or "")
    assert set(rows_of(engine, "docs")) == {"old"}


def test_what_a_reading_of_own_texts_missed_is_not_gone(engine: Engine) -> None:
    # A put is committed behind the page that would have had it; its place among the writers is before the run's.
    put(engine, "late")
    encode_all(engine)
    with indexing(engine, ListedSource([], tells_what_vanished=OwnTextReader.tells_what_vanished)):
        run = await_run(engine, start(engine, None, confirm=True))
    assert (run.state, run.counts.num_deleted) == (COMPLETED, 0)
    assert set(rows_of(engine, "docs")) == {"late"}
