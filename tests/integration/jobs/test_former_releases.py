"""A database that the release before has filled is brought to this one: nothing is lost, and its jobs go on.

That release served as a superuser, which owned everything.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.former import extract_release, fill_as_release
from tests.protocol import check_open_job_counts, claim_next, complete, vector_of
from tests.services import connected_engine, empty_database, settings_of
from vectormill.db.backup import dump, restore
from vectormill.db.migrations import find_missing_revision, migrate
from vectormill.db.roles import connect_alone
from vectormill.embedded.binaries import find_client
from vectormill.embedded.postgres import give_roles
from vectormill.jobs.jobs import find_job

LIST_TABLES = text("""
    SELECT relname FROM pg_class WHERE relnamespace = 'vectormill'::regnamespace AND relkind IN ('r', 'p')
       AND relname <> 'alembic_version' ORDER BY relname
""")
# This lists the tables, views and sequences of Vectormill that still belong to another role, such as the superuser.
LIST_OTHERS = text("""
    SELECT oid::regclass::text FROM pg_class
     WHERE relnamespace IN ('vectormill'::regnamespace, 'public'::regnamespace) AND relkind IN ('r', 'p', 'v', 'S')
       AND pg_get_userbyid(relowner) NOT IN ('vectormill_owner', 'vectormill_service')
""")
LET_LEASES_LAPSE = text("""
    UPDATE vectormill.chunks SET state = 'pending', lease_owner = NULL, lease_until = NULL WHERE state = 'leased'
""")


def read_tables(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """Every row of ours, and of generations, as JSON: whatever its columns are."""
    names = execute(engine, LIST_TABLES).scalars().all()
    return {
        name: [
            dict(row)
            for row in execute(
                engine,
                f'SELECT to_jsonb(each) FROM vectormill."{name}" AS each ORDER BY to_jsonb(each)::text',
            ).scalars()
        ]
        for name in names
    }


def test_what_a_former_release_has_stored_is_all_there_and_its_jobs_go_on(
    postgres_url: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(empty_database(postgres_url))
        admin = stack.enter_context(connected_engine(url))
        roles = settings_of(url)
        engine = stack.enter_context(connected_engine(roles.need("database_url")))
        extract_release(tmp_path)
        fill_as_release(tmp_path, url)
        before = read_tables(admin)
        empty = [name for name, rows in before.items() if not rows and not name.startswith("generation_")]
        assert not empty, "each table has to have something to lose"
        found = execute(admin, "SELECT key, embedding::text FROM docs ORDER BY key").all()
        assert len(found) == 10

        with connect_alone(url) as connection:
            give_roles(connection, postgres_url)
        migrate(roles)

        assert find_missing_revision(engine) is None
        assert execute(admin, LIST_OTHERS).scalars().all() == []
        check_open_job_counts(engine)
        after = read_tables(engine)
        for name, rows in before.items():
            assert len(after[name]) == len(rows), name
            kept = [{column: row.get(column) for column in rows[0]} for row in after[name]]
            assert all(row in kept for row in rows), name
        assert execute(engine, "SELECT key, embedding::text FROM docs ORDER BY key").all() == found
        execute(engine, LET_LEASES_LAPSE)
        job_id = execute(engine, "SELECT id FROM vectormill.jobs WHERE state = 'running'").scalar_one()
        while not complete(engine, claim_next(engine)):
            pass
        job = ask(engine, find_job, job_id)
        embedding = execute(engine, "SELECT embedding::text FROM docs WHERE key = 'open8'").scalar_one()
        assert (job.state, job.num_done) == ("completed", 9)
        first = float(embedding.strip("[]").split(",")[0])
        assert first == pytest.approx(vector_of(b"text open 8")[0], abs=1e-3)

        dumped, copy = tmp_path / "vectormill.dump", stack.enter_context(empty_database(postgres_url))
        with connect_alone(copy) as connection:
            give_roles(connection, postgres_url)
        dump(find_client("pg_dump"), roles, dumped)
        restore(find_client("pg_restore"), settings_of(copy), dumped)
        restored = stack.enter_context(connected_engine(settings_of(copy).need("database_url")))
        assert read_tables(restored) == read_tables(engine)
        others = stack.enter_context(connected_engine(copy))
        assert execute(others, LIST_OTHERS).scalars().all() == []
