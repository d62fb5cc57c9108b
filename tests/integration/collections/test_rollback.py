"""A collection goes back to the generation that was live before: by the API, the client and the command line."""

import io
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client, encoding_meanwhile
from tests.building import NEXT, build, encode_all, put, rows_of, swap
from tests.commands import run
from tests.database import ask, execute
from tests.indexers import KeptSource, await_run, contents, indexing, look
from vectormill.client import Client
from vectormill.collections.collections import find_generation
from vectormill.collections.generations import (
    NewerRows,
    count_newer_rows,
    discard_generation,
    prune_retired_generations,
    roll_back,
)
from vectormill.collections.items import delete_items
from vectormill.jobs.item import Item
from vectormill.problems import ApiError
from vectormill.runs.run import CANCELLED, COMPLETED, REINDEX
from vectormill.runs.runs import claim_run, create_run, end_run


def make_swapped(engine: Engine) -> tuple[int, int]:
    """Numbers of the generation that was live, with `old`, and of the one that is, with one row put since."""
    put(engine, "old")
    encode_all(engine)
    first = ask(engine, find_generation, "docs")
    second = build(engine)
    swap(engine, second)
    put(engine, "since", spec=NEXT)
    encode_all(engine)
    return first.id, second.id


def test_the_client_rolls_back_and_is_told_what_is_missing_then(engine: Engine) -> None:
    first, second = make_swapped(engine)
    with api_client(engine) as http, Client(str(http.base_url)) as client:
        with pytest.raises(ApiError, match=r"of 1 row put since .* allow_missing") as refused:
            client.rollback_collection("docs")
        assert (refused.value.status, set(rows_of(engine, "docs"))) == (409, {"since"})
        answer = client.rollback_collection("docs", allow_missing=True)
        assert (answer["live"]["id"], answer["retired"]["id"]) == (first, second)
        assert (answer["num_newer_rows"], answer["num_missing_rows"]) == (1, 1)
        assert set(rows_of(engine, "docs")) == {"old"}
        assert client.rollback_collection("docs")["live"]["id"] == second
        assert set(rows_of(engine, "docs")) == {"since"}
        client.discard_generation("docs", first)
        with pytest.raises(ApiError, match="no generation to roll back to"):
            client.rollback_collection("docs")


def test_what_is_live_or_another_collections_is_not_given_up(engine: Engine) -> None:
    _, second = make_swapped(engine)
    with api_client(engine) as http, Client(str(http.base_url)) as client:
        with pytest.raises(ApiError, match="is live"):
            client.discard_generation("docs", second)
        with pytest.raises(ApiError, match=r"has no generation 4711") as refused:
            client.discard_generation("docs", 4711)
        assert refused.value.status == 404
        with pytest.raises(ApiError, match="There is no collection 'none'"):
            client.rollback_collection("none")


def test_a_collection_at_which_a_run_is_at_work_is_not_rolled_back(engine: Engine) -> None:
    make_swapped(engine)
    with engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO vectormill.runs (id, collection_id, kind, state)
                SELECT gen_random_uuid(), id, 'reindex', 'running' FROM vectormill.collections""")
        )
    with (
        api_client(engine) as http,
        Client(str(http.base_url)) as client,
        pytest.raises(ApiError, match="is working on collection 'docs'; cancel it"),
    ):
        client.rollback_collection("docs", allow_missing=True)


def test_the_command_line_rolls_back(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_swapped(engine)
    with api_client(engine) as http:
        place = ["--api-url", str(http.base_url)]
        assert run("collections", "rollback", "docs", *place)
        assert "--yes" in capsys.readouterr().err
        assert run("collections", "rollback", "docs", "--yes", *place) == 0
        said = capsys.readouterr().out
        assert f"docs uses generation {first} again (fake, " in said
        assert "1 of these rows has no stored text and is missing" in said
        assert run("collections", "discard", "docs", str(second), *place) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stdin", "is_done", "asks"),
    [
        (Terminal("y\n"), True, True),
        (Terminal("n\n"), False, True),
        (Terminal("\n"), False, True),  # no is what Enter means
        (Terminal(""), False, True),
        (io.StringIO("y\n"), False, False),  # nobody is there to be asked
    ],
    ids=["yes", "no", "Enter", "end of input", "no terminal"],
)
def test_a_rollback_that_leaves_rows_out_asks_on_a_terminal_and_nowhere_else(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stdin: io.StringIO,
    is_done: bool,
    asks: bool,
) -> None:
    make_swapped(engine)
    stdin.seek(0)
    monkeypatch.setattr(sys, "stdin", stdin)
    with api_client(engine) as http:
        code = run("collections", "rollback", "docs", "--api-url", str(http.base_url))
    said = capsys.readouterr()
    assert (code == 0) == is_done
    assert set(rows_of(engine, "docs")) == ({"old"} if is_done else {"since"})
    assert ("Roll back? [y/N]" in said.err) == asks
    assert ("--yes" in said.err) == (not asks)
    assert ("docs uses generation" in said.out) == is_done


def keep_texts(engine: Engine) -> None:
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")


def begin_second_generation(engine: Engine) -> None:
    """Make an empty second generation live, beside a first one with a row of which the text is kept."""
    put(engine, "seed")
    keep_texts(engine)
    encode_all(engine)
    swap(engine, build(engine))


def follow(engine: Engine, answer: Mapping[str, Any]) -> None:
    """Let the run of a rollback come to its end, beside workers."""
    source = KeptSource()
    with indexing(engine, source, on_open=source.open), encoding_meanwhile(engine):
        run = await_run(engine, UUID(answer["run_id"]))
    assert (run.state, run.error) == (COMPLETED, None)


def test_what_was_put_and_deleted_since_the_swap_is_so_after_a_rollback_too(engine: Engine) -> None:
    put(engine, "seed")
    keep_texts(engine)
    put(engine, "old", "changed", "gone", content="before")
    encode_all(engine)
    swap(engine, build(engine))
    since = put(engine, "changed", "new", "new and gone", content="since", spec=NEXT)
    encode_all(engine)
    ask(engine, delete_items, "docs", ["gone", "new and gone"])
    still_open = put(engine, "open", content="since", spec=NEXT)
    with api_client(engine) as http, Client(str(http.base_url)) as client:
        follow(engine, client.rollback_collection("docs"))
    rows = rows_of(engine, "docs")
    assert set(rows) == {"seed", "old", "changed", "new", "open"}
    assert (rows["changed"], rows["new"], rows["open"]) == (since.seq, since.seq, still_open.seq)
    assert contents(engine)["changed"][0] == Item("changed", b"since changed").content_hash()


def test_a_rollback_before_the_run_of_the_last_one_has_ended_loses_nothing(engine: Engine) -> None:
    begin_second_generation(engine)
    put(engine, "new", spec=NEXT)
    encode_all(engine)
    with api_client(engine) as http, Client(str(http.base_url)) as client:
        first = client.rollback_collection("docs")
        client.rollback_collection("docs")
        last = client.rollback_collection("docs")
        assert look(engine, UUID(first["run_id"])).state == CANCELLED
        follow(engine, last)
    assert set(rows_of(engine, "docs")) == {"seed", "new"}


def test_rows_that_were_carried_into_a_later_generation_are_carried_again_by_the_next_rollback(
    engine: Engine,
) -> None:
    begin_second_generation(engine)
    put(engine, "new", spec=NEXT)
    encode_all(engine)
    waiting = ask(engine, roll_back, "docs")
    swap(engine, build(engine, replace(NEXT, revision="3")))
    follow(engine, {"run_id": str(waiting.run_id)})
    assert set(rows_of(engine, "docs")) == {"new"}
    follow(engine, {"run_id": str(ask(engine, roll_back, "docs").run_id)})
    assert set(rows_of(engine, "docs")) == {"seed", "new"}


def test_the_generation_from_which_a_rollback_carries_rows_stays_until_its_run_has_ended(
    engine: Engine,
) -> None:
    begin_second_generation(engine)
    encode_all(engine)
    undone = ask(engine, roll_back, "docs")
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE vectormill.generations SET retired_at = now() - interval '1 day' WHERE id = :id"),
            {"id": undone.retired.id},
        )
    assert prune_retired_generations(engine, 0) == 0
    follow(engine, {"run_id": str(undone.run_id)})
    assert prune_retired_generations(engine, 0) == 1


def test_a_run_that_was_queued_before_a_rollback_waits_until_what_is_newer_was_carried(
    engine: Engine,
) -> None:
    begin_second_generation(engine)
    encode_all(engine)
    waiting = ask(engine, create_run, "docs", REINDEX)
    assert waiting is not None
    undone = ask(engine, roll_back, "docs")
    claimed = ask(engine, claim_run, "indexer", 30.0)
    assert claimed is not None
    assert claimed[1].id == undone.run_id
    assert ask(engine, claim_run, "indexer", 30.0) is None
    ask(engine, end_run, claimed[0], COMPLETED)
    later = ask(engine, claim_run, "indexer", 30.0)
    assert later is not None
    assert later[1].id == waiting.id


def test_a_rollback_past_a_generation_that_was_given_up_carries_all_that_is_newer(engine: Engine) -> None:
    begin_second_generation(engine)
    put(engine, "second", spec=NEXT)
    encode_all(engine)
    third = replace(NEXT, revision="3")
    swap(engine, build(engine, third))
    encode_all(engine)
    undone = ask(engine, roll_back, "docs")
    follow(engine, {"run_id": str(undone.run_id)})
    ask(engine, discard_generation, undone.retired.id)
    assert ask(engine, count_newer_rows, "docs") == NewerRows(1, 0)
    follow(engine, {"run_id": str(ask(engine, roll_back, "docs").run_id)})
    assert set(rows_of(engine, "docs")) == {"seed", "second"}


def test_a_generation_whose_table_a_user_s_view_reads_keeps_no_other_from_being_dropped(
    engine: Engine,
) -> None:
    first, _ = make_swapped(engine)
    swap(engine, build(engine, replace(NEXT, revision="3")))
    execute(engine, f"CREATE VIEW mine AS SELECT key FROM vectormill.generation_{first}")
    execute(engine, "UPDATE vectormill.generations SET retired_at = now() - interval '1 day'")
    assert prune_retired_generations(engine, 0) == 1
    execute(engine, "DROP VIEW mine")
    assert prune_retired_generations(engine, 0) == 1
