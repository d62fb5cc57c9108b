"""The role of compose's services: no superuser, and all that they do with Postgres works with it.

The script that makes it is run as the image runs it; the imported tests then go through the protocol with that role.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import URL, make_url

from tests.integration.chunks.test_protocol import (  # noqa: F401
    test_a_chunk_that_keeps_crashing_is_split_down_to_the_item_to_blame,
    test_a_collection_is_a_view_that_sql_can_search,
    test_a_heartbeat_renews_leases_and_tells_of_lost_ones_and_of_cancelled_jobs,
    test_a_worker_that_lost_its_lease_writes_nothing,
    test_an_ended_job_is_pruned_after_its_retention_but_its_collection_stays,
    test_an_idempotency_key_answers_the_same_job_and_refuses_other_content,
    test_an_older_job_never_overwrites_a_newer_one,
    test_every_item_of_a_job_gets_its_own_vector_in_the_order_of_submission,
    test_expired_leases_and_lost_dispatches_go_back_to_pending,
)
from tests.integration.indexing.test_indexing_ended import (  # noqa: F401
    test_what_a_killed_indexer_left_is_ended_and_removed_by_whoever_takes_the_run_over,
)
from tests.integration.runs.conftest import followed, papers  # noqa: F401
from tests.integration.runs.test_followed_tables import (  # noqa: F401
    test_to_follow_twice_changes_nothing,
    test_with_its_collection_the_triggers_of_a_table_go,
)
from tests.integration.runs.test_runs import (  # noqa: F401
    test_what_a_client_puts_or_deletes_during_a_run_is_newer_than_its_source,
)
from vectormill.db.election import LISTEN_FOR_JOBS
from vectormill.db.migrations import upgrade
from vectormill.embedded.binaries import find_postgres

SCRIPT = Path(__file__).resolve().parents[3] / "deploy/postgres/role.sql"
# The embedded Postgres has a role vectormill already, and there it is the superuser.
ROLE, IMAGE = "services", "image"
PASSWORD = "moonshine"
DESCRIBE_ROLE = """
    SELECT rolsuper, rolcreatedb, rolcreaterole, rolreplication, rolbypassrls
      FROM pg_roles WHERE rolname = current_user
"""


def connect(url: URL) -> "psycopg.Connection[tuple[object, ...]]":
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(plain, autocommit=True)


@pytest.fixture(scope="module")
def filled_url(postgres_url: str) -> Iterator[URL]:
    """A database as the image leaves it when it has filled a new volume, migrated by the role that the script made."""
    server = make_url(postgres_url)
    database = server.set(database=f"compose_{uuid4().hex[:12]}")
    image = database.set(username=IMAGE, password=PASSWORD)
    with connect(server) as administering:
        administering.execute(f"CREATE ROLE {IMAGE} SUPERUSER LOGIN PASSWORD '{PASSWORD}'")
        administering.execute(f"CREATE DATABASE {database.database}")
        try:
            address = image.set(drivername="postgresql").render_as_string(hide_password=False)
            subprocess.run(
                [
                    find_postgres(None).program("psql"),
                    "--no-psqlrc",
                    "--set=ON_ERROR_STOP=1",
                    "--quiet",
                    address,
                ],
                env={**os.environ, "POSTGRES_PASSWORD": PASSWORD},
                input=SCRIPT.read_text().replace("vectormill", ROLE),
                text=True,
                check=True,
            )
            with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
                connect(image)
            services = database.set(username=ROLE, password=PASSWORD)
            upgrade(services.render_as_string(hide_password=False))
            yield services
        finally:
            administering.execute(f"DROP DATABASE {database.database} WITH (FORCE)")
            administering.execute(f"DROP ROLE IF EXISTS {ROLE}, {IMAGE}")


@pytest.fixture
def database_url(postgres_url: str, filled_url: URL) -> Iterator[str]:
    """A copy of it for one test."""
    copy = filled_url.set(database=f"{filled_url.database}_copy")
    names = [sql.Identifier(name) for name in (copy.database or "", filled_url.database or "", ROLE)]
    with connect(make_url(postgres_url)) as administering:
        administering.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {} OWNER {}").format(*names))
        yield copy.render_as_string(hide_password=False)
        administering.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(names[0]))


def test_the_role_of_the_services_has_no_right_beyond_its_database(database_url: str) -> None:
    with connect(make_url(database_url)) as services:
        assert services.execute(DESCRIBE_ROLE).fetchone() == (False,) * 5
        services.execute(LISTEN_FOR_JOBS)
        for statement in (
            "COPY (SELECT 1) TO PROGRAM 'true'",
            "SELECT pg_read_file('/etc/passwd')",
            "CREATE DATABASE another",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                services.execute(statement)
