"""Texts by reference: every format is cut into the rows that it has, and read back as those, from each store."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import s3_double
from tests.integration.objects.conftest import Place
from tests.protocol import SPEC
from tests.s3_double import Double
from vectormill.domain.errors import InvalidItem, InvalidOption, ObjectChanged, SubmissionTooLarge
from vectormill.files.formats import InputName
from vectormill.files.roots import ANYWHERE, Roots
from vectormill.jobs.chunk import (
    TokenEstimate,
    decode_payload,
    decode_results,
    keep_keys,
    read_keys,
    split_payload,
)
from vectormill.jobs.item import Items, find_text_failure, split_pair
from vectormill.objects import reference, store
from vectormill.objects.reading import ChunkLimits, choose_format, cut_object
from vectormill.objects.reference import ItemReference, RowGroups
from vectormill.objects.store import find_objects, normalize, refuse_outside
from vectormill.rows.columns import Columns

# Texts with what each format has to quote or escape.
TEXTS = [f'text {number}: "quoted", grün\nsecond line\r\nthird' for number in range(40)]
KEYS = [f"key {number}" for number in range(40)]
COLUMNS = Columns("body", "id", metadata=("page",))
LIMITS = ChunkLimits(max_items=7, max_bytes=1 << 20, max_row_bytes=1000)


def write_parquet(rows: list[dict[str, object]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=15)
    return sink.getvalue()


def write_jsonl(rows: list[dict[str, object]]) -> bytes:
    # A byte order mark, blank lines, and no line break at the end.
    return b"\xef\xbb\xbf" + b"\n \n".join(json.dumps(row).encode() for row in rows)


def write_csv(rows: list[dict[str, object]], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


WRITERS: Mapping[str, Callable[[list[dict[str, object]]], bytes]] = {
    "parquet": write_parquet,
    "jsonl": write_jsonl,
    "csv": write_csv,
    "tsv": lambda rows: write_csv(rows, "\t"),
}
ROWS: list[dict[str, object]] = [
    {"id": key, "body": text, "page": number, "other": "x"}
    for number, (key, text) in enumerate(zip(KEYS, TEXTS, strict=True))
]


def cut_all(url: str, columns: Columns = COLUMNS, limits: ChunkLimits = LIMITS) -> Iterator[ItemReference]:
    for found in find_objects(url, ANYWHERE):
        for cut in cut_object(found, choose_format(found, None), columns, TokenEstimate(SPEC), limits):
            yield cut.reference


def read_all(references: list[ItemReference]) -> Items:
    parts = [decode_payload(each.encode()) for each in references]
    return Items(
        *(
            [value for part in parts for value in getattr(part, name)]
            for name in ("keys", "texts", "metadata")
        )
    )


@pytest.mark.parametrize("format", WRITERS)
def test_each_format_gives_the_rows_that_it_has_however_small_its_blocks_are(
    format: InputName, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write(f"in/rows.{format}", WRITERS[format](ROWS))
    monkeypatch.setattr("vectormill.objects.reading.PART_BYTES", 50)  # a row lies in several blocks
    references = list(cut_all(f"{place.url}/in/rows.{format}"))
    assert len(references) > 2
    items = read_all(references)
    assert items.keys == KEYS
    assert items.texts == [text.encode() for text in TEXTS]
    pages = [json.loads(metadata)["page"] for metadata in items.metadata]
    assert [int(page) for page in pages] == list(range(40))


@pytest.mark.parametrize("format", WRITERS)
def test_halves_of_a_payload_have_the_rows_of_the_whole_without_reading_it(
    format: InputName, place: Place
) -> None:
    place.write(f"rows.{format}", WRITERS[format](ROWS))
    whole = list(cut_all(f"{place.url}/rows.{format}"))[1]
    first, second = split_payload(whole.encode(), None, 3, SPEC, 100)
    rest = split_payload(second.items, None, 1, SPEC, second.num_tokens)[1]
    expected = whole.read()
    assert decode_payload(first.items).texts == expected.texts[:3]
    assert decode_payload(rest.items).texts == expected.texts[4:]
    assert (first.num_items, second.num_items, rest.num_items) == (3, whole.num_rows - 3, whole.num_rows - 4)
    assert first.num_tokens + second.num_tokens <= 100
    kept = keep_keys(whole.encode(), expected)
    assert kept is not None
    for half, rows in zip(split_payload(kept, None, 3, SPEC, 100), (expected[:3], expected[3:]), strict=True):
        items = decode_results(half.items, has_results=True)
        assert (items.keys, read_keys(half.items), items.texts) == (rows.keys, rows.keys, [b""] * len(rows))
        assert (items.content_hashes(), decode_payload(half.items)) == (rows.content_hashes(), rows)


def test_items_without_a_key_are_named_by_object_row_group_and_position(place: Place) -> None:
    place.write("rows.parquet", write_parquet(ROWS))
    place.write("rows.jsonl", write_jsonl(ROWS))
    url = place.url
    tables, lines = (
        read_all(list(cut_all(f"{url}/rows.{format}", Columns("body")))).keys
        for format in ("parquet", "jsonl")
    )
    assert (tables[0], tables[16]) == (f"{url}/rows.parquet#0:0", f"{url}/rows.parquet#1:1")
    assert (lines[0], lines[39]) == (f"{url}/rows.jsonl#0", f"{url}/rows.jsonl#39")
    assert len(set(tables)) == len(set(lines)) == 40
    references = list(cut_all(f"{url}/rows.jsonl", Columns("body")))
    assert [key for each in references for key in read_keys(each.encode())] == lines


def test_a_row_with_a_fault_fails_alone_and_takes_no_neighbour_with_it(place: Place) -> None:
    rows = [
        b'{"id": "a", "body": "one"}',
        b"not JSON",
        b'{"body": "no key"}',
        b'{"id": 7, "body": null}',
        b'{"id": "z", "body": "\\ud800"}',
    ]
    place.write("rows.jsonl", b"\n".join(rows))
    items = read_all(list(cut_all(f"{place.url}/rows.jsonl", Columns("body", "id"))))
    name = f"{place.url}/rows.jsonl#"
    assert items.keys == ["a", f"{name}1", f"{name}2", "7", "z"]
    failures = [find_text_failure(text, 100) for text in items.texts]
    assert [failure and failure.code for failure in failures] == [
        None, "unreadable_row", "unreadable_row", "empty_text", "lone_surrogate"
    ]  # fmt: skip
    assert [failure.detail for failure in failures[1:3] if failure] == [
        f"{name[:-1]} from byte 0 on, line 2: not valid JSON (Expecting value, column 1).",
        "the key is null; every row needs a key",
    ]
    place.write("rows.csv", b"id,body\na,one\nb\nc,three\n")
    items = read_all(list(cut_all(f"{place.url}/rows.csv", Columns("body", "id"))))
    assert [find_text_failure(text, 100) is None for text in items.texts] == [True, False, True]


def test_pairs_are_read_from_two_columns(place: Place) -> None:
    place.write("pairs.csv", b"q,a\nwho,me\nwhat,that\n")
    items = read_all(list(cut_all(f"{place.url}/pairs.csv", Columns("q", text_pair="a"))))
    assert [split_pair(text) for text in items.texts] == [(b"who", b"me"), (b"what", b"that")]


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("is_removed", [False, True])
def test_an_object_that_was_changed_or_removed_is_never_read(
    format: InputName, place: Place, is_removed: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    name = f"rows.{format}"
    place.write(name, WRITERS[format](ROWS))
    references = list(cut_all(f"{place.url}/{name}"))
    if is_removed and place.url.startswith("s3"):
        del request.getfixturevalue("bucket").objects[f"bucket/data/{name}"]
    elif is_removed:
        place.write("other", b"")
        (tmp_path / name).unlink()
    else:
        place.write(name, WRITERS[format]([*ROWS[1:], ROWS[0]]))
    for each in references:
        with pytest.raises(ObjectChanged, match="rows"):
            each.read()


def test_a_row_group_is_decoded_once_and_one_that_is_too_large_is_streamed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("rows.parquet", write_parquet(ROWS))
    (whole, *_) = cut_all(f"{place.url}/rows.parquet")
    opened: list[object] = []

    def open_counted(
        found: ItemReference, open: Callable[[ItemReference], object] = reference.open_parquet
    ) -> object:
        opened.append(found)
        return open(found)

    monkeypatch.setattr(reference, "open_parquet", open_counted)
    kept, none_kept = RowGroups(), RowGroups(most_bytes=10)
    # Parquet stores the text once, in a thousandth of the bytes that its column has in memory.
    equal = [{"id": key, "body": "x" * 100_000, "page": 1} for key in KEYS]
    place.write("equal.parquet", write_parquet(equal))
    (repeated, *_) = cut_all(f"{place.url}/equal.parquet")
    for groups, group, num_opened in (
        (kept, whole, 1),
        (none_kept, whole, 5),
        (RowGroups(most_bytes=500_000), repeated, 5),
    ):
        opened.clear()
        for start in range(0, 15, 3):
            table = groups.read(group.take(start, start + 3))
            assert table.column("id").to_pylist() == KEYS[start : start + 3]
        assert len(opened) == num_opened


def test_what_cannot_be_cut_is_refused_with_what_to_do(place: Place) -> None:
    refused = {
        "rows.jsonl.gz": (b"", InvalidOption, "compressed as a whole"),
        "rows.bin": (b"", InvalidOption, "no known format"),
        "rows.csv": (b"a,b\n1,2\n", InvalidOption, "no column 'id'; its columns are 'a', 'b'"),
        "rows.jsonl": (b"[1]\n", InvalidItem, "line 1: expected a JSON object"),
        "long.csv": (
            b"id,body,page\n1," + b"x" * 2000 + b",1\n" + b"y" * 20_000_000,
            SubmissionTooLarge,
            "more than 1,000 bytes",
        ),
        "rows.parquet": (b"PAR1 nothing", ObjectChanged, "cannot be read as Parquet"),
    }
    for name, (content, error, message) in refused.items():
        place.write(name, content)
        with pytest.raises(error, match=message):
            list(cut_all(f"{place.url}/{name}"))


NAMES = st.lists(st.sampled_from(["a", "b", "a-b", "1.csv", "2.txt", "é"]), min_size=1, max_size=3).map(
    "/".join
)
PATTERNS = [
    "*",
    "*.csv",
    "a/*",
    "*/*.csv",
    "?/[12].*",
    "**/*.csv",
    "a/**",
    "*/b/*",
    "[!a]*/**/1.csv",
    "none/*",
]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.sets(NAMES, max_size=30), pattern=st.sampled_from(PATTERNS), page=st.integers(1, 4))
@pytest.mark.parametrize("begins_where_it_is_told", [True, False])
def test_a_pattern_finds_the_objects_in_order_that_glob_finds(
    bucket: Double,
    tmp_path_factory: pytest.TempPathFactory,
    begins_where_it_is_told: bool,
    names: set[str],
    pattern: str,
    page: int,
) -> None:
    folder = tmp_path_factory.mktemp("objects")
    files = {name for name in names if not any(other.startswith(f"{name}/") for other in names)}
    bucket.objects.clear()
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
        bucket.put(f"bucket/data/{name}", b"")
    matched = glob(pattern, root_dir=folder, recursive=True)  # noqa: PTH207 - Path.glob has another **
    expected = sorted(name for name in matched if name in files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "LISTED_AT_ONCE", page)
        patch.setattr(s3_double, "START_AFTER", "start-after" if begins_where_it_is_told else "none")
        for url in (f"file://{folder}", "s3://bucket/data"):
            asked: list[None] = []
            found = find_objects(f"{url}/{pattern}", ANYWHERE, lambda: asked.append(None))  # noqa: B023
            assert [each.url.removeprefix(f"{url}/") for each in found] == expected
            assert len(asked) >= bool(expected)


def test_a_pattern_reads_no_folder_in_which_no_match_can_lie(
    bucket: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LISTED_AT_ONCE", 3)
    for number in range(300):
        bucket.put(f"bucket/logs/{number}.parquet", b"")
    for name in ("a.parquet", "z.parquet"):
        bucket.put(f"bucket/{name}", b"")
    found = [each.url for each in find_objects("s3://bucket/*.parquet", ANYWHERE)]
    assert found == ["s3://bucket/a.parquet", "s3://bucket/z.parquet"]
    assert len(bucket.requests) < 5, "a page has three objects"
    with pytest.raises(InvalidOption, match="no pattern"):
        list(find_objects("s3://bucket/a**b", ANYWHERE))


def test_addresses_are_normalized_and_local_ones_stay_below_their_root(tmp_path: Path) -> None:
    assert normalize("/data/x/") == "file:///data/x"
    assert normalize("s3://bucket/a//") == "s3://bucket/a"
    for wrong in ("data/x", "ftp://host/x", "s3:///x", "file://data/x", "s3://bucket/../x", "https://host/x"):
        with pytest.raises(InvalidOption):
            normalize(wrong)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to("/etc")
    roots = Roots((root,), "SETTING")
    refuse_outside(f"file://{root}/x", roots)
    refuse_outside("s3://bucket/x", roots)
    for outside in (f"file://{root}/link/passwd", "file:///etc/passwd"):
        with pytest.raises(InvalidOption, match="SETTING"):
            refuse_outside(outside, roots)
    with pytest.raises(InvalidOption, match="set SETTING"):
        refuse_outside(f"file://{root}/x", Roots(setting="SETTING"))
