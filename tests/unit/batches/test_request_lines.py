"""Lines of request files, without a database: how they are read, refused, and told apart."""

import json
from dataclasses import replace

import pytest

from api.bodies.embeddings import read_checked_inputs
from tests.request_batches import line, write
from vectormill.batches.endpoints import EMBEDDINGS_DECODER, RERANK_DECODER, resolve_spec
from vectormill.batches.request_batch import EMBEDDINGS, RERANK, parse_window
from vectormill.batches.request_lines import RefusedLine, make_key, parse_line, read_lines, split_key
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.item import pair_with_each
from vectormill.jobs.key_ledger import KeyLedger
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.settings import Settings

REGISTRY = Registry(Settings().models)
FILE = b"\xef\xbb\xbfone\n\n  \ntwo\r\nlonger than ten bytes\nlast"
LINES = [(1, b"one"), (4, b"two\r"), (5, None), (6, b"last")]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_however_the_file_is_cut(size: int) -> None:
    pieces = [FILE[start : start + size] for start in range(0, len(FILE), size)]
    assert list(read_lines(pieces, 10)) == LINES


def test_a_last_line_that_is_too_long_is_told_too() -> None:
    assert list(read_lines([b"a\n", b"x" * 20, b"y" * 20], 10)) == [(1, b"a"), (2, None)]
    assert list(read_lines([], 10)) == []


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("a", [b"a"]),
        (["a", "b"], [b"a", b"b"]),
    ],
)
def test_an_input_is_a_text_or_a_list_of_texts(given: object, texts: list[bytes]) -> None:
    assert parse_line(write(line("x", given)), EMBEDDINGS, 1024).texts == texts


@pytest.mark.parametrize(
    ("given", "texts"), [([1, 2], [b"\xfe1,2"]), ([[1, 2], [3]], [b"\xfe1,2", b"\xfe3"])]
)
def test_numbers_are_token_ids_only_where_the_line_says_so(given: object, texts: list[bytes]) -> None:
    assert parse_line(write(line("x", given, token_ids=True)), EMBEDDINGS, 1024).texts == texts
    with pytest.raises(RefusedLine, match="token_ids"):
        parse_line(write(line("x", given)), EMBEDDINGS, 1024)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"input": ["a", "b"], "input_type": "query"},
        {"input": [[1, 2], [3]], "token_ids": True},
        {"input": "a", "long_texts": "fail", "dimensions": 8, "normalize": False},
        {"input": "a", "model": "m", "prompt": "query: ", "encoding_format": "base64", "user": "u"},
    ],
)
def test_a_body_means_the_same_as_a_line_of_a_batch_and_by_itself(body: dict[str, object]) -> None:
    asked = {"custom_id": "x", "method": "POST", "url": EMBEDDINGS, "body": body}
    as_line = parse_line(json.dumps(asked).encode(), EMBEDDINGS, 1024)
    by_itself = EMBEDDINGS_DECODER.decode(json.dumps(body))
    spec = resolve_spec(REGISTRY, replace(by_itself.encoding(), model=DEFAULT_MODEL))
    assert resolve_spec(REGISTRY, replace(as_line.encoding, model=DEFAULT_MODEL)) == spec
    assert as_line.texts == read_checked_inputs(by_itself, 1000)
    assert spec.long_texts == body.get("long_texts", "truncate")


@pytest.mark.parametrize("given", [[], ["a", 1], [[1], "a"], [[]], [1], 5, None, ["a"] * 2049])
def test_an_input_that_is_neither_is_refused_by_its_name(given: object) -> None:
    with pytest.raises(RefusedLine) as refused:
        parse_line(write(line("x", given)), EMBEDDINGS, 1024)
    assert (refused.value.custom_id, str(refused.value.param)[:5]) == ("x", "input")


def test_what_the_answer_has_to_know_goes_with_the_line() -> None:
    packed = parse_line(write(line("x", "a", encoding_format="base64")), EMBEDDINGS, 1024)
    assert packed.facts == {"encoding_format": "base64"}
    body = {
        "model": "m",
        "query": "q",
        "documents": ["a", {"text": "b"}],
        "top_n": 1,
        "return_documents": True,
    }
    asked = {"custom_id": "x", "method": "POST", "url": RERANK, "body": body}
    ranked = parse_line(json.dumps(asked).encode(), RERANK, 1024)
    assert ranked.facts == {"top_n": 1, "return_documents": True}
    assert ranked.texts == [b"q\xffa", b"q\xffb"]


@pytest.mark.parametrize(
    "wanted",
    [{}, {"max_tokens": 64, "top_n": 1}, {"top_k": 1, "truncation": False}, {"truncation": True}],
)
def test_a_ranking_means_the_same_as_a_line_of_a_batch_and_by_itself(wanted: dict[str, object]) -> None:
    body = {"query": "q", "documents": ["a", {"text": "b"}], **wanted}
    asked = {"custom_id": "x", "method": "POST", "url": RERANK, "body": body}
    as_line = parse_line(json.dumps(asked).encode(), RERANK, 1024)
    by_itself = RERANK_DECODER.decode(json.dumps(body))
    assert as_line.encoding == by_itself.encoding()
    assert as_line.facts.get("top_n") == by_itself.limit
    assert ("is_voyages" in as_line.facts) == ("truncation" in wanted)
    assert as_line.texts == pair_with_each(b"q", [text.encode() for text in by_itself.texts()])


@pytest.mark.parametrize("wrong", [{"top_n": 0}, {"top_n": 1, "top_k": 1}, {"documents": []}, {"rank": 1}])
def test_a_ranking_that_is_refused_by_itself_is_refused_as_a_line(wrong: dict[str, object]) -> None:
    body = {"query": "q", "documents": ["a"], **wrong}
    asked = {"custom_id": "x", "method": "POST", "url": RERANK, "body": body}
    with pytest.raises(RefusedLine) as refused:
        parse_line(json.dumps(asked).encode(), RERANK, 1024)
    assert (refused.value.code, refused.value.custom_id) == ("invalid_request", "x")


def test_a_line_whose_query_is_too_long_for_its_documents_is_refused() -> None:
    body = {"model": "m", "query": "q" * 1_000_000, "documents": ["a"] * 1000}
    asked = {"custom_id": "x", "method": "POST", "url": RERANK, "body": body}
    with pytest.raises(RefusedLine, match="Shorten the query") as refused:
        parse_line(json.dumps(asked).encode(), RERANK, 1024)
    assert refused.value.custom_id == "x"


def test_a_key_tells_its_line_whatever_the_custom_id_is() -> None:
    assert split_key(make_key(17, 3, "a:b.c")) == (17, 3, "a:b.c")


@pytest.mark.parametrize("window", ["", "24", "0h", "h", "-1h", "31d", "24h "])
def test_a_window_is_a_number_of_minutes_hours_or_days(window: str) -> None:
    assert parse_window("24h") == 86400
    assert parse_window("90m") == 5400
    with pytest.raises(InvalidOption):
        parse_window(window)


def test_every_key_that_comes_again_is_found_by_its_place() -> None:
    ledger = KeyLedger()
    num_keys = 200_000  # more than one block
    for number in range(num_keys):
        ledger.add(str(number).encode())
    for number in (5, num_keys - 1, 5):
        ledger.add(str(number).encode())
    assert ledger.find_repeated().tolist() == [num_keys, num_keys + 1, num_keys + 2]
    ledger.close()
    assert KeyLedger().find_repeated().tolist() == []
