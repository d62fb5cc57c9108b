"""Items by client and command line, against a real API."""

import io
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, encode_waiting, encoding_meanwhile, many, submit
from tests.commands import run as run_command
from vectormill.cli import exits
from vectormill.client import Client
from vectormill.problems import ApiError


@pytest.fixture
def api(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.delenv("VECTORMILL_API_KEY", raising=False)
    with api_client(engine) as api:
        submit(api, many(3), collection="docs")
        encode_waiting(engine)
        monkeypatch.setenv("VECTORMILL_API_URL", str(api.base_url))
        yield api


run = partial(run_command, "items")


def test_a_client_puts_gets_and_deletes_whatever_the_key_is(api: httpx.Client, engine: Engine) -> None:
    with Client(str(api.base_url)) as client, encoding_meanwhile(engine):
        for key in ("a/b c", ".", "..", "%2F", "ä?#", "a\nb\n"):
            assert client.put_item("docs", key, "a text", metadata={"page": 1})["is_searchable"]
            item = client.get_item("docs", key, has_vector=True)
            assert (item["key"], item["metadata"], len(item["embedding"] or ())) == (key, {"page": 1}, 8)
            client.delete_item("docs", key)
            with pytest.raises(ApiError, match="no item"):
                client.get_item("docs", key)
            assert client.put_item("docs", key, "a text", wait_seconds=0)["is_searchable"] is False


def test_a_client_deletes_more_keys_than_fit_into_a_request(api: httpx.Client) -> None:
    with Client(str(api.base_url)) as client:
        answer = client.delete_items("docs", (f"k{number}" for number in range(2500)))
    assert answer == {"num_keys": 2500, "num_deleted": 3}


def test_the_command_line_puts_gets_and_deletes(
    api: httpx.Client, engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, put = list[str](), Client.put_item

    def note_text(client: Client, collection: str, key: str, text: str, **more: Any) -> Any:
        texts.append(text)
        return put(client, collection, key, text, **more)

    monkeypatch.setattr(Client, "put_item", note_text)
    with encoding_meanwhile(engine):
        assert run("put", "docs", "a/b", "a text", "--metadata", '{"page": 1}') == 0
        assert "a/b is searchable in docs." in capsys.readouterr().err
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffSüß\r\n".encode()), "latin-1"))
        assert run("put", "docs", "piped", "-", "--json") == 0
        assert json.loads(capsys.readouterr().out)["key"] == "piped"
        assert texts[-1] == "Süß\r\n", "whatever the locale, and without the byte order mark"
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\ncaf\xe9"), "latin-1"))
        assert run("put", "docs", "piped", "-") == exits.BAD_INPUT
        assert "standard input, line 2: not valid UTF-8" in capsys.readouterr().err
    assert run("put", "docs", "late", "a text", "--wait", "0") == 0
    assert "not searchable yet; `vectormill status" in capsys.readouterr().err
    assert run("get", "docs", "a/b") == 0
    assert json.loads(capsys.readouterr().out)["metadata"] == {"page": 1}
    assert run("get", "docs", "nothing") == exits.BAD_INPUT
    assert "has no item 'nothing'" in capsys.readouterr().err


def test_the_command_line_deletes_the_keys_of_a_file(
    api: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys.txt").write_text("\ufeffk1\n\nnever there\r\n", newline="")
    assert run("delete", "docs", "k0", "--from", str(tmp_path / "keys.txt")) == 0
    assert "Deleted 2 of 3 keys from docs." in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeffk2\nü\n".encode()), "latin-1"))
    assert run("delete", "docs", "--from", "-", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"num_keys": 2, "num_deleted": 1}
    assert run("delete", "docs") == exits.BAD_INPUT
    assert run("delete", "docs", "--from", str(tmp_path / "gone.txt")) == exits.BAD_INPUT
