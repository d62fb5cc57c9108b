import json

import pytest
from sqlalchemy import Engine, text

from tests.integration.jobs.test_migrations import downgrade
from tests.protocol import SPEC, claim_next, complete, submit, vector_of
from vectormill.collections.collections import open_collection
from vectormill.db.migrations import upgrade
from vectormill.jobs.item import Item


def put(engine: Engine, key: str, content: str, metadata: dict[str, object] | None = None) -> int:
    """Encodes one item into the collection `docs`; the job's seq."""
    job = submit(engine, [make_item(key, content, metadata)], collection="docs")
    complete(engine, claim_next(engine))
    return job.seq


def make_item(key: str, content: str, metadata: dict[str, object] | None = None) -> Item:
    return Item(key, content.encode(), json.dumps(metadata).encode() if metadata is not None else b"")


def keep_texts(engine: Engine) -> None:
    with engine.begin() as connection:
        open_collection(connection, "docs", SPEC)
        connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))


def read(engine: Engine, statement: str) -> list[tuple[object, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(statement))]


def test_metadata_lies_beside_the_vectors_and_the_view_shows_both(engine: Engine) -> None:
    put(engine, "a", "one", {"lang": "de"})
    put(engine, "b", "two")
    assert read(engine, "SELECT key, metadata, text FROM docs ORDER BY key") == [
        ("a", {"lang": "de"}, None),
        ("b", None, None),
    ]
    assert read(engine, "SELECT count(metadata) FROM vectormill.generation_1") == [(0,)]
    assert read(engine, "SELECT key, metadata_hash FROM vectormill.generation_1_attributes") == [
        ("a", make_item("a", "one", {"lang": "de"}).metadata_hash())
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


# What a worker of the release before sends.
FORMER_UPSERT = text("""
    INSERT INTO vectormill.generation_1 AS live (key, content_hash, embedding, job_seq, metadata)
    VALUES ('a', 'x', CAST(:embedding AS halfvec), :seq, CAST(:metadata AS jsonb))
    ON CONFLICT (key) DO UPDATE
       SET content_hash = excluded.content_hash, embedding = excluded.embedding,
           job_seq = excluded.job_seq, metadata = excluded.metadata
     WHERE live.job_seq <= excluded.job_seq
""")


def test_metadata_that_a_former_worker_writes_is_carried_to_its_place(engine: Engine) -> None:
    seq = put(engine, "a", "one", {"v": 1})
    embedding = str(vector_of(b"x").tolist())
    for number, metadata in enumerate(('{"v": 2}', None, '{"v": 3}'), start=1):
        with engine.begin() as connection:
            connection.execute(
                FORMER_UPSERT, {"seq": seq + number, "metadata": metadata, "embedding": embedding}
            )
        wanted = None if metadata is None else json.loads(metadata)
        assert read(engine, "SELECT metadata FROM docs") == [(wanted,)]


def test_a_collection_that_a_former_api_makes_has_attributes_from_its_commit_on(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO vectormill.collections (name) VALUES ('docs')"))
        connection.execute(
            text("""
            INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state)
            SELECT id, CAST(:spec AS jsonb), :fingerprint, 'live' FROM vectormill.collections
            """),
            {"spec": json.dumps(SPEC.to_json()), "fingerprint": SPEC.fingerprint()},
        )
        connection.execute(
            text("""
            CREATE TABLE vectormill.generation_1 (key text PRIMARY KEY, content_hash bytea NOT NULL,
                embedding halfvec(8) NOT NULL, job_seq bigint NOT NULL, metadata jsonb)
            """)
        )
        connection.execute(
            text("""
            CREATE VIEW public.docs AS SELECT key, embedding, metadata, content_hash, job_seq
              FROM vectormill.generation_1
            """)
        )
    put(engine, "a", "one", {"v": 1})
    assert read(engine, "SELECT key, metadata, text FROM docs") == [("a", {"v": 1}, None)]


def test_metadata_survives_the_way_to_the_former_schema_and_back(database_url: str, engine: Engine) -> None:
    put(engine, "a", "one", {"v": 1})
    put(engine, "b", "two")
    downgrade(database_url, "0012")
    assert read(engine, "SELECT key, metadata FROM docs ORDER BY key") == [("a", {"v": 1}), ("b", None)]
    upgrade(database_url)
    assert read(engine, "SELECT key, metadata, text FROM docs ORDER BY key") == [
        ("a", {"v": 1}, None),
        ("b", None, None),
    ]
