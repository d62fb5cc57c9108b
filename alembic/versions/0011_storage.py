"""Room in the pages of rows that change all the time, and vacuum before they pile up, whoever's server it is.

A former release notices nothing of it.
"""

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

# Room for the next version of a row in its page: without it no update is heap-only. Chunks have theirs since 0001.
FILLFACTORS = {"jobs": 50, "workers": 50, "heartbeats": 50}
# By a twentieth of a table of millions of chunks, or by rows, where there are few that change every second.
VACUUM = {
    "chunks": ("autovacuum_vacuum_scale_factor = 0.05", "autovacuum_analyze_scale_factor = 0.05"),
    "jobs": ("autovacuum_vacuum_scale_factor = 0", "autovacuum_vacuum_threshold = 1000"),
    "workers": ("autovacuum_vacuum_scale_factor = 0", "autovacuum_vacuum_threshold = 500"),
    "heartbeats": ("autovacuum_vacuum_scale_factor = 0", "autovacuum_vacuum_threshold = 500"),
}

# Those made from now on have it from the start.
VACUUM_GENERATIONS = """
    DO $$
    DECLARE generation regclass;
    BEGIN
        FOR generation IN SELECT to_regclass('vectormill.generation_' || id) FROM vectormill.generations LOOP
            CONTINUE WHEN generation IS NULL;
            EXECUTE 'ALTER TABLE ' || generation
                || ' SET (autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05)';
        END LOOP;
    END $$
"""


def upgrade() -> None:
    op.execute(VACUUM_GENERATIONS)
    for table, fillfactor in FILLFACTORS.items():
        op.execute(f"ALTER TABLE vectormill.{table} SET (fillfactor = {fillfactor})")
    for table, settings in VACUUM.items():
        op.execute(f"ALTER TABLE vectormill.{table} SET ({', '.join(settings)})")


def downgrade() -> None:
    for table in FILLFACTORS:
        op.execute(f"ALTER TABLE vectormill.{table} RESET (fillfactor)")
    for table, settings in VACUUM.items():
        names = ", ".join(setting.partition(" ")[0] for setting in settings)
        op.execute(f"ALTER TABLE vectormill.{table} RESET ({names})")
