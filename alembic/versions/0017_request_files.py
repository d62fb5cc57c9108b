"""Files of requests, as clients of OpenAI's interface upload them, and request batches; and the tokens of each item.

A former release notices nothing of it.
"""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

MAKE = (
    """
    CREATE TABLE vectormill.request_files (
        id UUID NOT NULL,
        seq BIGINT GENERATED ALWAYS AS IDENTITY,
        state TEXT NOT NULL CONSTRAINT ck_request_files_state CHECK (state IN ('uploading', 'processed', 'deleting')),
        purpose TEXT NOT NULL CONSTRAINT ck_request_files_purpose CHECK (purpose IN ('batch', 'batch_output')),
        filename TEXT NOT NULL,
        num_bytes BIGINT DEFAULT 0 NOT NULL,
        batch_id UUID,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        expires_at TIMESTAMP WITH TIME ZONE,
        CONSTRAINT pk_request_files PRIMARY KEY (id),
        CONSTRAINT uq_request_files_seq UNIQUE (seq)
    )
    """,
    "CREATE INDEX ix_request_files_listed ON vectormill.request_files (seq) WHERE state = 'processed'",
    "CREATE INDEX ix_request_files_purpose ON vectormill.request_files (purpose, seq) WHERE state = 'processed'",
    "CREATE INDEX ix_request_files_expires_at ON vectormill.request_files (expires_at) WHERE state = 'processed'",
    "CREATE INDEX ix_request_files_unlisted ON vectormill.request_files (state) WHERE state <> 'processed'",
    """
    CREATE TABLE vectormill.request_file_parts (
        file_id UUID NOT NULL,
        seq INTEGER NOT NULL,
        num_bytes INTEGER NOT NULL,
        content BYTEA NOT NULL,
        CONSTRAINT pk_request_file_parts PRIMARY KEY (file_id, seq),
        CONSTRAINT fk_request_file_parts_file_id FOREIGN KEY(file_id)
            REFERENCES vectormill.request_files (id) ON DELETE CASCADE
    )
    """,
    # Compressed already.
    "ALTER TABLE vectormill.request_file_parts ALTER COLUMN content SET STORAGE EXTERNAL",
    """
    CREATE TABLE vectormill.request_batches (
        id UUID NOT NULL,
        seq BIGINT GENERATED ALWAYS AS IDENTITY,
        state TEXT NOT NULL CONSTRAINT ck_request_batches_state CHECK (state IN ('validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed', 'expired', 'cancelled')),
        endpoint TEXT NOT NULL CONSTRAINT ck_request_batches_endpoint CHECK (endpoint IN ('/v1/embeddings', '/v1/rerank')),
        input_file_id UUID NOT NULL,
        completion_window TEXT NOT NULL,
        metadata JSONB,
        output_lifetime_seconds DOUBLE PRECISION,
        idempotency_key TEXT,
        content_hash BYTEA NOT NULL,
        model TEXT,
        job_id UUID,
        num_lines BIGINT DEFAULT 0 NOT NULL,
        num_refused BIGINT DEFAULT 0 NOT NULL,
        num_completed BIGINT DEFAULT 0 NOT NULL,
        num_failed BIGINT DEFAULT 0 NOT NULL,
        num_tokens BIGINT DEFAULT 0 NOT NULL,
        errors JSONB DEFAULT '[]' NOT NULL,
        output_file_id UUID,
        error_file_id UUID,
        is_overdue BOOLEAN DEFAULT false NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
        in_progress_at TIMESTAMP WITH TIME ZONE,
        finalizing_at TIMESTAMP WITH TIME ZONE,
        completed_at TIMESTAMP WITH TIME ZONE,
        failed_at TIMESTAMP WITH TIME ZONE,
        expired_at TIMESTAMP WITH TIME ZONE,
        cancelling_at TIMESTAMP WITH TIME ZONE,
        cancelled_at TIMESTAMP WITH TIME ZONE,
        finished_at TIMESTAMP WITH TIME ZONE,
        fence BIGINT DEFAULT 0 NOT NULL,
        attempt INTEGER DEFAULT 0 NOT NULL,
        lease_owner TEXT,
        lease_until TIMESTAMP WITH TIME ZONE,
        available_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_request_batches PRIMARY KEY (id),
        CONSTRAINT uq_request_batches_seq UNIQUE (seq),
        CONSTRAINT uq_request_batches_idempotency_key UNIQUE (idempotency_key)
    )
     WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE INDEX ix_request_batches_open ON vectormill.request_batches (seq)
     WHERE state IN ('validating', 'in_progress', 'finalizing', 'cancelling')
    """,
    "CREATE INDEX ix_request_batches_content_hash ON vectormill.request_batches (content_hash)",
    "CREATE INDEX ix_request_batches_job_id ON vectormill.request_batches (job_id) WHERE job_id IS NOT NULL",
    "CREATE INDEX ix_request_batches_input ON vectormill.request_batches (input_file_id) WHERE state = 'validating'",
    """
    CREATE INDEX ix_request_batches_finished_at ON vectormill.request_batches (finished_at)
     WHERE finished_at IS NOT NULL
    """,
    """
    CREATE TABLE vectormill.request_refusals (
        batch_id UUID NOT NULL,
        line BIGINT NOT NULL,
        custom_id TEXT,
        code TEXT NOT NULL,
        message TEXT NOT NULL,
        param TEXT,
        CONSTRAINT pk_request_refusals PRIMARY KEY (batch_id, line),
        CONSTRAINT fk_request_refusals_batch_id FOREIGN KEY(batch_id)
            REFERENCES vectormill.request_batches (id) ON DELETE CASCADE
    )
    """,
    "ALTER TABLE vectormill.chunk_vectors ADD COLUMN item_tokens BYTEA",
)


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)


def downgrade() -> None:
    op.execute("ALTER TABLE vectormill.chunk_vectors DROP COLUMN item_tokens")
    op.execute("DROP TABLE vectormill.request_refusals")
    op.execute("DROP TABLE vectormill.request_batches")
    op.execute("DROP TABLE vectormill.request_file_parts")
    op.execute("DROP TABLE vectormill.request_files")
