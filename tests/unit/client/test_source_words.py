"""A source said in a word: what kind it is."""

from pathlib import Path

import pytest

from vectormill.cli.sources import read_source


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("SELECT id, body FROM articles", "sql"),
        ("with some as (select 1) select * from some", "sql"),
        ("select", "files"),  # a file of this name
        ("s3://bucket/articles/*.parquet", "files"),
        ("articles.jsonl", "files"),
        ("docs/", "tree"),
        ("my notes/", "tree"),
    ],
)
def test_a_query_a_folder_and_files_are_told_apart(where: str, kind: str) -> None:
    assert read_source(where, key=None, text=None, metadata=None)[0] == kind


def test_a_folder_that_is_there_needs_no_slash(tmp_path: Path) -> None:
    found = read_source(str(tmp_path), key="id", text=None, metadata=["lang"])
    assert found == ("tree", {"folder": str(tmp_path)})


def test_columns_go_with_what_has_some() -> None:
    found = read_source("SELECT 1", key="id", text="body", metadata=["lang"])
    assert found == ("sql", {"query": "SELECT 1", "key": "id", "text": "body", "metadata": ["lang"]})
