"""`vectormill search` asks for what was typed, and shows what was asked for."""

import json
import re
from typing import Any

import pytest

from vectormill.cli.app import main
from vectormill.client import Client
from vectormill.client.answers import Matches
from vectormill.domain.errors import InvalidOption
from vectormill.search.filter import parse_filter, read_filters


def test_a_filter_is_read_as_it_is_typed() -> None:
    for written, expected in [
        ([], None),
        (["lang=de"], {"lang": {"eq": "de"}}),
        (["year>=2020"], {"year": {"gte": 2020}}),
        (["year < 2020"], {"year": {"lt": 2020}}),
        (["lang!=de"], {"lang": {"ne": "de"}}),
        (['code="007"'], {"code": {"eq": "007"}}),
        (["code=007"], {"code": {"eq": "007"}}),  # no number of JSON
        (["done=true"], {"done": {"eq": True}}),
        (["x=NaN"], {"x": {"eq": "NaN"}}),
        (["url=a=b"], {"url": {"eq": "a=b"}}),
        (['{"lang": {"in": ["de"]}}', "n>1"], {"and": [{"lang": {"in": ["de"]}}, {"n": {"gt": 1}}]}),
    ]:
        found = read_filters(written)
        assert found == expected
        if found is not None:
            parse_filter(found)


def test_what_is_no_filter_is_refused() -> None:
    for written in ["lang", "{", "=de", '{"a": 1', '{"a": NaN}', '{"a": {"gt": -Infinity}}']:
        with pytest.raises(InvalidOption, match="--filter"):
            read_filters([written])
    for written, said in (
        ("prio=>4", "=> is not a comparison; write prio>=4,"),
        ("prio =< 4", "=< is not a comparison; write prio <= 4,"),
        ("prio==4", "write prio=4,"),
        ("lang<>de", "write lang!=de,"),
        ("n>>4", ">> is not a comparison; write n>4, or put a value that begins with > in double quotes"),
    ):
        with pytest.raises(InvalidOption, match=re.escape(said)):
            read_filters([written])
    assert read_filters(['sign="=>"']) == {"sign": {"eq": "=>"}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies of searches; each is answered with a passage, found after the index gave too little."""
    bodies: list[dict[str, Any]] = []

    def answer(self: Client, operation: Any, collection: str, *, body: dict[str, Any], **_: Any) -> Any:
        bodies.append({name: value for name, value in body.items() if value is not None})  # as it is sent
        passage = {"index": 0, "start": 0, "end": 4}
        match = {
            "key": "a#0", "score": 0.5, "metadata": {"lang": "de", "_passage": {}}, "document": "a",
            "passage": passage, "text": "a" * 200, "embedding": [1.0],
        }  # fmt: skip
        return {"data": [match], "num_rows_read": 12_345, "repeated_because": "the index returned 1"}

    monkeypatch.setattr(Client, "ask", answer)
    return bodies


def test_every_option_reaches_the_api(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "search docs words --filter lang=de --filter n>1 --hybrid --weights 2:0.5 --include text --by-document "
        "--offset 5 --limit 3 --ef-search 50 --fingerprint 00ff00ff00ff00ff --api-url http://127.0.0.1:1"
    )
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code in (0, None)
    assert asked == [
        {
            "text": "words", "limit": 3, "offset": 5, "mode": "hybrid", "ef_search": 50, "group_by": "document",
            "filter": {"and": [{"lang": {"eq": "de"}}, {"n": {"gt": 1}}]}, "include": ["metadata", "text"],
            "fingerprint": "00ff00ff00ff00ff", "weights": {"vector": 2.0, "text": 0.5},
        }
    ]  # fmt: skip
    printed = capsys.readouterr()
    assert (
        printed.out
        == "score\tkey\tmetadata\tdocument\ttext\n0.5000\ta#0\t{'lang': 'de'}\ta\t" + "a" * 99 + "…\n"
    )
    assert printed.err == "Repeated as an exact search, because the index returned 1.\n"


def test_a_search_that_no_index_served_or_whose_fields_nobody_has_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"data": [], "num_rows_read": 12_345, "missing_fields": ["nosuch"], "truncated": True}
    monkeypatch.setattr(Client, "ask", lambda *arguments, **named: answer)
    with pytest.raises(SystemExit):
        main(["search", "docs", "words", "--filter", "nosuch=4", "--api-url", "http://127.0.0.1:1"])
    said = capsys.readouterr().err
    assert "No vector index served this search: all rows of docs, about 12,345, were read." in said
    assert "No row that was sampled has the metadata field nosuch." in said
    assert "Only the beginning of the query was read, as many tokens as docs has as max_tokens." in said


def test_a_search_that_means_nothing_is_refused_before_it_is_sent(asked: list[dict[str, Any]]) -> None:
    for arguments in (
        "docs",
        "docs text --like a",
        "docs a --hybrid --mode text",
        "docs a --include b",
        "docs a --hybrid --weights 1",
        "docs a --hybrid --weights 1:many",
    ):
        with pytest.raises(SystemExit) as ended:
            main(["search", *arguments.split(), "--api-url", "http://127.0.0.1:1"])
        assert ended.value.code == 2
    assert not asked


def test_many_queries_share_their_options(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(self: Client, operation: Any, collection: str, *, body: dict[str, Any], **_: Any) -> Any:
        asked.append(json.loads(json.dumps(body)))
        return {"data": [{"data": [{"key": "a", "score": 1}], "num_rows_read": 7, "next_offset": 10}] * 2}

    monkeypatch.setattr(Client, "ask", answer)
    with Client("http://127.0.0.1:1") as client:
        first, second = client.search_many("docs", ["a", {"more_like": "k", "limit": 3}], limit=1, mode=None)
        assert client.search_many("docs", []) == []
    assert asked == [{"queries": [{"text": "a", "limit": 1}, {"more_like": "k", "limit": 3}]}]
    assert isinstance(first, Matches)
    assert (first.num_rows_read, second.next_offset, first[0]["key"]) == (7, 10, "a")
