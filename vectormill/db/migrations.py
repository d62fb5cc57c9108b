"""Migrate a database to this release's schema, with Alembic."""

from typing import Final

from alembic import command, op
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, make_url, text

from vectormill.db.roles import assign_owners, connect_alone
from vectormill.db.scripts import SCRIPTS
from vectormill.domain.errors import ConfigurationError
from vectormill.settings import Settings

SCHEMA: Final = "vectormill"


def upgrade(database_url: str, revision: str = "head") -> None:
    """Apply the missing migrations.

    Several processes may call this at once: a lock lets one work while the others wait. Raise
    ConfigurationError if no migration leads from the database's revision.
    """
    command.upgrade(make_config(database_url), revision)


def migrate(settings: Settings) -> None:
    """Migrate as the owner, if the settings name one, and give the service its share. Raise ConfigurationError."""
    upgrade(settings.owner_url)
    if settings.owner_database_url is not None:
        with connect_alone(settings.owner_database_url) as connection:
            assign_owners(connection, make_url(settings.need("database_url")).username or "")


def make_config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["database_url"] = database_url
    return config


def build_index(name: str, definition: str) -> None:
    """Build an index of a table of our schema in a migration, `name` ON `definition`, while others read and write it.

    What the migration did before is committed first, so it must be possible to run it again: an index that an
    interrupted build left behind, which no query uses, is built anew.
    """
    with op.get_context().autocommit_block():
        is_invalid = "SELECT NOT indisvalid FROM pg_index WHERE indexrelid = to_regclass(:name)"
        if op.get_bind().execute(text(is_invalid), {"name": f"{SCHEMA}.{name}"}).scalar():
            op.execute(f"DROP INDEX CONCURRENTLY {SCHEMA}.{name}")
        op.execute(f"CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON {SCHEMA}.{definition}")


def find_missing_revision(engine: Engine) -> str | None:
    """Return the newest revision if the database is not at it; None if the database is current.

    Raise ConfigurationError if no migration leads from the database's revision.
    """
    scripts = ScriptDirectory(str(SCRIPTS))
    head = scripts.get_current_head()
    with engine.connect() as connection:
        return None if find_known_revision(connection, scripts) == head else head


def find_known_revision(connection: Connection, scripts: ScriptDirectory) -> str | None:
    """Return the revision of the database; None if the database is empty.

    Raise ConfigurationError if no migration of this release leads from there.
    """
    found = MigrationContext.configure(
        connection, opts={"version_table_schema": SCHEMA}
    ).get_current_revision()
    known = [script.revision for script in scripts.walk_revisions()]
    if found is None or found in known:
        return found
    if found < min(known):
        raise ConfigurationError(
            f"The database was created by a commit before the first release (revision {found}), from which no "
            "migration leads on. Create a new database, set VECTORMILL_DATABASE_URL to it (for `vectormill up`: "
            "another VECTORMILL_DATA_DIR), run `vectormill migrate`, and submit or index again."
        )
    raise ConfigurationError(
        f"The database is at revision {found}, which is unknown to this release: a newer release has migrated it. Use "
        "that release, or restore a backup from before the migration."
    )
