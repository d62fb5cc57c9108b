import json

import pytest
from sqlalchemy import Engine

from tests.database import ask, execute
from tests.protocol import SPEC, claim_next, complete, submit
from vectormill.collections.collections import open_collection
from vectormill.jobs.item import Item, Items


def put(engine: Engine, key: str, content: str, metadata: dict[str, object] | None = None) -> int:
    """Encodes one item into the collection `docs`; the job's seq."""
    job = submit(engine, [make_item(key, content, metadata)], collection="docs")
    complete(engine, claim_next(engine))
    return job.seq


def make_item(key: str, content: str, metadata: dict[str, object] | None = None) -> Item:
    return Item(key, content.encode(), json.dumps(metadata).encode() if metadata is not None else b"")


def keep_texts(engine: Engine) -> None:
    ask(engine, open_collection, "docs", SPEC)
    execute(engine, "UPDATE vectormill.collections SET keep_text = true")


def read(engine: Engine, statement: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in execute(engine, statement)]


def test_metadata_lies_beside_the_vectors_and_the_view_shows_both(engine: Engine) -> None:
    put(engine, "a", "one", {"lang": "de"})
    put(engine, "b", "two")
    assert read(engine, "SELECT key, metadata, text FROM docs ORDER BY key") == [
        ("a", {"lang": "de"}, None),
        ("b", None, None),
    ]
    assert read(engine, "SELECT key, metadata_hash FROM vectormill.generation_1_attributes") == [
        ("a", *Items.of([make_item("a", "one", {"lang": "de"})]).metadata_hashes())
    ]


def test_an_item_that_comes_again_without_metadata_has_none(engine: Engine) -> None:
    put(engine, "a", "one", {"lang": "de"})
    put(engine, "a", "one")
    assert read(engine, "SELECT metadata FROM docs") == [(None,)]
    assert read(engine, "SELECT count(*) FROM vectormill.generation_1_attributes") == [(0,)]


@pytest.mark.parametrize("newer", [{"v": 2}, None], ids=["with metadata", "without"])
def test_an_older_job_that_ends_late_changes_no_attributes(
    engine: Engine, newer: dict[str, object] | None
) -> None:
    submit(engine, [make_item("a", "old", {"v": 1})], collection="docs")
    older = claim_next(engine)
    put(engine, "a", "new", newer)
    complete(engine, older)
    assert read(engine, "SELECT metadata FROM docs") == [(newer,)]


def test_a_text_is_kept_where_the_collection_keeps_texts(engine: Engine) -> None:
    keep_texts(engine)
    put(engine, "a", "the kept words")
    assert read(engine, "SELECT text FROM docs") == [("the kept words",)]
    found = "SELECT key FROM vectormill.generation_1_attributes WHERE search @@ to_tsquery('simple', 'kept')"
    assert read(engine, found) == [("a",)]


def test_the_passage_of_a_document_is_found_by_it(engine: Engine) -> None:
    put(engine, "doc#0", "one", {"_passage": {"document": "doc", "index": 0, "start": 0, "end": 3}})
    assert read(engine, "SELECT document FROM vectormill.generation_1_attributes") == [("doc",)]
