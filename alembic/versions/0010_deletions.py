"""Jobs that are being deleted in batches, and an index that finds the open jobs of one model.

Workers and APIs of the release before go on: they show a job that is being deleted until its rows are gone.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

STATES = (
    "uploading",
    "queued",
    "running",
    "paused",
    "cancelling",
    "completed",
    "completed_with_errors",
    "failed",
    "cancelled",
)
IN_PROGRESS = sa.text("state IN ('uploading', 'queued', 'running', 'paused', 'cancelling')")


def upgrade() -> None:
    allow((*STATES, "deleting"))
    order_open_jobs_by("model", "priority", "seq")


def downgrade() -> None:
    op.execute("DELETE FROM vectormill.jobs WHERE state = 'deleting'")
    allow(STATES)
    order_open_jobs_by("priority", "seq")


def allow(states: tuple[str, ...]) -> None:
    op.drop_constraint(op.f("ck_jobs_state"), "jobs", schema="vectormill")
    listed = ", ".join(repr(state) for state in states)
    op.create_check_constraint(op.f("ck_jobs_state"), "jobs", f"state IN ({listed})", schema="vectormill")


def order_open_jobs_by(*columns: str) -> None:
    op.drop_index("ix_jobs_in_progress", "jobs", schema="vectormill")
    op.create_index(
        "ix_jobs_in_progress", "jobs", list(columns), schema="vectormill", postgresql_where=IN_PROGRESS
    )
