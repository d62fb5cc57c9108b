"""A collection made, changed and deleted: what is refused, what is left, and what becomes of its jobs."""

from typing import Any

import httpx
import pytest
from sqlalchemy import Connection, Engine, text

from scheduler.pruner import Pruner
from tests.api_server import SMALL, api_client, assert_problem, delete, encode_waiting, many, submit
from tests.database import execute
from tests.protocol import claim_next, complete
from vectormill.client import Client
from vectormill.collections import removals
from vectormill.collections.removals import LIST_ORPHANS, drop_orphaned_tables, remove_collection
from vectormill.domain.errors import CollectionInUse

NEVER = 1e9

LIST_TABLES = text("""
    SELECT relname FROM pg_class WHERE relnamespace = CAST('vectormill' AS regnamespace) AND relkind = 'r'
       AND relname LIKE 'generation\\_%' ORDER BY 1
""")


@pytest.fixture
def docs(http: httpx.Client, engine: Engine) -> dict[str, Any]:
    """The ended job that filled the collection."""
    job = submit(http, many(10), collection="docs")
    encode_waiting(engine)
    return job


def ask(engine: Engine, statement: str) -> Any:
    return execute(engine, statement).scalar()


def list_tables(engine: Engine) -> list[str]:
    return list(execute(engine, LIST_TABLES).scalars())


def make_run(engine: Engine, state: str, lease: str = "NULL") -> str:
    statement = f"""
        INSERT INTO vectormill.runs (id, collection_id, kind, state, lease_until)
        SELECT gen_random_uuid(), id, 'reindex', '{state}', {lease} FROM vectormill.collections RETURNING id
    """
    return str(ask(engine, statement))


def test_a_collection_is_made_before_any_job_and_filled_afterwards(
    http: httpx.Client, engine: Engine
) -> None:
    body = {"name": "docs", "options": SMALL, "keep_text": True, "language": "german", "index_policy": "none"}
    made = http.post("/v1/collections", json=body)
    assert made.status_code == 201, made.text
    assert made.json()["keep_text"] is True
    assert (made.json()["language"], made.json()["index_policy"]) == ("german", "none")
    assert (made.json()["dimensions"], made.json()["num_rows"]) == (8, 0)
    assert ask(engine, "SELECT count(*) FROM docs") == 0
    submit(http, [{"key": "a", "text": "die Häuser"}], collection="docs")
    encode_waiting(engine)
    assert ask(engine, "SELECT text FROM docs") == "die Häuser"
    table = list_tables(engine)[1]
    assert ask(engine, f"SELECT CAST(search AS text) FROM vectormill.{table}") == "'haus':2"
    assert_problem(http.post("/v1/collections", json=body), 409, "conflict", "already")


def test_what_cannot_be_a_collection_is_refused_and_leaves_nothing(
    http: httpx.Client, engine: Engine
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "No-Name"}, "invalid-option"),
        ({"name": "select"}, "invalid-option"),
        ({"name": "docs", "language": "klingon"}, "invalid-option"),
        ({"name": "docs", "language": "a\0b"}, "invalid-option"),
        ({"name": "docs", "model": "nothing"}, "unknown-model"),
        ({"name": "docs", "options": {"prompt": "a\0b"}}, "invalid-option"),
        ({"name": "docs", "index_options": {"m": 1}}, "invalid-request"),
        ({"name": "docs", "index_options": {"m": 100, "ef_construction": 100}}, "invalid-option"),
        ({"name": "docs", "index_policy": "always"}, "invalid-request"),
        ({}, "invalid-request"),
    ]
    for body, code in cases:
        assert_problem(http.post("/v1/collections", json=body), 422, code)
        assert list_tables(engine) == []


def test_no_more_collections_are_made_than_the_setting_allows(engine: Engine) -> None:
    with api_client(engine, max_collections=1) as http:
        assert http.post("/v1/collections", json={"name": "docs"}).status_code == 201
        assert_problem(http.post("/v1/collections", json={"name": "more"}), 409, "too-many-collections")


def test_texts_are_kept_from_the_moment_that_it_is_wished(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    changed = http.patch("/v1/collections/docs", json={"keep_text": True, "language": "english"})
    assert (changed.json()["keep_text"], changed.json()["language"]) == (True, "english")
    submit(http, [{"key": "late", "text": "many houses"}], collection="docs")
    encode_waiting(engine)
    assert ask(engine, "SELECT count(text) FROM docs") == 1
    http.patch("/v1/collections/docs", json={"language": "simple"})
    table = list_tables(engine)[1]
    found = ask(engine, f"SELECT CAST(search AS text) FROM vectormill.{table} WHERE key = 'late'")
    assert found == "'houses':2 'many':1"
    assert_problem(
        http.patch("/v1/collections/docs", json={"language": "x"}), 422, "invalid-option", "german"
    )
    assert_problem(http.patch("/v1/collections/other", json={}), 404, "collection-not-found")


def test_many_kept_texts_are_not_read_anew_under_everybody_s_hands(
    http: httpx.Client, engine: Engine, docs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.collections.collections.MOST_REWRITTEN_TEXTS", 3)
    table = list_tables(engine)[1]
    ask(
        engine,
        f"WITH kept AS (INSERT INTO vectormill.{table} (key, text, job_seq) SELECT key, 'x', 1 FROM docs RETURNING 1)"
        " SELECT count(*) FROM kept",
    )
    assert_problem(
        http.patch("/v1/collections/docs", json={"language": "german"}), 409, "conflict", "would block"
    )


def test_a_deleted_collection_leaves_neither_view_nor_row_nor_table(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    tables = list_tables(engine)
    assert len(tables) == 2
    assert delete(http, "/v1/collections/docs").status_code == 204
    assert_problem(http.get("/v1/collections/docs"), 404, "collection-not-found")
    assert http.get("/v1/collections").json()["data"] == []
    assert ask(engine, "SELECT to_regclass('public.docs')") is None
    assert list_tables(engine) == tables  # until the pruner comes by
    assert_problem(delete(http, "/v1/collections/docs"), 404, "collection-not-found")
    Pruner(engine, NEVER, NEVER).prune()
    assert list_tables(engine) == []


def test_the_name_of_a_deleted_collection_is_free_for_another_model_s_vectors(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    delete(http, "/v1/collections/docs")
    submit(http, many(3), collection="docs", options={"dimensions": 8, "vector_type": "float32"})
    Pruner(engine, NEVER, NEVER).prune()
    encode_waiting(engine)
    assert ask(engine, "SELECT count(*) FROM docs") == 3


def test_the_job_of_a_deleted_collection_says_where_its_vectors_were(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    beside = submit(http, many(2))
    failed = submit(http, [*many(2), {"key": "blank", "text": " "}], collection="docs")
    encode_waiting(engine)
    delete(http, "/v1/collections/docs")
    assert http.get(f"/v1/jobs/{docs['id']}").json()["collection"] is None
    for format in ("ndjson", "parquet", "npy"):
        answer = http.get(f"/v1/jobs/{docs['id']}/vectors", params={"format": format})
        assert_problem(answer, 404, "collection-not-found", "were deleted together with")
    assert_problem(http.post(f"/v1/jobs/{failed['id']}/retry"), 409, "wrong-job-state", "since been deleted")
    assert len(http.get(f"/v1/jobs/{beside['id']}/vectors").text.splitlines()) == 2
    assert delete(http, f"/v1/jobs/{docs['id']}").status_code == 204


def test_the_job_of_a_pruned_generation_says_so(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    ask(engine, "WITH pruned AS (UPDATE vectormill.generations SET state = 'pruned' RETURNING 1) SELECT 1")
    with engine.begin() as connection:
        connection.execute(text("DROP VIEW docs"))
        for table in list_tables(engine):
            connection.execute(text(f"DROP TABLE vectormill.{table}"))
    assert_problem(
        http.get(f"/v1/jobs/{docs['id']}/vectors"), 404, "generation-not-found", "has been replaced"
    )


def test_a_collection_on_which_a_job_works_is_deleted_only_by_force(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    job = submit(http, [{"key": "late", "text": "late"}], collection="docs")
    assert_problem(delete(http, "/v1/collections/docs"), 409, "collection-in-use", job["id"], "force")
    assert ask(engine, "SELECT count(*) FROM docs") == 10
    assert delete(http, "/v1/collections/docs", force=True).status_code == 204
    assert http.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"


def test_a_deletion_by_force_waits_for_what_a_worker_has_in_hand(
    http: httpx.Client, engine: Engine, docs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.routes.collections.DELETION_SECONDS", 0.3)
    submit(http, [{"key": "late", "text": "late"}], collection="docs")
    claimed = claim_next(engine)
    assert_problem(delete(http, "/v1/collections/docs", force=True), 409, "collection-in-use", "cancelling")
    assert ask(engine, "SELECT count(*) FROM docs") == 10
    complete(engine, claimed)
    assert delete(http, "/v1/collections/docs", force=True).status_code == 204


@pytest.mark.parametrize(
    ("state", "lease", "is_refused", "is_left_by_force"),
    [
        ("queued", "NULL", True, False),
        ("held", "NULL", True, False),
        ("running", "now() + interval '1 minute'", True, True),
        ("running", "now() - interval '1 minute'", False, False),  # nobody's: who comes back finds it gone
        ("completed", "NULL", False, False),
    ],
)
def test_a_collection_on_which_a_run_works_is_deleted_only_by_force(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    lease: str,
    is_refused: bool,
    is_left_by_force: bool,
) -> None:
    monkeypatch.setattr("api.routes.collections.DELETION_SECONDS", 0.0)
    with api_client(engine) as http:
        http.post("/v1/collections", json={"name": "docs"})
        run = make_run(engine, state, lease)
        answer = delete(http, "/v1/collections/docs")
        if not is_refused:
            assert answer.status_code == 204
            return
        assert_problem(answer, 409, "collection-in-use", run)
        forced = delete(http, "/v1/collections/docs", force=True)
        assert forced.status_code == (409 if is_left_by_force else 204)
        if is_left_by_force:
            assert ask(engine, "SELECT state FROM vectormill.runs") == "cancelling"


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("CREATE VIEW mine AS SELECT key FROM docs", "mine"),
        ("CREATE MATERIALIZED VIEW mine AS SELECT count(*) FROM docs", "mine"),
        ("CREATE FUNCTION of_docs(docs) RETURNS text LANGUAGE sql AS 'SELECT 1::text'", "of_docs"),
        ("CREATE VIEW mine AS SELECT key FROM vectormill.{table}", "mine"),
    ],
)
def test_what_depends_on_the_view_is_named_and_nothing_is_deleted(
    http: httpx.Client, engine: Engine, docs: dict[str, Any], statement: str, name: str
) -> None:
    execute(engine, statement.format(table=list_tables(engine)[0]))
    assert_problem(delete(http, "/v1/collections/docs"), 409, "collection-in-use", name, "Drop them first")
    assert ask(engine, "SELECT count(*) FROM docs") == 10
    assert http.get("/v1/collections/docs").status_code == 200


def test_a_reader_of_the_view_holds_a_deletion_back_and_nobody_else(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    with engine.connect() as reader:
        reader.execute(text("SELECT * FROM docs")).all()
        with pytest.raises(CollectionInUse, match="moment"):
            remove_collection(engine, "docs")
        assert ask(engine, "SELECT count(*) FROM docs") == 10
    remove_collection(engine, "docs")


def test_a_deletion_that_is_killed_anywhere_leaves_all_or_tables_for_the_pruner(
    http: httpx.Client, engine: Engine, docs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    steps = ("_refuse_open_work", "_drop_view")
    for step in steps:

        def kill(*arguments: object) -> None:
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(removals, step, kill)
            with pytest.raises(Killed):
                remove_collection(engine, "docs")
        assert ask(engine, "SELECT count(*) FROM docs") == 10

    def kill_at_commit(connection: Connection, *arguments: Any) -> None:
        removals_remove(connection, *arguments)
        raise Killed

    removals_remove = removals._remove
    with monkeypatch.context() as patch:
        patch.setattr(removals, "_remove", kill_at_commit)
        with pytest.raises(Killed):
            remove_collection(engine, "docs")
    assert ask(engine, "SELECT count(*) FROM docs") == 10
    assert list(execute(engine, LIST_ORPHANS).scalars()) == []

    remove_collection(engine, "docs")  # and killed behind its COMMIT
    orphans = list(execute(engine, LIST_ORPHANS).scalars())
    assert len(orphans) == 2
    with engine.begin() as connection:  # a pruner that is killed between two tables
        connection.execute(text(f"DROP TABLE vectormill.{orphans[0]}"))
    assert drop_orphaned_tables(engine) == 1
    assert list_tables(engine) == []


def test_tables_of_collections_that_are_there_belong_to_somebody(
    engine: Engine, docs: dict[str, Any]
) -> None:
    assert drop_orphaned_tables(engine) == 0
    assert len(list_tables(engine)) == 2


def test_a_view_that_somebody_has_put_in_its_place_is_left_alone(
    http: httpx.Client, engine: Engine, docs: dict[str, Any]
) -> None:
    execute(engine, "DROP VIEW docs")
    execute(engine, "CREATE TABLE docs (mine int)")
    assert delete(http, "/v1/collections/docs").status_code == 204
    assert ask(engine, "SELECT count(*) FROM docs") == 0


def test_the_client_makes_changes_and_deletes_a_collection(http: httpx.Client) -> None:
    with Client(str(http.base_url)) as client:
        made = client.create_collection("docs", options={"dimensions": 16}, keep_text=True)
        assert (made["dimensions"], made["keep_text"]) == (16, True)
        assert client.change_collection("docs", language="english")["language"] == "english"
        client.delete_collection("docs")
        assert list(client.collections()) == []
