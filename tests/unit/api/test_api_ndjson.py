"""Streams of NDJSON become items, however they are cut; every refusal names its line."""

import gzip
import itertools
import json
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.intake.requests import UnreadableItem, make_item, make_items
from api.problems import Limit, Problem
from api.streams.ndjson import PIECE_BYTES, Inflater, ItemReader
from vectormill.jobs.item import Item
from vectormill.jobs.operations import ItemBody
from vectormill.rows.decoding import FREE_BYTES


def read_all(blocks: Iterable[bytes], max_line_bytes: int = 1 << 20, max_key_bytes: int = 64) -> list[Item]:
    reader = ItemReader(max_line_bytes=max_line_bytes, max_key_bytes=max_key_bytes)
    return [*(item for block in blocks for item in reader.read(block)), *reader.finish()]


def refusal(*blocks: bytes, **limits: int) -> Problem:
    with pytest.raises(Problem) as caught:
        read_all(blocks, **limits)
    return caught.value


def test_a_line_becomes_an_item_with_its_metadata_as_json() -> None:
    body = b'{"key":"a","text":"caf\xc3\xa9","metadata":{"page": 1}}\n{"key":"b","text":""}\n'
    assert read_all([body]) == [Item("a", "café".encode(), b'{"page":1}'), Item("b", b"")]


def test_what_editors_do_to_a_file_does_no_harm() -> None:
    for body, reason in (
        (b'{"key":"a","text":"t"}', "no newline at the end"),
        (b'\n\n  \n{"key":"a","text":"t"}\n\t\n', "blank lines"),
        (b'{"key":"a","text":"t"}\r\n', "lines of Windows"),
        (b'\xef\xbb\xbf{"key":"a","text":"t"}\n', "a byte order mark"),
        (b'{"text":"t","metadata":null,"key":"a"}\n', "another order, and null for no metadata"),
    ):
        assert read_all([body]) == [Item("a", b"t")], reason


LINES = [
    '{"key":"a","text":"one"}',
    "",
    '{"key":"b","text":"two\\nlines","metadata":{"n":1}}',
    '{"key":"ü","text":"\\ud800"}',
]


@given(st.lists(st.integers(0, 120), max_size=6))
def test_where_a_stream_is_cut_into_blocks_makes_no_difference(cuts: list[int]) -> None:
    body = "\n".join(LINES).encode()
    edges = [0, *sorted(cuts), len(body)]
    blocks = [body[start:end] for start, end in itertools.pairwise(edges)]
    assert read_all(blocks) == read_all([body])
    assert [item.key for item in read_all(blocks)] == ["a", "b", "ü"]


def test_a_text_that_can_have_no_vector_travels_to_the_worker_that_reports_it() -> None:
    body = b'{"key":"a","text":"x\\uD800y"}\n{"key":"b","text":"\\ud83d\\ude00"}\n'
    assert [item.text for item in read_all([body])] == [b"x\xed\xa0\x80y", "😀".encode()]
    body = b'{"key":"a","text":"x\\u0000"}\n{"key":"b","text":"  "}\n'
    assert [item.text for item in read_all([body])] == [b"x\0", b"  "]


GOOD = b'{"key":"good","text":"t"}\n'


WRONG_LINES: tuple[tuple[bytes | str, int, str, str], ...] = (
    (b'{"key":"a"', 400, "invalid-json", "Line 3"),
    (b'{"key":"a","text":"\xff"}', 400, "invalid-json", "Line 3"),
    (b'{"key":"a","text":"t"} {"key":"b","text":"t"}', 400, "invalid-json", "Line 3"),
    (b'{"key":"a","text":"\\ud800","metadata":{"a":NaN}}', 400, "invalid-json", "NaN"),
    (
        b'{"key":"a","text":"t","metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
        400,
        "invalid-json",
        "deep",
    ),
    (b'{"text":"a"}', 422, "invalid-item", "missing required field `key`"),
    (b'{"key":"a","text":"t","txet":"t"}', 422, "invalid-item", "unknown field `txet`"),
    (b'{"key":"a","text":"\\ud800","txet":"t"}', 422, "invalid-item", "unknown field `txet`"),
    (b'{"key":7,"text":"t"}', 422, "invalid-item", "key"),
    (b'{"key":"","text":"t"}', 422, "invalid-item", "the key is empty"),
    (b'{"key":"' + b"k" * 65 + b'","text":"t"}', 422, "invalid-item", "65 bytes"),
    ('{"key":"' + "é" * 33 + '","text":"t"}', 422, "invalid-item", "66 bytes"),
    (b'{"key":"a\\u0000","text":"t"}', 422, "invalid-item", "NUL"),
    (b'{"key":"\\udc00","text":"t"}', 422, "invalid-item", "surrogate"),
    (b'{"key":"a","text":"t","metadata":[1]}', 422, "invalid-item", "metadata"),
    (b'{"key":"a","text":"t","metadata":{"a":"\\u0000"}}', 422, "invalid-item", "NUL"),
    (b'{"key":"a","text":"t","metadata":{"a":"\\ud800"}}', 422, "invalid-item", "surrogate"),
    (b'{"key":"a","text":"t","metadata":{"a":1e999}}', 422, "invalid-item", "out of range"),
    # Beside a surrogate another reader is used, with the same limits.
    (b'{"key":"a","text":"\\ud800","metadata":{"a":1e999}}', 400, "invalid-json", "out of range"),
    (
        b'{"key":"a","text":"t","metadata":{"a":' + b"[" * 100 + b"]" * 100 + b"}}",
        422,
        "invalid-item",
        "100 levels deep",
    ),
    (b"[]", 422, "invalid-item", "Expected `object`"),
)


def test_a_wrong_line_is_refused_with_its_number_and_its_reason() -> None:
    for line, status, code, said in WRONG_LINES:
        content = line.encode() if isinstance(line, str) else line
        problem = refusal(GOOD, b"\n" + content + b"\n", GOOD)
        assert (problem.status, problem.code) == (status, code), line
        assert problem.detail.startswith("Line 3")
        assert said in problem.detail
        assert problem.errors[0].line == 3


def test_metadata_may_spell_a_backslash_before_u0000_and_any_number() -> None:
    metadata = b'{"path":"C:\\\\u0000","small":1e-20000,"large":123456789012345678901234567890}'
    item = read_all([b'{"key":"a","text":"t","metadata":' + metadata + b"}\n"])[0]
    assert json.loads(item.metadata) == {
        "path": "C:\\u0000",
        "small": 0.0,  # Postgres' numeric ends at 16,383 digits behind the point
        "large": 123456789012345678901234567890,
    }


def test_metadata_may_be_as_deep_as_answers_can_be_and_as_wide_as_it_likes() -> None:
    deep, wide = b"[" * 99 + b"]" * 99, b"[" + b"{}," * 500 + b"{}]"
    item = read_all([b'{"key":"a","text":"t","metadata":{"deep":' + deep + b',"wide":' + wide + b"}}\n"])[0]
    assert len(json.loads(item.metadata)["wide"]) == 501


def test_a_line_that_is_too_long_is_refused_before_memory_is() -> None:
    for blocks in (
        (b'{"key":"a","text":"' + b"t" * 2000 + b'"}\n',),  # a whole line in one block
        (b'{"key":"a","text":"' + b"t" * 2000,),  # a line without an end
        tuple(b"t" * 600 for _ in range(4)),  # that grows and grows
    ):
        problem = refusal(GOOD, *blocks, max_line_bytes=1024)
        assert (problem.status, problem.code) == (413, "submission-too-large")
        assert problem.detail == "Line 2: the line has more than 1024 bytes (VECTORMILL_MAX_LINE_BYTES)."


MAX_RATIO = Limit("VECTORMILL_MAX_GZIP_RATIO", 200)


def inflate(blocks: Iterable[bytes]) -> bytes:
    inflater = Inflater(MAX_RATIO)
    plain = b"".join(piece for block in blocks for piece in inflater.feed(block))
    inflater.finish()
    return plain


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4), st.integers(1, 40))
def test_gzip_is_read_whatever_its_members_and_blocks(members: list[bytes], size: int) -> None:
    body = b"".join(gzip.compress(member) for member in members)
    blocks = [body[start : start + size] for start in range(0, len(body), size)]
    assert inflate(blocks) == b"".join(members)


def test_zeros_behind_the_last_member_are_padding_and_no_bytes_an_empty_body() -> None:
    assert inflate([gzip.compress(b"text") + bytes(512), bytes(10)]) == b"text"
    assert inflate([]) == b""


def test_a_small_body_that_means_gigabytes_is_unpacked_in_bounded_pieces() -> None:
    block = gzip.compress(bytes(FREE_BYTES - 7))
    sizes = [len(piece) for piece in Inflater(MAX_RATIO).feed(block)]
    assert max(sizes) == PIECE_BYTES
    assert sum(sizes) == FREE_BYTES - 7


def test_a_body_that_becomes_a_thousand_times_as_large_is_refused_before_it_is_unpacked() -> None:
    pieces: list[bytes] = []
    with pytest.raises(Problem, match="more than 200 times") as refused:
        pieces.extend(Inflater(MAX_RATIO).feed(gzip.compress(bytes(8 * FREE_BYTES))))
    assert sum(map(len, pieces)) <= 2 * FREE_BYTES
    assert "VECTORMILL_MAX_GZIP_RATIO" in refused.value.detail
    assert (refused.value.status, refused.value.limit) == (413, MAX_RATIO)


def test_a_body_that_is_not_gzip_to_its_end_is_refused() -> None:
    for body, said in (
        (b"plain text", "not valid gzip"),
        (zlib.compress(b"text"), "not valid gzip"),
        (gzip.compress(b"text", mtime=0) + b"rest", "not valid gzip"),
        (gzip.compress(b"text", mtime=0)[:-1], "ends before"),
        (gzip.compress(b"text" * 100, mtime=0)[:20], "ends before"),
    ):
        with pytest.raises(Problem, match=said):
            inflate([body])


KEYS = st.text(max_size=6) | st.sampled_from(["", "a\0", "k" * 65, "\U0001f600" * 16, "\U0001f600" * 17])
METADATA = st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3) | st.integers(), max_size=3)
BODIES = st.lists(st.builds(ItemBody, KEYS, st.text(max_size=9), METADATA), max_size=5)


@given(BODIES)
def test_many_bodies_are_the_items_that_each_of_them_is_or_none_of_them(bodies: list[ItemBody]) -> None:
    try:
        expected = [make_item(body, 64) for body in bodies]
    except UnreadableItem:
        with pytest.raises(UnreadableItem):
            make_items(bodies, 64)
    else:
        assert list(make_items(bodies, 64)) == expected
