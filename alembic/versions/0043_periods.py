"""Periods: a chunk keeps each period between two proofs that has computed one of its vectors; runs are found by job.

Revision ID: 0043
Revises: 0042
"""

from alembic import op

from vectormill.db.migrations import build_index

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

COMMENTS = {
    "COLUMN chunks.earlier_proofs": "Further periods in which some of the results were computed, before a retry of others; NULL means none.",
    "COLUMN chunks.is_faulty": "All vectors are known to be faulty and are about to be encoded again; NULL means no.",
    "COLUMN chunks.only_items": "Only these positions within the chunk are encoded: set by a retry, or because results were faulty.",
    "COLUMN chunks.is_alone": "Its worker encoded no other chunk meanwhile (release_orphaned_chunks in vectormill/jobs/transitions.py).",
    "TABLE job_increments": "What changes of chunks add to the counters of their jobs. A row is deleted when the row of the job includes "
    "it (vectormill/jobs/transitions.py). There is no foreign key, whose check would lock the row that commits must not wait for.",
}
FORMER_COMMENTS = {
    "COLUMN chunks.only_items": "Set by a retry: only these positions within the chunk are encoded.",
    "COLUMN chunks.is_alone": "Its worker encoded no other chunk meanwhile (release_orphaned_chunks in vectormill/jobs/rescue.py).",
    "TABLE job_increments": "What ended chunks add to the counters of their jobs. A row is deleted when the row of the job includes "
    "it (vectormill/jobs/counters.py). There is no foreign key, whose check would lock the row that commits must not wait for.",
}


def comment(comments: dict[str, str]) -> None:
    """Replace the comments of tables and columns."""
    for name, words in comments.items():
        kind, thing = name.split(" ")
        op.execute(f"COMMENT ON {kind} vectormill.{thing} IS '{words}'")


def upgrade() -> None:
    """Add the columns and the index. No row is rewritten, and processes of the former release go on."""
    build_index("ix_runs_job_id", "runs (job_id) WHERE job_id IS NOT NULL")
    op.execute(
        "ALTER TABLE vectormill.chunks ADD COLUMN earlier_proofs bigint[], ADD COLUMN is_faulty boolean"
    )
    op.execute(
        "ALTER TABLE vectormill.job_increments ADD COLUMN num_retried_chunks bigint NOT NULL DEFAULT 0"
    )
    op.execute("ALTER TABLE vectormill.job_increments ALTER COLUMN num_chunks SET DEFAULT 0")
    op.execute("ALTER TABLE vectormill.job_increments ALTER COLUMN stage_seconds SET DEFAULT '{}'")
    comment(COMMENTS)


def downgrade() -> None:
    """Drop the columns and the index."""
    op.execute("DROP INDEX vectormill.ix_runs_job_id")
    comment(FORMER_COMMENTS)
    op.execute("ALTER TABLE vectormill.job_increments ALTER COLUMN num_chunks DROP DEFAULT")
    op.execute("ALTER TABLE vectormill.job_increments ALTER COLUMN stage_seconds DROP DEFAULT")
    op.execute("ALTER TABLE vectormill.job_increments DROP COLUMN num_retried_chunks")
    op.execute("ALTER TABLE vectormill.chunks DROP COLUMN is_faulty, DROP COLUMN earlier_proofs")
