"""A collection goes back to the generation that was live before: by the API, the client and the command line."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from tests.api_server import api_client
from tests.building import NEXT, ask, build, encode_all, put, rows_of, swap
from vectormill.cli.app import main
from vectormill.client import Client
from vectormill.db.collections.collections import find_generation
from vectormill.problems import ApiError


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
        answer = client.rollback_collection("docs")
        assert (answer["live"]["id"], answer["retired"]["id"], answer["num_newer_rows"]) == (first, second, 1)
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
        with pytest.raises(ApiError, match="no collection 'none'"):
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
        pytest.raises(ApiError, match="is at work on collection 'docs'; cancel it"),
    ):
        client.rollback_collection("docs")


def test_the_command_line_rolls_back(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = make_swapped(engine)
    with api_client(engine) as http:
        place = ["--api-url", str(http.base_url)]
        with pytest.raises(SystemExit) as end:
            main(["collections", "rollback", "docs", *place])
        assert not end.value.code
        said = capsys.readouterr().out
        assert f"docs is generation {first} again (fake, " in said
        assert "1 rows that were put since it was live are missing" in said
        with pytest.raises(SystemExit) as end:
            main(["collections", "discard", "docs", str(second), *place])
        assert not end.value.code
