"""A database that the release before has filled is brought to this one: nothing is lost, and its jobs go on."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, text

from tests.database import ask, execute
from tests.former import extract_release, fill_as_release
from tests.protocol import check_open_job_counts, claim_next, complete, vector_of
from vectormill.db.migrations import find_missing_revision, upgrade
from vectormill.jobs.jobs import find_job

LIST_TABLES = text("""
    SELECT relname FROM pg_class WHERE relnamespace = 'vectormill'::regnamespace AND relkind IN ('r', 'p')
       AND relname <> 'alembic_version' ORDER BY relname
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
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    extract_release(tmp_path)
    execute(engine, "DROP SCHEMA vectormill CASCADE")
    fill_as_release(tmp_path, database_url)
    engine.dispose()
    before = read_tables(engine)
    empty = [name for name, rows in before.items() if not rows and not name.startswith("generation_")]
    assert not empty, "each table has to have something to lose"
    found = execute(engine, "SELECT key, embedding::text FROM docs ORDER BY key").all()
    assert len(found) == 10

    upgrade(database_url)

    assert find_missing_revision(engine) is None
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
