"""The static tables"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "collections",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_collections")),
        sa.UniqueConstraint("name", name=op.f("uq_collections_name")),
        schema="vectormill",
    )
    op.create_table(
        "heartbeats",
        sa.Column("duty", sa.Text(), nullable=False),
        sa.Column("beat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("duty", name=op.f("pk_heartbeats")),
        schema="vectormill",
    )
    op.create_table(
        "workers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("incarnation", sa.Uuid(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("slots", sa.Integer(), nullable=False),
        sa.Column(
            "report", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column(
            "heartbeat_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_workers")),
        schema="vectormill",
    )
    op.create_table(
        "generations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("collection_id", sa.BigInteger(), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["collection_id"],
            ["vectormill.collections.id"],
            name=op.f("fk_generations_collection_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_generations")),
        sa.CheckConstraint("state IN ('building', 'live', 'retired')", name=op.f("ck_generations_state")),
        schema="vectormill",
    )
    op.create_index(
        "uq_generations_live",
        "generations",
        ["collection_id"],
        unique=True,
        schema="vectormill",
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("generation_id", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column(
            "metadata",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("content_hash", sa.LargeBinary(), nullable=True),
        sa.Column("num_items", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_done", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_chunks", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_open_chunks", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_retried_chunks", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_computed_tokens", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("num_truncated", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "stage_seconds",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'{}'"),
            nullable=False,
        ),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["generation_id"],
            ["vectormill.generations.id"],
            name=op.f("fk_jobs_generation_id"),
            ondelete="SET NULL",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_jobs_idempotency_key")),
        sa.UniqueConstraint("seq", name=op.f("uq_jobs_seq")),
        sa.CheckConstraint(
            "state IN ('uploading', 'queued', 'running', 'paused', 'cancelling', 'completed', 'completed_with_errors', 'failed', 'cancelled')",
            name=op.f("ck_jobs_state"),
        ),
        sa.CheckConstraint("priority BETWEEN 0 AND 9", name=op.f("ck_jobs_priority")),
        schema="vectormill",
    )
    op.create_index(
        "ix_jobs_finished_at",
        "jobs",
        ["finished_at"],
        unique=False,
        schema="vectormill",
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_in_progress",
        "jobs",
        ["priority", "seq"],
        unique=False,
        schema="vectormill",
        postgresql_where=sa.text("state IN ('uploading', 'queued', 'running', 'paused', 'cancelling')"),
    )
    op.create_index("ix_jobs_state_seq", "jobs", ["state", "seq"], unique=False, schema="vectormill")
    op.create_table(
        "chunks",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("first_item", sa.BigInteger(), nullable=False),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("only_items", postgresql.ARRAY(sa.Integer()), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("lost", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("dispatch_seq", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column(
            "available_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("parent_id", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"], ["vectormill.jobs.id"], name=op.f("fk_chunks_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunks")),
        sa.UniqueConstraint("job_id", "seq", name=op.f("uq_chunks_job_id_seq")),
        sa.CheckConstraint(
            "state IN ('pending', 'queued', 'leased', 'done', 'failed', 'cancelled', 'split')",
            name=op.f("ck_chunks_state"),
        ),
        schema="vectormill",
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index(
        "ix_chunks_leased",
        "chunks",
        ["lease_until"],
        unique=False,
        schema="vectormill",
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index("ix_chunks_order", "chunks", ["job_id", "first_item"], unique=False, schema="vectormill")
    op.create_index(
        "ix_chunks_pending",
        "chunks",
        ["job_id", "seq"],
        unique=False,
        schema="vectormill",
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index(
        "ix_chunks_queued",
        "chunks",
        ["queued_at"],
        unique=False,
        schema="vectormill",
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.create_table(
        "item_errors",
        sa.Column("job_id", sa.Uuid(), nullable=False),
        sa.Column("item", sa.BigInteger(), nullable=False),
        sa.Column("chunk_id", sa.BigInteger(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"], ["vectormill.jobs.id"], name=op.f("fk_item_errors_job_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "item", name=op.f("pk_item_errors")),
        schema="vectormill",
    )
    op.create_table(
        "chunk_payloads",
        sa.Column("chunk_id", sa.BigInteger(), nullable=False),
        sa.Column("items", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["chunk_id"],
            ["vectormill.chunks.id"],
            name=op.f("fk_chunk_payloads_chunk_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("chunk_id", name=op.f("pk_chunk_payloads")),
        schema="vectormill",
    )
    op.create_table(
        "chunk_vectors",
        sa.Column("chunk_id", sa.BigInteger(), nullable=False),
        sa.Column("vectors", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["chunk_id"], ["vectormill.chunks.id"], name=op.f("fk_chunk_vectors_chunk_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("chunk_id", name=op.f("pk_chunk_vectors")),
        schema="vectormill",
    )


# A generation's table is named by a number that the next installation counts anew. Its view in `public` goes with it.
DROP_GENERATIONS = """
    DO $$
    DECLARE generation regclass;
    BEGIN
        FOR generation IN SELECT to_regclass('vectormill.generation_' || id) FROM vectormill.generations LOOP
            CONTINUE WHEN generation IS NULL;
            EXECUTE 'DROP TABLE ' || generation || ' CASCADE';
        END LOOP;
    END $$
"""


def downgrade() -> None:
    """Removes all of Vectormill, its collections too."""
    op.execute(DROP_GENERATIONS)
    op.drop_table("chunk_vectors", schema="vectormill")
    op.drop_table("chunk_payloads", schema="vectormill")
    op.drop_table("item_errors", schema="vectormill")
    op.drop_index(
        "ix_chunks_queued",
        table_name="chunks",
        schema="vectormill",
        postgresql_where=sa.text("state = 'queued'"),
    )
    op.drop_index(
        "ix_chunks_pending",
        table_name="chunks",
        schema="vectormill",
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.drop_index("ix_chunks_order", table_name="chunks", schema="vectormill")
    op.drop_index(
        "ix_chunks_leased",
        table_name="chunks",
        schema="vectormill",
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.drop_table("chunks", schema="vectormill")
    op.drop_index("ix_jobs_state_seq", table_name="jobs", schema="vectormill")
    op.drop_index(
        "ix_jobs_in_progress",
        table_name="jobs",
        schema="vectormill",
        postgresql_where=sa.text("state IN ('uploading', 'queued', 'running', 'paused', 'cancelling')"),
    )
    op.drop_index(
        "ix_jobs_finished_at",
        table_name="jobs",
        schema="vectormill",
        postgresql_where=sa.text("finished_at IS NOT NULL"),
    )
    op.drop_table("jobs", schema="vectormill")
    op.drop_index(
        "uq_generations_live",
        table_name="generations",
        schema="vectormill",
        postgresql_where=sa.text("state = 'live'"),
    )
    op.drop_table("generations", schema="vectormill")
    op.drop_table("workers", schema="vectormill")
    op.drop_table("heartbeats", schema="vectormill")
    op.drop_table("collections", schema="vectormill")
