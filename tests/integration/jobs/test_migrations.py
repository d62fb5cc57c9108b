"""The schema is what its page and the code say; migrating is safe to repeat, to run twice at once and to take back."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import IntegrityError

from tests.architecture.sources import DOCS
from tests.database import ask, execute
from tests.protocol import claim_next, complete, make_items, submit
from tests.schema import HEAD, describe_schema
from tests.services import connected_engine, migrated_database, of_database, settings_of
from tests.states import ALL_JOB_STATES, CHUNK_STATES, REQUEST_FILE_STATES
from vectormill.batches.request_batch import (
    BATCH_STATES,
    ENDPOINTS,
    OPEN_BATCH_STATES,
    PURPOSES,
)
from vectormill.collections.collection import GENERATION_STATES, INDEX_POLICIES
from vectormill.db.migrations import find_missing_revision, make_config, upgrade
from vectormill.db.scripts import SCRIPTS, find_newest_revision
from vectormill.domain.errors import ConfigurationError
from vectormill.jobs.job import (
    DISPATCHED_JOB_STATES,
    OPEN_JOB_STATES,
    TERMINAL_JOB_STATES,
    Job,
)
from vectormill.jobs.jobs import find_job
from vectormill.jobs.partitions import list_spans
from vectormill.keys.api_key import SCOPES
from vectormill.objects.input import INPUT, INPUT_STATES
from vectormill.objects.output import DUE_OUTPUT_STATES, OUTPUT_STATES
from vectormill.runs.run import CLAIMED_RUN_STATES, OPEN_RUN_STATES, RUN_KINDS, RUN_PHASES, RUN_STATES
from vectormill.schedules.schedule import OVERLAPS
from vectormill.sources.source import SOURCE_KINDS
from vectormill.webhooks.webhook import DELIVERY_STATES

PAGE = DOCS / "SCHEMA.md"

OLDEST_FIRST = [script.revision for script in ScriptDirectory(str(SCRIPTS)).walk_revisions()][::-1]


@pytest.fixture
def database_url(postgres_url: str) -> Iterator[str]:
    """The owner's URL: migrations are its work."""
    with migrated_database(postgres_url) as url:
        name = make_url(url).database or ""
        yield settings_of(of_database(postgres_url, name)).owner_url


# Lists that the code has too, each with the constraint, index or trigger that repeats it.
LISTS = (
    ("ck_jobs_state", ALL_JOB_STATES), ("ix_jobs_dispatched", DISPATCHED_JOB_STATES),
    ("ix_jobs_open", OPEN_JOB_STATES), ("ix_jobs_open_twins", OPEN_JOB_STATES),
    ("count_changed_job", OPEN_JOB_STATES), ("end_output", TERMINAL_JOB_STATES), ("ck_chunks_state", CHUNK_STATES),
    ("ck_generations_state", GENERATION_STATES), ("ck_collections_index_policy", INDEX_POLICIES),
    ("ck_job_inputs_state", INPUT_STATES), ("ix_job_inputs_due", INPUT.open), ("ck_job_outputs_state", OUTPUT_STATES),
    ("ix_job_outputs_due", DUE_OUTPUT_STATES), ("ck_runs_kind", RUN_KINDS), ("ck_runs_state", RUN_STATES),
    ("ck_runs_phase", RUN_PHASES), ("uq_runs_running", CLAIMED_RUN_STATES), ("ix_runs_open", OPEN_RUN_STATES),
    ("ck_sources_kind", SOURCE_KINDS), ("ck_schedules_overlap", OVERLAPS),
    ("ck_request_files_state", REQUEST_FILE_STATES), ("ck_request_files_purpose", PURPOSES),
    ("ck_request_batches_state", BATCH_STATES), ("ck_request_batches_endpoint", ENDPOINTS),
    ("ix_request_batches_open", OPEN_BATCH_STATES), ("ck_webhook_deliveries_state", DELIVERY_STATES),
    ("ck_api_keys_scope", SCOPES),
)  # fmt: skip


def test_the_page_on_the_schema_is_what_the_migrations_make(
    engine: Engine, pytestconfig: pytest.Config
) -> None:
    made = describe_schema(engine)
    if pytestconfig.getoption("--write-schema"):
        PAGE.write_text(made, encoding="utf-8")
    assert made.splitlines() == PAGE.read_text(encoding="utf-8").splitlines(), (
        "write it anew with --write-schema"
    )


def test_every_table_says_what_it_is_for() -> None:
    assert re.findall(r"^## \w+\n\n\|.*", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == []


def test_the_lists_of_the_schema_are_those_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    kept = {}
    for name, _ in LISTS:
        (line,) = re.findall(rf"^(?:CONSTRAINT|CREATE .*?(?:INDEX|TRIGGER)) {name} .*", page, re.MULTILINE)
        kept[name] = set(re.findall(r"'([^']+)'", line))
    assert kept == {name: set(values) for name, values in LISTS}


def test_a_migration_enables_pgvector_where_every_role_finds_it(engine: Engine) -> None:
    find = text("SELECT extnamespace::regnamespace::text FROM pg_extension WHERE extname = 'vector'")
    assert execute(engine, find).scalar_one() == "public"


def test_a_database_in_which_pgvector_cannot_be_enabled_is_told_so(database_url: str, admin: Engine) -> None:
    with admin.begin() as connection:
        connection.execute(text("DROP EXTENSION vector CASCADE; DROP SCHEMA public CASCADE"))
    with pytest.raises(ConfigurationError, match=r'schema "public" does not exist.*Install pgvector 0\.8\.4'):
        upgrade(database_url)


def test_a_migrated_database_misses_nothing_and_an_empty_one_does(engine: Engine) -> None:
    assert find_missing_revision(engine) is None
    execute(engine, "DELETE FROM vectormill.alembic_version")
    assert find_newest_revision() == OLDEST_FIRST[-1]
    assert find_missing_revision(engine) == OLDEST_FIRST[-1]


@pytest.mark.parametrize(
    ("revision", "said"),
    [("0025", "before the first release.*Create a new database"), ("9999", "a newer release")],
)
def test_a_database_that_no_migration_leads_from_is_refused_in_a_sentence(
    database_url: str, engine: Engine, revision: str, said: str
) -> None:
    execute(engine, "UPDATE vectormill.alembic_version SET version_num = :it", it=revision)
    with pytest.raises(ConfigurationError, match=said):
        upgrade(database_url)
    with pytest.raises(ConfigurationError, match=said):
        find_missing_revision(engine)


def test_processes_that_migrate_at_once_do_not_disturb_each_other(database_url: str) -> None:
    with connected_engine(database_url) as engine, engine.begin() as connection:
        connection.execute(text("DROP SCHEMA vectormill CASCADE"))
    migrate = "import sys; from vectormill.db.migrations import upgrade; upgrade(sys.argv[1])"
    processes = [subprocess.Popen([sys.executable, "-c", migrate, database_url]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    with connected_engine(database_url) as engine:
        assert find_missing_revision(engine) is None


CONCURRENT_MIGRATION = """
from vectormill.db.migrations import build_index
revision, down_revision = "concurrent", "{head}"
def upgrade():
    build_index("made_concurrently", "jobs (model)")
def downgrade():
    pass
"""

MIGRATE_FURTHER = """
import sys
from alembic import command
from vectormill.db.migrations import make_config
from vectormill.db.scripts import SCRIPTS
config = make_config(sys.argv[1])
config.set_main_option("path_separator", "newline")
config.set_main_option("version_locations", f"{SCRIPTS}/versions\\n{sys.argv[2]}")
command.upgrade(config, "head")
"""


def test_a_migration_can_make_an_index_concurrently_while_others_wait_for_their_turn(
    database_url: str, engine: Engine, tmp_path: Path
) -> None:
    for _ in range(2):
        submit(engine, make_items(1))
    broken = text("CREATE UNIQUE INDEX CONCURRENTLY made_concurrently ON vectormill.jobs (model)")
    autocommit = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    # As one that was interrupted, it leaves an index that is not valid.
    with autocommit as connection, pytest.raises(IntegrityError):
        connection.execute(broken)
    (tmp_path / "concurrent.py").write_text(CONCURRENT_MIGRATION.format(head=OLDEST_FIRST[-1]))
    arguments = [sys.executable, "-c", MIGRATE_FURTHER, database_url, str(tmp_path)]
    processes = [subprocess.Popen(arguments) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    with engine.connect() as connection:
        valid = text(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = 'vectormill.made_concurrently'::regclass"
        )
        assert connection.execute(valid).scalar_one() is True


def downgrade(database_url: str, revision: str) -> None:
    command.downgrade(make_config(database_url), revision)


def encode_a_job(engine: Engine) -> Job:
    """A job whose vectors lie in the collection `docs`."""
    job = submit(engine, make_items(6), collection="docs")
    while not complete(engine, claim_next(engine)):
        pass
    return job


def test_every_migration_is_undone_by_its_downgrade(database_url: str, engine: Engine) -> None:
    newest = describe_schema(engine)
    downgrade(database_url, "base")
    schemas = []
    for revision in OLDEST_FIRST:
        schemas.append(describe_schema(engine))
        upgrade(database_url, revision)
    assert describe_schema(engine) == newest
    for revision, before in zip(["base", *OLDEST_FIRST][-2::-1], reversed(schemas), strict=True):
        downgrade(database_url, revision)
        assert describe_schema(engine) == before, revision
    assert describe_schema(engine).strip() == HEAD.strip()


def test_jobs_and_vectors_survive_the_way_to_an_older_schema_and_back(
    database_url: str, engine: Engine
) -> None:
    job = encode_a_job(engine)
    before = execute(engine, "SELECT * FROM docs ORDER BY key").all()
    done = ask(engine, find_job, job.id).num_done
    for revision in OLDEST_FIRST:
        downgrade(database_url, revision)
        upgrade(database_url)
        assert execute(engine, "SELECT * FROM docs ORDER BY key").all() == before
        assert ask(engine, find_job, job.id).num_done == done == len(before) == 6


def test_tables_of_multi_vectors_can_have_codes_afterwards_and_keep_their_rows(
    database_url: str, engine: Engine
) -> None:
    downgrade(database_url, "0035")
    with engine.begin() as connection:
        for name in ("generation_7", "generation_7_fill"):
            connection.execute(
                text(f"CREATE TABLE vectormill.{name} (key text, multi_vector halfvec(2)[] NOT NULL)")
            )
            connection.execute(text(f"INSERT INTO vectormill.{name} VALUES ('a', ARRAY['[1,2]'::halfvec])"))
    upgrade(database_url)
    codes = "UPDATE vectormill.generation_7{} SET multi_vector = NULL, multi_vector_codes = {}"
    with engine.connect() as connection:
        connection.execute(text(codes.format("_fill", "'a'")))
        with pytest.raises(IntegrityError, match="check constraint"):
            connection.execute(text(codes.format("", "NULL")))
    downgrade(database_url, "0035")
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT CAST(multi_vector AS text) FROM vectormill.generation_7"))
        assert kept.scalar_one() == '{"[1,2]"}'


def test_after_the_first_migration_is_undone_a_collection_can_be_made_anew(
    database_url: str, engine: Engine
) -> None:
    encode_a_job(engine)
    downgrade(database_url, "base")
    assert execute(engine, "SELECT to_regclass('docs')").scalar_one() is None
    upgrade(database_url)
    encode_a_job(engine)
    assert execute(engine, "SELECT count(*) FROM docs").scalar_one() == 6


FIND_FILE = text("SELECT pg_relation_filenode(CAST(:name AS regclass))")


def test_texts_become_the_first_partition_as_they_are_and_come_back_without_those_of_deleted_jobs(
    database_url: str, engine: Engine
) -> None:
    job = submit(engine, make_items(12))
    downgrade(database_url, "0030")
    with engine.begin() as connection:
        file = connection.execute(FIND_FILE, {"name": "vectormill.chunk_payloads"}).scalar_one()
        # as if an earlier try had been interrupted
        connection.execute(
            text("ALTER TABLE vectormill.chunk_payloads ADD CONSTRAINT closing CHECK (chunk_id < 9)")
        )
    upgrade(database_url)
    with engine.begin() as connection:
        (first,) = list_spans(connection)
        assert connection.execute(FIND_FILE, {"name": first.name("chunk_payloads")}).scalar_one() == file
        connection.execute(text("DELETE FROM vectormill.chunks WHERE seq = 0"))
        payloads = text("SELECT count(*) FROM vectormill.chunk_payloads")
        assert connection.execute(payloads).scalar_one() == job.num_chunks == 3
    downgrade(database_url, "0030")
    assert execute(engine, payloads).scalar_one() == 2
    execute(engine, "DELETE FROM vectormill.jobs")
    assert execute(engine, payloads).scalar_one() == 0
