"""What a look at a source tells before a run relies on it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from sqlalchemy import Engine

from tests.http_server import QuietHandler, serving_http
from tests.protocol import SPEC, make_items, submit
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, SourceFailed, SourceInterrupted
from vectormill.domain.task import EXTRACT, JUDGE
from vectormill.jobs.item import split_pair
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.settings import Settings
from vectormill.sources import files
from vectormill.sources.opening import check_source, open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import FILES, PUSH, SQL, TREE, Source


def place(engine: Engine, **settings: Any) -> SourcePlace:
    return SourcePlace(engine, Settings(**settings), Registry({}), collection="docs")


def test_three_rows_are_shown_with_their_texts_cut_and_the_rows_counted(engine: Engine) -> None:
    query = "SELECT n AS id, repeat('x', 1000) AS body, n % 2 AS odd FROM generate_series(1, 50000) AS n"
    source = Source(SQL, {"query": query, "key": "id", "text": "body", "metadata": ["odd"]})
    report = check_source(source, place(engine))
    assert [(row["key"], len(row["text"]), row["metadata"]) for row in report["rows"]] == [
        ("1", 200, {"odd": 1}), ("2", 200, {"odd": 0}), ("3", 200, {"odd": 1})
    ]  # fmt: skip
    assert 10_000 <= report["num_sampled"] < 20_000
    assert report["num_rows"] == 50_000
    assert not report["is_whole"]


def test_what_was_wrong_with_single_rows_is_told(engine: Engine) -> None:
    query = "SELECT n AS id, CASE WHEN n > 1 THEN 'x' END AS body FROM generate_series(1, 3) AS n"
    report = check_source(Source(SQL, {"query": query, "key": "id", "text": "body"}), place(engine))
    assert report["complaints"]["num_without_text"] == 1
    assert (report["num_rows"], report["is_whole"]) == (3, True)


def test_a_key_that_two_batches_have_is_refused(engine: Engine) -> None:
    query = "SELECT n % 6000 AS id, 'x' AS body FROM generate_series(1, 9000) AS n"
    with pytest.raises(SourceFailed, match="uplicate key"):
        check_source(Source(SQL, {"query": query, "key": "id", "text": "body"}), place(engine))


def test_the_rows_of_parquet_are_counted_without_being_read(engine: Engine, tmp_path: Path) -> None:
    for name in ("a", "b"):
        table = pyarrow.table({"key": [f"{name}{n}" for n in range(9000)], "text": ["t"] * 9000})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    report = check_source(Source(FILES, {"files": [f"{tmp_path}/*.parquet"]}), place(engine))
    assert report["num_rows"] == 18_000
    assert report["num_sampled"] < 18_000


def lay_out(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text("inside")
    (tmp_path / "secret.md").write_text("outside")
    (tmp_path / "in" / "link.md").symlink_to(tmp_path / "secret.md")
    (tmp_path / "secret.jsonl").write_text('{"key": "a", "text": "outside"}')
    return tmp_path / "in"


def test_no_path_leads_out_of_the_folder_that_sources_must_lie_in(engine: Engine, tmp_path: Path) -> None:
    root = lay_out(tmp_path)
    cases: list[tuple[str, dict[str, Any]]] = [
        (TREE, {"folder": "."}),  # a link leads outside
        (TREE, {"folder": ".."}),
        (TREE, {"folder": "/etc"}),
        (FILES, {"files": ["../secret.jsonl"]}),
        (FILES, {"files": ["../*.jsonl"]}),
        (FILES, {"files": ["{outside}/secret.jsonl"]}),
        (FILES, {"files": ["file://{outside}/secret.jsonl"]}),
        (FILES, {"files": ["local://{outside}/secret.jsonl"]}),
        (FILES, {"files": ["simplecache::file://{outside}/secret.jsonl"]}),
        (FILES, {"files": ["filecache::{outside}/secret.jsonl"]}),
        (FILES, {"files": ["reference://{outside}/secret.jsonl"]}),
        (FILES, {"files": ["link.md"], "format": "jsonl"}),
    ]
    for kind, options in cases:
        if "files" in options:
            options = {**options, "files": [name.format(outside=tmp_path) for name in options["files"]]}
        with pytest.raises(SourceFailed, match=r"is not below|cannot be read from") as failure:
            check_source(Source(kind, options), place(engine, source_root=root))
        assert "outside" not in str(failure.value)


def test_no_file_is_read_from_where_a_cloud_tells_its_machines_their_secrets(engine: Engine) -> None:
    for host in ("http://169.254.169.254", "http://2852039166", "http://100.100.100.200"):
        source = Source(FILES, {"files": [f"{host}/latest/meta-data.jsonl"]})
        with pytest.raises(SourceFailed, match=r"is a cloud metadata address|No file matches"):
            check_source(source, place(engine))


def test_no_file_is_read_from_where_a_server_redirects_to_a_place_of_secrets(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Redirecting(QuietHandler):
        def answer(self) -> None:
            host, port = self.connection.getsockname()[:2]
            asked.append(str(host))
            if host == "127.0.0.1":
                self.reply(302, headers={"Location": f"http://127.0.0.2:{port}{self.path}"})
            else:
                self.reply(200, b'{"key": "k", "text": "a secret"}\n')

    def refuse(written: str, *, allows_private: bool) -> str | None:
        return "secrets are told there." if written == "127.0.0.2" else None

    monkeypatch.setattr(files, "refuse_address", refuse)
    with (
        serving_http(Redirecting) as url,
        serving_http(Redirecting, "127.0.0.2", int(url.rpartition(":")[2])),
        pytest.raises(SourceFailed),
    ):
        list(open_source(Source(FILES, {"files": [f"{url}/rows.jsonl"]}), place(engine)).read())
    assert set(asked) == {"127.0.0.1"}


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_rewritten_while_it_is_read_is_not_taken_for_whole(
    engine: Engine, tmp_path: Path, is_replaced: bool
) -> None:
    lines = [f'{{"key": "k{number}", "text": "t"}}\n' for number in range(2000)]
    path, other = tmp_path / "a.jsonl", tmp_path / "other"
    path.write_text("".join(lines))
    batches = open_source(Source(FILES, {"files": [str(path)]}), place(engine)).read()
    next(batches)
    if is_replaced:
        other.write_text("".join(lines[:-1]))
        other.rename(path)
    else:
        with path.open("a") as file:
            file.write('{"key": "late", "text": "t"}\n')
    with pytest.raises(SourceInterrupted, match="was changed while it was being read"):
        list(batches)


def test_a_relative_path_begins_at_the_root_and_needs_one(engine: Engine, tmp_path: Path) -> None:
    root = lay_out(tmp_path)
    (root / "link.md").unlink()
    source = Source(TREE, {"folder": ".", "include": ["**/*.md"]})
    (row,) = check_source(source, place(engine, source_root=root))["rows"]
    assert (row["key"], row["text"]) == ("a.md", "inside")
    with pytest.raises(SourceFailed, match="set VECTORMILL_SOURCE_ROOT to it"):
        check_source(source, place(engine, source_root=()))


def test_patterns_choose_the_files_of_a_tree(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "guide" / "old").mkdir(parents=True)
    for name in ("a.md", "guide/b.md", "guide/old/c.md", "guide/d.py", ".hidden.md"):
        (tmp_path / name).write_text("text")
    cases: list[tuple[list[str], list[str], list[str]]] = [
        (["*.md"], [], ["a.md", "guide/b.md", "guide/old/c.md"]),
        (["**/*.md"], ["guide/old/**"], ["a.md", "guide/b.md"]),
        (["guide/*.md"], [], ["guide/b.md"]),
        (["*"], ["*.md"], ["guide/d.py"]),
        (["*.md", "*.py"], ["old/*"], ["a.md", "guide/b.md", "guide/d.py", "guide/old/c.md"]),
        (["*.md"], ["**/old/*"], ["a.md", "guide/b.md"]),
    ]
    for include, exclude, found in cases:
        source = Source(TREE, {"folder": str(tmp_path), "include": include, "exclude": exclude})
        items = [item for batch in open_source(source, place(engine)).read() for item in batch]
        assert sorted(item.key for item in items) == found


def test_a_folder_without_a_file_that_fits_is_no_empty_source(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="is it mounted"):
        check_source(Source(TREE, {"folder": str(tmp_path)}), place(engine))
    with pytest.raises(SourceFailed, match="No file matches"):
        check_source(Source(FILES, {"files": [f"{tmp_path}/*.csv"]}), place(engine))


def test_a_file_that_is_not_what_it_says_is_named_with_the_place(engine: Engine, tmp_path: Path) -> None:
    cases: list[tuple[str, bytes, str]] = [
        ("a.jsonl", b'{"key": "a", "text": "x"}\n{"key": "b"', "line 2: not valid JSON"),
        ("a.jsonl", b'{"key": "a", "text": "x"}\n[1]\n', "line 2: expected a JSON object"),
        ("a.jsonl", b'{"id": "a", "text": "x"}\n', "no column 'key'; its columns are 'id', 'text'"),
        ("a.csv", b"key,text\na,x\nb\n", "line 3: the row has 1 cells, but the header has 2"),
        ("a.csv", b'key,text\r\n\r\na,"x\r\ny"\r\nb\r\nc,z\r\n', "line 5: the row has 1 cells"),
        ("a.csv", b'key,text\na,"x\ny"\nb,"z\nc,z\nd,z\n', "begins at line 4: unexpected end of data"),
        ("a.csv", b'key,text\na,x\nb,"y"z\n', "begins at line 3: ',' expected after"),
        ("a.csv", b"", "is empty"),
        ("a.txt", b"x", "Unknown format of"),
        ("a.jsonl.gz", b"x", "is not a complete gzip file"),
        ("a.parquet", b"x", "cannot be read"),
    ]
    for name, content, said in cases:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(SourceFailed, match=said):
            check_source(Source(FILES, {"files": [str(tmp_path / name)]}), place(engine))


def test_bytes_that_are_no_unicode_spoil_their_own_row_alone(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"key": "a", "text": "x \xff"}\n{"key": "b", "text": "\\ud800"}\n')
    (tmp_path / "b.csv").write_bytes(b"key,text\nc,x \xff\nd,fine\n")
    report = check_source(Source(FILES, {"files": [f"{tmp_path}/*"]}), place(engine))
    assert report["num_sampled"] == 4
    assert [row["key"] for row in report["rows"]] == ["a", "b", "c"]


def test_what_never_ends_is_not_waited_for(engine: Engine, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.md")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "a.md").write_text("text")
    (row,) = check_source(Source(TREE, {"folder": str(tmp_path)}), place(engine))["rows"]
    assert row["key"] == "a.md"
    with pytest.raises(SourceFailed, match="is not a regular file"):
        check_source(Source(FILES, {"files": [f"{tmp_path}/pipe.jsonl"]}), place(engine))
    for name in (f"{tmp_path}/pipe.md", "/dev/zero"):
        source = Source(SQL, {"query": "SELECT 1", "url_file": name})
        with pytest.raises(SourceFailed, match="is not a regular file"):
            check_source(source, place(engine))


def test_passages_fit_what_the_collections_own_vectors_read_at_once(engine: Engine, tmp_path: Path) -> None:
    submit(engine, make_items(1), collection="docs", spec=replace(SPEC, model=DEFAULT_MODEL, max_tokens=64))
    (tmp_path / "a.md").write_text("A text of a few words.")

    def look(tokens: int) -> int:
        source = Source(TREE, {"folder": str(tmp_path)}, {"by": "tokens", "tokens": tokens})
        return check_source(source, place(engine))["num_sampled"]

    assert look(62) == 1
    with pytest.raises(InvalidOption, match="reads at most 64, including special tokens, which leaves 62"):
        look(63)


PAIRS = {"query": "SELECT 1 AS key, 'x' AS text, 'y' AS other", "text_pair": "other"}
# Of a model that embeds, whose score is the cosine of two vectors, and of a classifier.
COMPARES = replace(SPEC, task=JUDGE, dimensions=1)
CLASSIFIES = replace(COMPARES, labels=("no", "yes"), activation="softmax")


def of_task(engine: Engine, spec: EncodingSpec) -> SourcePlace:
    return SourcePlace(engine, Settings(), Registry({}), collection="docs", spec=spec)


def test_rows_that_the_collections_task_cannot_read_are_refused(engine: Engine) -> None:
    cases: list[tuple[Source, EncodingSpec, str]] = [
        (Source(SQL, PAIRS), SPEC, "sets text_pair to 'other', .* remove text_pair"),
        (Source(SQL, PAIRS), replace(SPEC, task=EXTRACT), "task, extract, reads one text per row"),
        (Source(SQL, {"query": PAIRS["query"]}), COMPARES, "set text_pair to the column of the second ones"),
        (Source(FILES, {"files": ["/a.csv"]}), COMPARES, "set text_pair to the column of the second ones"),
        (Source(TREE, {"folder": "/"}), COMPARES, "a tree has one per file"),
        (Source(PUSH, {}, {"by": "paragraphs"}), COMPARES, "remove split"),
        (Source(SQL, PAIRS, {"by": "paragraphs"}), CLASSIFIES, "remove split or text_pair"),
    ]
    for source, spec, said in cases:
        with pytest.raises(InvalidOption, match=said):
            check_source(source, of_task(engine, spec))


@pytest.mark.parametrize("split", [{}, {"by": "paragraphs"}])
def test_a_classifier_reads_pairs_and_texts(engine: Engine, split: dict[str, Any]) -> None:
    (alone,) = check_source(Source(SQL, {"query": PAIRS["query"]}, split), of_task(engine, CLASSIFIES))[
        "rows"
    ]
    assert (alone["text"], alone["text_pair"]) == ("x", None)
    (pair,) = check_source(Source(SQL, PAIRS), of_task(engine, CLASSIFIES))["rows"]
    assert (pair["text"], pair["text_pair"]) == ("x", "y")


def test_a_row_without_a_second_text_is_no_pair_and_bytes_make_none(engine: Engine) -> None:
    rows = "VALUES (1, '\\x61ff62'::bytea, '\\x63'::bytea), (2, '\\x61', NULL)"
    query = f"SELECT * FROM ({rows}) AS row (key, text, other)"
    reader = open_source(Source(SQL, {"query": query, "text_pair": "other"}), of_task(engine, CLASSIFIES))
    items = [item for batch in reader.read() for item in batch]
    assert [split_pair(item.text) for item in items] == [(b"a\xfdb", b"c"), (b"a", None)]
    assert reader.complaints.num_without_text == 1
