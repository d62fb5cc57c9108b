"""Lines of request files, without a database: how they are read, refused, and told apart."""

import json
from dataclasses import replace
from typing import Any

import pytest

from api.openai.routes import read_checked_inputs
from tests.request_batches import line, write
from vectormill.batches.endpoints import (
    EMBEDDINGS_DECODER,
    RERANK_DECODER,
    RefusedLine,
    RequestLine,
    make_key,
    parse_line,
    resolve_spec,
    split_key,
)
from vectormill.batches.request_batch import EMBEDDINGS, RERANK, parse_window
from vectormill.domain.errors import InvalidOption
from vectormill.jobs.duplicate_keys import DuplicateFinder
from vectormill.jobs.item import pair_with_each
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.rows.decoding import number_lines
from vectormill.settings import Settings

REGISTRY = Registry(Settings().models)
FILE = b"\xef\xbb\xbfone\n\n  \ntwo\r\nlonger than ten bytes\nlast"
LINES = [(1, b"one"), (4, b"two\r"), (5, None), (6, b"last")]


def parse(body: dict[str, Any], endpoint: str = EMBEDDINGS) -> RequestLine:
    asked = {"custom_id": "x", "method": "POST", "url": endpoint, "body": body}
    return parse_line(json.dumps(asked).encode(), endpoint, 1024)


def test_lines_are_the_same_however_the_file_is_cut() -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [FILE[start : start + size] for start in range(0, len(FILE), size)]
        assert list(number_lines(pieces, 10)) == LINES
    assert list(number_lines([b"a\n", b"x" * 20, b"y" * 20], 10)) == [(1, b"a"), (2, None)]
    assert list(number_lines([], 10)) == []


def test_an_input_is_a_text_or_texts_or_token_ids_where_the_line_says_so() -> None:
    as_texts: tuple[Any, ...] = (("a", [b"a"]), (["a", "b"], [b"a", b"b"]))
    as_ids: tuple[Any, ...] = (([1, 2], [b"\xfe1,2"]), ([[1, 2], [3]], [b"\xfe1,2", b"\xfe3"]))
    for given, texts in as_texts:
        assert parse_line(write(line("x", given)), EMBEDDINGS, 1024).texts == texts
    for given, texts in as_ids:
        assert parse_line(write(line("x", given, token_ids=True)), EMBEDDINGS, 1024).texts == texts
        with pytest.raises(RefusedLine, match="token_ids"):
            parse_line(write(line("x", given)), EMBEDDINGS, 1024)
    wrongs: tuple[Any, ...] = ([], ["a", 1], [[1], "a"], [[]], [1], 5, None, ["a"] * 2049)
    for wrong in wrongs:
        with pytest.raises(RefusedLine) as refused:
            parse_line(write(line("x", wrong)), EMBEDDINGS, 1024)
        assert (refused.value.custom_id, str(refused.value.param)[:5]) == ("x", "input")


def test_a_body_means_the_same_as_a_line_of_a_batch_and_by_itself() -> None:
    bodies: tuple[dict[str, Any], ...] = (
        {"input": "a"},
        {"input": ["a", "b"], "input_type": "query"},
        {"input": [[1, 2], [3]], "token_ids": True},
        {"input": "a", "long_texts": "fail", "dimensions": 8, "normalize": False},
        {"input": "a", "model": "m", "prompt": "query: ", "encoding_format": "base64", "user": "u"},
    )
    for body in bodies:
        as_line, by_itself = parse(body), EMBEDDINGS_DECODER.decode(json.dumps(body))
        spec = resolve_spec(REGISTRY, replace(by_itself.encoding(), model=DEFAULT_MODEL))
        assert resolve_spec(REGISTRY, replace(as_line.encoding, model=DEFAULT_MODEL)) == spec
        assert as_line.texts == list(read_checked_inputs(by_itself, 1000).values())
        assert spec.long_texts == body.get("long_texts", "truncate")
        assert as_line.facts == ({"encoding_format": "base64"} if "encoding_format" in body else {})


@pytest.mark.parametrize(
    "form", [{"encoding_format": "bytes"}, {"encoding_format": "base64", "embed_dtype": "float16"}]
)
def test_a_line_that_asks_for_what_a_file_of_lines_does_not_hold_is_refused(form: dict[str, str]) -> None:
    with pytest.raises(RefusedLine, match="set encoding_format to float or base64, and omit embed_dtype"):
        parse({"input": "a", **form})


def test_a_ranking_means_the_same_as_a_line_of_a_batch_and_by_itself() -> None:
    same: tuple[dict[str, Any], ...] = (
        {}, {"max_tokens": 64, "top_n": 1}, {"top_k": 1, "truncation": False}, {"truncation": True},
        {"return_documents": True},
    )  # fmt: skip
    for wanted in same:
        body = {"query": "q", "documents": ["a", {"text": "b"}], **wanted}
        as_line, by_itself = parse(body, RERANK), RERANK_DECODER.decode(json.dumps(body))
        assert as_line.encoding == by_itself.encoding()
        assert as_line.facts.get("top_n") == by_itself.limit
        assert ("is_voyages" in as_line.facts) == ("truncation" in wanted)
        assert ("return_documents" in as_line.facts) == ("return_documents" in wanted)
        assert as_line.texts == pair_with_each(b"q", [text.encode() for text in by_itself.texts()])
    refused: tuple[dict[str, Any], ...] = (
        {"top_n": 0}, {"top_n": 1, "top_k": 1}, {"documents": []}, {"rank": 1},
        {"query": "q" * 1_000_000, "documents": ["a"] * 1000},
    )  # fmt: skip
    for wrong in refused:
        with pytest.raises(RefusedLine) as error:
            parse({"query": "q", "documents": ["a"], **wrong}, RERANK)
        assert (error.value.code, error.value.custom_id) == ("invalid_request", "x")


def test_a_key_tells_its_line_whatever_the_custom_id_is() -> None:
    assert split_key(make_key(17, 3, "a:b.c")) == (17, 3, "a:b.c")


def test_a_window_is_a_number_of_minutes_hours_or_days() -> None:
    assert (parse_window("24h"), parse_window("90m")) == (86400, 5400)
    for window in ("", "24", "0h", "h", "-1h", "31d", "24h "):
        with pytest.raises(InvalidOption):
            parse_window(window)


def test_every_key_that_comes_again_is_found_by_its_place() -> None:
    ledger = DuplicateFinder()
    num_keys = 200_000  # more than one block
    for number in range(num_keys):
        ledger.add(str(number).encode())
    for number in (5, num_keys - 1, 5):
        ledger.add(str(number).encode())
    assert ledger.find_repeated().tolist() == [num_keys, num_keys + 1, num_keys + 2]
    ledger.close()
    assert DuplicateFinder().find_repeated().tolist() == []
