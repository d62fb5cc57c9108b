"""Collections that follow real sources by runs: what is encoded and deleted when the source changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text

from indexer import reindexing
from tests.api_server import api_client, encoding_meanwhile
from tests.database import ask, execute
from tests.indexers import (
    KeptSource,
    await_run,
    contents,
    count_encoded,
    indexing,
    make_collection,
    start_run,
)
from vectormill.client import Client
from vectormill.jobs.item import Item
from vectormill.runs.run import Run, RunCounts
from vectormill.sources.source import PUSH, SQL, TREE, Source
from vectormill.sources.sources import save_source

PARAGRAPHS = {"by": "paragraphs", "min_chars": 20, "max_chars": 200}


@pytest.fixture
def followed(engine: Engine) -> Iterator[Engine]:
    """A collection `docs`, an indexer and a stand-in for the workers."""
    make_collection(engine)
    source = KeptSource()
    with encoding_meanwhile(engine), indexing(engine, source, source.open):
        yield engine


def follow(engine: Engine) -> Run:
    return await_run(engine, start_run(engine))


def paragraph(number: int) -> str:
    return f"This is the paragraph with the number {number}, and it is long enough."


def write(path: Path, *numbers: int) -> None:
    path.write_text("\n\n".join(paragraph(number) for number in numbers))


def test_a_changed_document_replaces_exactly_its_own_passages(followed: Engine, tmp_path: Path) -> None:
    write(tmp_path / "a.txt", 1, 2, 3, 4)
    write(tmp_path / "b.txt", 5, 6)
    write(tmp_path / "c.txt", 7)
    write(tmp_path / "z.txt", *range(100, 120))  # or the guard would find too much changed
    ask(followed, save_source, "docs", Source(TREE, {"folder": str(tmp_path)}, PARAGRAPHS))
    first = follow(followed)
    assert first.counts == RunCounts(num_seen=27, num_new=27)
    assert count_encoded(followed) == 27
    write(tmp_path / "a.txt", 1, 99, 3)  # one is another, and the last one is gone
    write(tmp_path / "b.txt", 5, 55, 6)  # one is new, and that behind it has moved
    (tmp_path / "c.txt").unlink()
    second = follow(followed)
    assert count_encoded(followed) == 27 + 2
    assert second.counts.num_deleted == 2
    assert second.counts.num_failed == 0
    kept = {key: row for key, row in contents(followed).items() if not key.startswith("z")}
    assert sorted(kept) == ["a.txt#0", "a.txt#1", "a.txt#2", "b.txt#0", "b.txt#1", "b.txt#2"]
    texts = {
        f"{name}#{index}": paragraph(number)
        for name, numbers in {"a.txt": (1, 99, 3), "b.txt": (5, 55, 6)}.items()
        for index, number in enumerate(numbers)
    }
    for key, content in texts.items():
        content_hash, metadata = kept[key]
        assert content_hash == Item(key, content.encode()).content_hash()
        assert metadata is not None
        passage = metadata["_passage"]
        whole = (tmp_path / passage["document"]).read_text()
        assert whole[passage["start"] : passage["end"]] == content
    assert follow(followed).counts == RunCounts(num_seen=26, num_unchanged=26)


def test_a_query_is_followed_and_one_that_fails_midway_deletes_nothing(
    followed: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARTICLES_URL", f"sqlite:///{tmp_path}/articles.db")
    articles = create_engine(f"sqlite:///{tmp_path}/articles.db")
    with articles.begin() as connection:
        connection.execute(text("CREATE TABLE articles (id INTEGER, body TEXT, lang TEXT)"))
        rows = [{"id": number, "body": f"text {number}", "lang": "de"} for number in range(600)]
        connection.execute(text("INSERT INTO articles VALUES (:id, :body, :lang)"), rows)
    options = {"query": "SELECT * FROM articles", "key": "id", "text": "body", "metadata": ["lang"]}
    ask(followed, save_source, "docs", Source(SQL, options | {"url_env": "ARTICLES_URL"}))
    assert follow(followed).counts == RunCounts(num_seen=600, num_new=600)
    execute(articles, "DELETE FROM articles WHERE id = 7")
    execute(articles, "UPDATE articles SET lang = 'en' WHERE id = 8")
    execute(articles, "UPDATE articles SET body = NULL WHERE id = 9")
    articles.dispose()
    ended = follow(followed)
    assert (ended.state, ended.counts.num_deleted, ended.counts.num_metadata_only) == (
        "completed_with_errors",
        1,
        1,
    )
    assert ended.counts.num_failed == 1
    assert ended.report["reading"]["num_without_text"] == 1
    before = contents(followed)
    broken = "SELECT id, body, lang FROM articles WHERE id < 500 UNION ALL SELECT 'x', abs(-9223372036854775808), ''"
    ask(followed, save_source, "docs", Source(SQL, options | {"url_env": "ARTICLES_URL", "query": broken}))
    failed = follow(followed)
    assert failed.state == "failed"
    assert "integer overflow" in str(failed.error)
    assert contents(followed) == before


@pytest.mark.parametrize("split", [{}, PARAGRAPHS])
def test_a_row_that_no_page_had_is_deleted_only_if_the_source_does_not_have_it(
    followed: Engine, monkeypatch: pytest.MonkeyPatch, split: dict[str, Any]
) -> None:
    execute(followed, "CREATE TABLE papers (id int PRIMARY KEY, body text)")
    execute(followed, "INSERT INTO papers SELECT n, 'text ' || n FROM generate_series(1, 20) AS n")
    options = {"query": "SELECT * FROM papers", "key": "id", "text": "body", "pages": True}
    ask(followed, save_source, "docs", Source(SQL, options, split))
    assert follow(followed).counts.num_new == 20
    before = contents(followed)
    execute(followed, "DELETE FROM papers WHERE id IN (3, 7, 9)")
    look_for_vanished = reindexing.look_for_vanished

    def look_after_an_insert(*arguments: Any) -> None:
        execute(followed, "INSERT INTO papers VALUES (3, 'back'), (9, 'text 9')")
        look_for_vanished(*arguments)

    monkeypatch.setattr(reindexing, "look_for_vanished", look_after_an_insert)
    ended = follow(followed)
    assert (ended.state, ended.counts.num_deleted) == ("completed", 1)
    gone = {"7#0" if split else "7"}
    assert contents(followed) == {key: row for key, row in before.items() if key not in gone}


def test_only_a_push_of_all_rows_deletes_the_others(followed: Engine) -> None:
    ask(followed, save_source, "docs", Source(PUSH, {}))
    rows: list[Any] = [{"key": f"k{n}", "text": f"text {n}", "metadata": {"b": 1, "a": n}} for n in range(10)]
    with api_client(followed) as api, Client(str(api.base_url)) as client:

        def push(items: list[Any], *, complete: bool) -> Run:
            return await_run(followed, UUID(client.push("docs", items, complete=complete)["run"]))

        assert push(rows, complete=True).counts == RunCounts(num_seen=10, num_new=10)
        assert push(rows, complete=True).counts == RunCounts(num_seen=10, num_unchanged=10)
        some = push([{"key": "k1", "text": "another"}], complete=False)
        assert (some.counts.num_changed, some.counts.num_deleted) == (1, 0)
        rest = push(rows[:9], complete=True)
        assert (rest.counts.num_changed, rest.counts.num_deleted) == (1, 1)
    assert sorted(contents(followed)) == [f"k{n}" for n in range(9)]
    nothing_pushed = follow(followed)
    assert (nothing_pushed.state, len(contents(followed))) == ("failed", 9)
    assert "Nothing was pushed" in str(nothing_pushed.error)
