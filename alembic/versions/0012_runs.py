"""Sources, schedules and runs of collections; what was deleted; and what a collection wishes for its generations.

A former release notices nothing of it.
"""

from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

MAKE = (
    """
    ALTER TABLE vectormill.collections
        ADD COLUMN keep_text BOOLEAN DEFAULT false NOT NULL,
        ADD COLUMN language TEXT DEFAULT 'simple' NOT NULL,
        ADD COLUMN index_policy TEXT DEFAULT 'auto' NOT NULL,
        ADD COLUMN index_options JSONB DEFAULT '{}' NOT NULL,
        ADD COLUMN filters JSONB DEFAULT '[]' NOT NULL,
        ADD CONSTRAINT ck_collections_index_policy CHECK (index_policy IN ('auto', 'hnsw', 'none'))
    """,
    """
    ALTER TABLE vectormill.generations
        ADD COLUMN live_at TIMESTAMP WITH TIME ZONE,
        ADD COLUMN retired_at TIMESTAMP WITH TIME ZONE,
        ADD COLUMN report JSONB DEFAULT '{}' NOT NULL
    """,
    "UPDATE vectormill.generations SET live_at = created_at WHERE state = 'live'",
    "CREATE UNIQUE INDEX uq_generations_building ON vectormill.generations (collection_id) WHERE state = 'building'",
    "ALTER TABLE vectormill.jobs ADD COLUMN twin_of UUID",
    """
    CREATE TABLE vectormill.sources (
        collection_id BIGINT NOT NULL,
        kind TEXT NOT NULL CONSTRAINT ck_sources_kind CHECK (kind IN ('sql', 'files', 'tree', 'push', 'own_texts')),
        options JSONB DEFAULT '{}' NOT NULL,
        split JSONB DEFAULT '{}' NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_sources PRIMARY KEY (collection_id),
        CONSTRAINT fk_sources_collection_id FOREIGN KEY(collection_id) REFERENCES vectormill.collections (id) ON DELETE CASCADE
    )
    """,
    """
    CREATE TABLE vectormill.schedules (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        name TEXT NOT NULL,
        collection_id BIGINT NOT NULL,
        cron TEXT NOT NULL,
        timezone TEXT NOT NULL,
        overlap TEXT NOT NULL CONSTRAINT ck_schedules_overlap CHECK (overlap IN ('skip', 'queue')),
        options JSONB DEFAULT '{}' NOT NULL,
        next_due_at TIMESTAMP WITH TIME ZONE,
        paused_at TIMESTAMP WITH TIME ZONE,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_schedules PRIMARY KEY (id),
        CONSTRAINT uq_schedules_name UNIQUE (name),
        CONSTRAINT fk_schedules_collection_id FOREIGN KEY(collection_id) REFERENCES vectormill.collections (id) ON DELETE CASCADE
    )
    """,
    """
    CREATE INDEX ix_schedules_collection_id ON vectormill.schedules (collection_id)
    """,
    """
    CREATE INDEX ix_schedules_next_due_at ON vectormill.schedules (next_due_at) WHERE paused_at IS NULL
    """,
    """
    CREATE TABLE vectormill.runs (
        id UUID NOT NULL,
        seq BIGINT,
        collection_id BIGINT NOT NULL,
        kind TEXT NOT NULL CONSTRAINT ck_runs_kind CHECK (kind IN ('reindex', 'index', 'check')),
        state TEXT NOT NULL CONSTRAINT ck_runs_state CHECK (state IN ('uploading', 'queued', 'running', 'held', 'cancelling', 'completed', 'completed_with_errors', 'failed', 'cancelled', 'skipped')),
        phase TEXT CONSTRAINT ck_runs_phase CHECK (phase IN ('reading', 'comparing', 'encoding', 'deleting', 'indexing', 'checking', 'swapping')),
        generation_id BIGINT,
        job_id UUID,
        spec JSONB,
        options JSONB DEFAULT '{}' NOT NULL,
        num_seen BIGINT DEFAULT 0 NOT NULL,
        num_unchanged BIGINT DEFAULT 0 NOT NULL,
        num_metadata_only BIGINT DEFAULT 0 NOT NULL,
        num_new BIGINT DEFAULT 0 NOT NULL,
        num_changed BIGINT DEFAULT 0 NOT NULL,
        num_moved BIGINT DEFAULT 0 NOT NULL,
        num_deleted BIGINT DEFAULT 0 NOT NULL,
        num_failed BIGINT DEFAULT 0 NOT NULL,
        report JSONB DEFAULT '{}' NOT NULL,
        error TEXT,
        schedule_id BIGINT,
        due_at TIMESTAMP WITH TIME ZONE,
        fence BIGINT DEFAULT 0 NOT NULL,
        attempt INTEGER DEFAULT 0 NOT NULL,
        lease_owner TEXT,
        lease_until TIMESTAMP WITH TIME ZONE,
        available_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        started_at TIMESTAMP WITH TIME ZONE,
        finished_at TIMESTAMP WITH TIME ZONE,
        CONSTRAINT pk_runs PRIMARY KEY (id),
        CONSTRAINT uq_runs_schedule_id_due_at UNIQUE (schedule_id, due_at),
        CONSTRAINT fk_runs_collection_id FOREIGN KEY(collection_id) REFERENCES vectormill.collections (id) ON DELETE CASCADE,
        CONSTRAINT fk_runs_generation_id FOREIGN KEY(generation_id) REFERENCES vectormill.generations (id) ON DELETE SET NULL,
        CONSTRAINT fk_runs_schedule_id FOREIGN KEY(schedule_id) REFERENCES vectormill.schedules (id) ON DELETE SET NULL
    )
     WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE INDEX ix_runs_collection_id ON vectormill.runs (collection_id, created_at)
    """,
    """
    CREATE INDEX ix_runs_created_at ON vectormill.runs (created_at, id)
    """,
    """
    CREATE INDEX ix_runs_open ON vectormill.runs (available_at) WHERE state IN ('uploading', 'queued', 'running', 'held', 'cancelling')
    """,
    """
    CREATE UNIQUE INDEX uq_runs_running ON vectormill.runs (collection_id) WHERE state IN ('running', 'cancelling')
    """,
    """
    CREATE TABLE vectormill.run_parts (
        run_id UUID NOT NULL,
        seq INTEGER NOT NULL,
        num_items INTEGER NOT NULL,
        items BYTEA NOT NULL,
        CONSTRAINT pk_run_parts PRIMARY KEY (run_id, seq),
        CONSTRAINT fk_run_parts_run_id FOREIGN KEY(run_id) REFERENCES vectormill.runs (id) ON DELETE CASCADE
    )
    """,
    """
    CREATE TABLE vectormill.tombstones (
        collection_id BIGINT NOT NULL,
        key TEXT NOT NULL,
        seq BIGINT NOT NULL,
        deleted_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        scrubbed_at TIMESTAMP WITH TIME ZONE,
        CONSTRAINT pk_tombstones PRIMARY KEY (collection_id, key),
        CONSTRAINT fk_tombstones_collection_id FOREIGN KEY(collection_id) REFERENCES vectormill.collections (id) ON DELETE CASCADE
    )
    """,
    """
    CREATE INDEX ix_tombstones_unscrubbed ON vectormill.tombstones (collection_id) WHERE scrubbed_at IS NULL
    """,
    """
    CREATE TABLE vectormill.source_changes (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        collection_id BIGINT NOT NULL,
        key TEXT NOT NULL,
        changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_source_changes PRIMARY KEY (id),
        CONSTRAINT fk_source_changes_collection_id FOREIGN KEY(collection_id) REFERENCES vectormill.collections (id) ON DELETE CASCADE
    )
    """,
    """
    CREATE INDEX ix_source_changes_collection_id ON vectormill.source_changes (collection_id, id)
    """,
)

UNMAKE = (
    "DROP TABLE vectormill.source_changes, vectormill.tombstones, vectormill.run_parts, vectormill.runs,"
    " vectormill.schedules, vectormill.sources",
    "ALTER TABLE vectormill.jobs DROP COLUMN twin_of",
    "DROP INDEX vectormill.uq_generations_building",
    "ALTER TABLE vectormill.generations DROP COLUMN live_at, DROP COLUMN retired_at, DROP COLUMN report",
    """
    ALTER TABLE vectormill.collections
        DROP COLUMN keep_text, DROP COLUMN language, DROP COLUMN index_policy, DROP COLUMN index_options,
        DROP COLUMN filters
    """,
)


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)


def downgrade() -> None:
    for statement in UNMAKE:
        op.execute(statement)
