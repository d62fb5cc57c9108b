"""Runs migrations against the database that vectormill.db.migrations names."""

from alembic import context
from sqlalchemy import text

from vectormill.db.session import make_engine
from vectormill.db.tables import SCHEMA, metadata

# Any number that only Vectormill's migrations use.
ADVISORY_LOCK = 0x766D696C6C

engine = make_engine(context.config.attributes["database_url"], application_name="vectormill migrate")
with engine.connect() as connection:
    connection.execute(text("SET lock_timeout = '60s'"))
    connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": ADVISORY_LOCK})
    connection.execute(text(f"CREATE SCHEMA IF NOT EXISTS {SCHEMA}"))
    connection.commit()
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table_schema=SCHEMA,
        include_schemas=True,
        include_name=lambda name, kind, _: kind != "schema" or name == SCHEMA,
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()
    connection.commit()
engine.dispose()
