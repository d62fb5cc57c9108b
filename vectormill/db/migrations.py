"""Brings a database to this release's schema, with Alembic."""

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from vectormill.db.schema import SCHEMA
from vectormill.db.scripts import SCRIPTS


def upgrade(database_url: str, revision: str = "head") -> None:
    """Applies what is missing. Several processes may call it at once: a lock lets one work and the others wait."""
    command.upgrade(make_config(database_url), revision)


def make_config(database_url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    config.attributes["database_url"] = database_url
    return config


def find_missing_revision(engine: Engine) -> str | None:
    """The newest revision when the database is not at it; None when it is current."""
    head = ScriptDirectory(str(SCRIPTS)).get_current_head()
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA})
        return None if context.get_current_revision() == head else head
