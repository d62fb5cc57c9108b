"""A place in the order of writers for the twin of every job, generations whose table is gone, and twins by their job.

A former release goes on: it draws from the same sequence, and meets no generation that is pruned.
"""

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

MAKE = (
    # The place behind each job's own is its twin's, and nobody else's.
    "ALTER TABLE vectormill.jobs ALTER COLUMN seq SET INCREMENT BY 2",
    "CREATE INDEX ix_jobs_twin_of ON vectormill.jobs (twin_of) WHERE twin_of IS NOT NULL",
    "ALTER TABLE vectormill.generations DROP CONSTRAINT ck_generations_state",
    """
    ALTER TABLE vectormill.generations
        ADD CONSTRAINT ck_generations_state CHECK (state IN ('building', 'live', 'retired', 'pruned'))
    """,
)

UNMAKE = (
    "DELETE FROM vectormill.generations WHERE state = 'pruned'",
    "ALTER TABLE vectormill.generations DROP CONSTRAINT ck_generations_state",
    """
    ALTER TABLE vectormill.generations
        ADD CONSTRAINT ck_generations_state CHECK (state IN ('building', 'live', 'retired'))
    """,
    "DROP INDEX vectormill.ix_jobs_twin_of",
    "ALTER TABLE vectormill.jobs ALTER COLUMN seq SET INCREMENT BY 1",
)


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)


def downgrade() -> None:
    for statement in UNMAKE:
        op.execute(statement)
