"""Create the schema of the first release: collections, jobs, runs, request batches, webhooks, processes.

Collections come first, because jobs write to their generations; then jobs, the tables beside a chunk, and the
features that create jobs or report on them. Each table is followed by its indexes. The comments of 0038 say
why a column exists.

Numbers below 0026 belonged to commits before the first release; a database of such a commit is refused with
an error that says so (vectormill/db/migrations.py). From here on migrations are only added, and this file is
never edited. States are therefore written out instead of being read from the code.
"""

from alembic import op

revision = "0026"
down_revision = None
branch_labels = None
depends_on = None

COLLECTIONS = (
    """
    CREATE TABLE vectormill.collections (
        id            bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_collections PRIMARY KEY,
        name          text NOT NULL CONSTRAINT uq_collections_name UNIQUE,
        keep_text     boolean NOT NULL DEFAULT false,
        language      text NOT NULL DEFAULT 'simple',
        index_policy  text NOT NULL DEFAULT 'auto'
                      CONSTRAINT ck_collections_index_policy CHECK (index_policy IN ('auto', 'hnsw', 'none')),
        index_options jsonb NOT NULL DEFAULT '{}',
        filters       jsonb NOT NULL DEFAULT '[]',
        created_at    timestamptz NOT NULL DEFAULT now()
    )
    """,
    # The rows of a generation and their attributes are in tables of their own, vectormill.generation_<id> and
    # vectormill.generation_<id>_attributes, which are created at run time.
    """
    CREATE TABLE vectormill.generations (
        id            bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_generations PRIMARY KEY,
        collection_id bigint NOT NULL
                      CONSTRAINT fk_generations_collection_id REFERENCES vectormill.collections ON DELETE CASCADE,
        spec          jsonb NOT NULL,
        fingerprint   text NOT NULL,
        state         text NOT NULL
                      CONSTRAINT ck_generations_state CHECK (state IN ('building', 'live', 'retired', 'pruned')),
        report        jsonb NOT NULL DEFAULT '{}',
        held_until    timestamptz,
        created_at    timestamptz NOT NULL DEFAULT now(),
        live_at       timestamptz,
        retired_at    timestamptz
    )
    """,
    "CREATE UNIQUE INDEX uq_generations_live ON vectormill.generations (collection_id) WHERE state = 'live'",
    "CREATE UNIQUE INDEX uq_generations_building ON vectormill.generations (collection_id) WHERE state = 'building'",
    """
    CREATE TABLE vectormill.tombstones (
        collection_id bigint NOT NULL
                      CONSTRAINT fk_tombstones_collection_id REFERENCES vectormill.collections ON DELETE CASCADE,
        key           text NOT NULL,
        seq           bigint NOT NULL,
        deleted_at    timestamptz NOT NULL DEFAULT now(),
        scrubbed_at   timestamptz,
        CONSTRAINT pk_tombstones PRIMARY KEY (collection_id, key)
    )
    """,
    "CREATE INDEX ix_tombstones_seq ON vectormill.tombstones (collection_id, seq)",
    "CREATE INDEX ix_tombstones_unscrubbed ON vectormill.tombstones (collection_id) WHERE scrubbed_at IS NULL",
    """
    CREATE TABLE vectormill.calibrations (
        fingerprint text CONSTRAINT pk_calibrations PRIMARY KEY,
        ranges      bytea NOT NULL,
        created_at  timestamptz NOT NULL DEFAULT now()
    )
    """,
)

# Jobs and chunks change with every claim and commit. Their pages keep space for the next version of a row, so
# that no index has to be updated, and vacuum starts before a fifth of a table of millions of chunks is dead
# rows.
JOBS = (
    """
    CREATE TABLE vectormill.jobs (
        id                  uuid CONSTRAINT pk_jobs PRIMARY KEY,
        seq                 bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT uq_jobs_seq UNIQUE,
        place               bigint,
        twin_of             uuid,
        state               text NOT NULL
                            CONSTRAINT ck_jobs_state CHECK (state IN (
                                'uploading', 'queued', 'running', 'paused', 'cancelling', 'completed',
                                'completed_with_errors', 'failed', 'cancelled', 'deleting')),
        model               text NOT NULL,
        spec                jsonb NOT NULL,
        generation_id       bigint
                            CONSTRAINT fk_jobs_generation_id REFERENCES vectormill.generations ON DELETE SET NULL,
        priority            smallint NOT NULL CONSTRAINT ck_jobs_priority CHECK (priority BETWEEN 0 AND 9),
        metadata            jsonb NOT NULL DEFAULT '{}',
        idempotency_key     text CONSTRAINT uq_jobs_idempotency_key UNIQUE,
        content_hash        bytea,
        traceparent         text,
        num_items           bigint NOT NULL DEFAULT 0,
        num_done            bigint NOT NULL DEFAULT 0,
        num_failed          bigint NOT NULL DEFAULT 0,
        num_truncated       bigint NOT NULL DEFAULT 0,
        num_passages        bigint NOT NULL DEFAULT 0,
        num_reused          bigint NOT NULL DEFAULT 0,
        num_tokens          bigint NOT NULL DEFAULT 0,
        num_computed_tokens bigint NOT NULL DEFAULT 0,
        num_chunks          integer NOT NULL DEFAULT 0,
        num_open_chunks     integer NOT NULL DEFAULT 0,
        num_retried_chunks  integer NOT NULL DEFAULT 0,
        stage_seconds       jsonb NOT NULL DEFAULT '{}',
        idle_seconds        double precision NOT NULL DEFAULT 0,
        created_at          timestamptz NOT NULL DEFAULT now(),
        updated_at          timestamptz NOT NULL DEFAULT now(),
        started_at          timestamptz,
        paused_at           timestamptz,
        finished_at         timestamptz,
        forget_at           timestamptz
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)
    """,
    """
    CREATE INDEX ix_jobs_in_progress ON vectormill.jobs (model, priority, seq)
     WHERE state IN ('uploading', 'queued', 'running', 'paused', 'cancelling')
    """,
    "CREATE INDEX ix_jobs_state_seq ON vectormill.jobs (state, seq)",
    "CREATE INDEX ix_jobs_generation_id ON vectormill.jobs (generation_id) WHERE generation_id IS NOT NULL",
    "CREATE INDEX ix_jobs_twin_of ON vectormill.jobs (twin_of) WHERE twin_of IS NOT NULL",
    "CREATE INDEX ix_jobs_forget_at ON vectormill.jobs (forget_at) WHERE forget_at IS NOT NULL",
    "CREATE INDEX ix_jobs_finished_at ON vectormill.jobs (finished_at) WHERE finished_at IS NOT NULL",
    # The id alone is the key of a chunk and of the tables beside it. Ids grow with time, so the table can be
    # partitioned by ranges of ids, which are ranges of time, and no other constraint prevents that
    # (docs/decisions/0056-a-chunk-s-id-is-its-time.md).
    """
    CREATE TABLE vectormill.chunks (
        id               bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_chunks PRIMARY KEY,
        job_id           uuid NOT NULL CONSTRAINT fk_chunks_job_id REFERENCES vectormill.jobs ON DELETE CASCADE,
        seq              integer NOT NULL,
        parent_id        bigint,
        state            text NOT NULL
                         CONSTRAINT ck_chunks_state CHECK (state IN (
                             'pending', 'queued', 'leased', 'done', 'failed', 'cancelled', 'split')),
        first_item       bigint NOT NULL,
        num_items        integer NOT NULL,
        only_items       integer[],
        estimated_tokens integer NOT NULL,
        available_at     timestamptz NOT NULL DEFAULT now(),
        queued_at        timestamptz,
        dispatch_seq     integer NOT NULL DEFAULT 0,
        fence            bigint NOT NULL DEFAULT 0,
        lease_owner      text,
        lease_until      timestamptz,
        attempt          integer NOT NULL DEFAULT 0,
        lost             integer NOT NULL DEFAULT 0,
        lapsed           integer NOT NULL DEFAULT 0,
        is_alone         boolean NOT NULL DEFAULT false,
        error            text
    ) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05)
    """,
    "CREATE INDEX ix_chunks_job_id_seq ON vectormill.chunks (job_id, seq)",
    "CREATE INDEX ix_chunks_pending ON vectormill.chunks (job_id, seq) WHERE state = 'pending'",
    "CREATE INDEX ix_chunks_queued ON vectormill.chunks (queued_at) WHERE state = 'queued'",
    "CREATE INDEX ix_chunks_held ON vectormill.chunks (job_id) WHERE state = 'leased'",
    "CREATE INDEX ix_chunks_order ON vectormill.chunks (job_id, first_item)",
    """
    CREATE TABLE vectormill.chunk_payloads (
        chunk_id bigint CONSTRAINT pk_chunk_payloads PRIMARY KEY
                 CONSTRAINT fk_chunk_payloads_chunk_id REFERENCES vectormill.chunks ON DELETE CASCADE,
        items    bytea NOT NULL,
        places   bigint[]
    )
    """,
    """
    CREATE TABLE vectormill.chunk_vectors (
        chunk_id    bigint CONSTRAINT pk_chunk_vectors PRIMARY KEY
                    CONSTRAINT fk_chunk_vectors_chunk_id REFERENCES vectormill.chunks ON DELETE CASCADE,
        vectors     bytea NOT NULL,
        item_tokens bytea
    )
    """,
    """
    CREATE TABLE vectormill.chunk_truncations (
        chunk_id bigint CONSTRAINT pk_chunk_truncations PRIMARY KEY
                 CONSTRAINT fk_chunk_truncations_chunk_id REFERENCES vectormill.chunks ON DELETE CASCADE,
        items    integer[] NOT NULL
    )
    """,
    """
    CREATE TABLE vectormill.item_errors (
        job_id   uuid NOT NULL CONSTRAINT fk_item_errors_job_id REFERENCES vectormill.jobs ON DELETE CASCADE,
        item     bigint NOT NULL,
        chunk_id bigint NOT NULL,
        key      text NOT NULL,
        code     text NOT NULL,
        detail   text NOT NULL,
        CONSTRAINT pk_item_errors PRIMARY KEY (job_id, item)
    )
    """,
)

# Sources and schedules describe how a collection is kept in step; runs do the work.
RUNS = (
    """
    CREATE TABLE vectormill.sources (
        collection_id bigint CONSTRAINT pk_sources PRIMARY KEY
                      CONSTRAINT fk_sources_collection_id REFERENCES vectormill.collections ON DELETE CASCADE,
        kind          text NOT NULL
                      CONSTRAINT ck_sources_kind CHECK (kind IN ('sql', 'files', 'tree', 'push', 'own_texts')),
        options       jsonb NOT NULL DEFAULT '{}',
        split         jsonb NOT NULL DEFAULT '{}',
        created_at    timestamptz NOT NULL DEFAULT now(),
        updated_at    timestamptz NOT NULL DEFAULT now()
    )
    """,
    """
    CREATE TABLE vectormill.schedules (
        id            bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_schedules PRIMARY KEY,
        name          text NOT NULL CONSTRAINT uq_schedules_name UNIQUE,
        collection_id bigint NOT NULL
                      CONSTRAINT fk_schedules_collection_id REFERENCES vectormill.collections ON DELETE CASCADE,
        cron          text NOT NULL,
        timezone      text NOT NULL,
        overlap       text NOT NULL CONSTRAINT ck_schedules_overlap CHECK (overlap IN ('skip', 'queue')),
        options       jsonb NOT NULL DEFAULT '{}',
        next_due_at   timestamptz,
        paused_at     timestamptz,
        created_at    timestamptz NOT NULL DEFAULT now(),
        updated_at    timestamptz NOT NULL DEFAULT now()
    )
    """,
    "CREATE INDEX ix_schedules_collection_id ON vectormill.schedules (collection_id)",
    "CREATE INDEX ix_schedules_next_due_at ON vectormill.schedules (next_due_at) WHERE paused_at IS NULL",
    """
    CREATE TABLE vectormill.runs (
        id                uuid CONSTRAINT pk_runs PRIMARY KEY,
        seq               bigint,
        collection_id     bigint NOT NULL
                          CONSTRAINT fk_runs_collection_id REFERENCES vectormill.collections ON DELETE CASCADE,
        kind              text NOT NULL CONSTRAINT ck_runs_kind CHECK (kind IN ('reindex', 'index', 'check')),
        state             text NOT NULL
                          CONSTRAINT ck_runs_state CHECK (state IN (
                              'uploading', 'queued', 'running', 'held', 'cancelling', 'completed',
                              'completed_with_errors', 'failed', 'cancelled', 'skipped')),
        phase             text
                          CONSTRAINT ck_runs_phase CHECK (phase IN (
                              'reading', 'comparing', 'encoding', 'deleting', 'indexing', 'checking', 'swapping')),
        generation_id     bigint
                          CONSTRAINT fk_runs_generation_id REFERENCES vectormill.generations ON DELETE SET NULL,
        job_id            uuid,
        schedule_id       bigint
                          CONSTRAINT fk_runs_schedule_id REFERENCES vectormill.schedules ON DELETE SET NULL,
        due_at            timestamptz,
        spec              jsonb,
        options           jsonb NOT NULL DEFAULT '{}',
        num_seen          bigint NOT NULL DEFAULT 0,
        num_unchanged     bigint NOT NULL DEFAULT 0,
        num_metadata_only bigint NOT NULL DEFAULT 0,
        num_new           bigint NOT NULL DEFAULT 0,
        num_changed       bigint NOT NULL DEFAULT 0,
        num_moved         bigint NOT NULL DEFAULT 0,
        num_deleted       bigint NOT NULL DEFAULT 0,
        num_failed        bigint NOT NULL DEFAULT 0,
        report            jsonb NOT NULL DEFAULT '{}',
        error             text,
        available_at      timestamptz NOT NULL DEFAULT now(),
        fence             bigint NOT NULL DEFAULT 0,
        attempt           integer NOT NULL DEFAULT 0,
        lease_owner       text,
        lease_until       timestamptz,
        created_at        timestamptz NOT NULL DEFAULT now(),
        updated_at        timestamptz NOT NULL DEFAULT now(),
        started_at        timestamptz,
        finished_at       timestamptz,
        CONSTRAINT uq_runs_schedule_id_due_at UNIQUE (schedule_id, due_at)
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE UNIQUE INDEX uq_runs_running ON vectormill.runs (collection_id)
     WHERE state IN ('running', 'cancelling')
    """,
    """
    CREATE INDEX ix_runs_open ON vectormill.runs (available_at)
     WHERE state IN ('uploading', 'queued', 'running', 'held', 'cancelling')
    """,
    "CREATE INDEX ix_runs_collection_id ON vectormill.runs (collection_id, created_at)",
    "CREATE INDEX ix_runs_schedule_id ON vectormill.runs (schedule_id, created_at) WHERE schedule_id IS NOT NULL",
    "CREATE INDEX ix_runs_created_at ON vectormill.runs (created_at, id)",
    """
    CREATE TABLE vectormill.run_parts (
        run_id    uuid NOT NULL CONSTRAINT fk_run_parts_run_id REFERENCES vectormill.runs ON DELETE CASCADE,
        seq       integer NOT NULL,
        num_items integer NOT NULL,
        items     bytea NOT NULL,
        CONSTRAINT pk_run_parts PRIMARY KEY (run_id, seq)
    )
    """,
    # There is no foreign key: it would lock the collection's row in each of the user's transactions, and make
    # them fail while the collection is being deleted. The follower removes changes of collections that are
    # gone.
    """
    CREATE TABLE vectormill.source_changes (
        id            bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_source_changes PRIMARY KEY,
        collection_id bigint NOT NULL,
        key           text NOT NULL,
        changed_at    timestamptz NOT NULL DEFAULT now()
    )
    """,
    "CREATE INDEX ix_source_changes_collection_id ON vectormill.source_changes (collection_id, id)",
    # Triggers on the user's tables call this function. It runs with the rights of its owner, because whoever
    # writes to those tables needs no rights in our schema. The column names come from the trigger, which only
    # the table's owner could create. Nothing that the user defines is called: format() calls a type's output
    # function, which is written in C, and no cast. An empty key, which no item has, stands for the whole
    # table; a row without a key is ignored. A key column that was renamed or dropped must not fail the user's
    # write, so the column is looked up: a block that catches the error would open a subtransaction for every
    # statement.
    """
    CREATE FUNCTION vectormill.note_changes() RETURNS trigger LANGUAGE plpgsql
        SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DECLARE
        collection bigint := TG_ARGV[0];
        changed text;
        is_known boolean;
    BEGIN
        is_known := EXISTS (SELECT FROM pg_attribute
                             WHERE attrelid = TG_RELID AND attname = TG_ARGV[1] AND NOT attisdropped);
        IF NOT is_known THEN
            RAISE WARNING 'Vectormill follows %.% by its column %, which is gone; it notes a change of the whole table',
                TG_TABLE_SCHEMA, TG_TABLE_NAME, quote_ident(TG_ARGV[1])
                USING HINT = 'Correct the query of the collection''s source, unfollow the table and follow it again.';
        END IF;
        IF TG_OP = 'TRUNCATE' OR NOT is_known THEN
            INSERT INTO vectormill.source_changes (collection_id, key) VALUES (collection, '');
            RETURN NULL;
        END IF;
        changed := CASE TG_OP
            WHEN 'INSERT' THEN format('SELECT %1$I AS key FROM new_rows', TG_ARGV[1])
            WHEN 'DELETE' THEN format('SELECT %1$I AS key FROM old_rows', TG_ARGV[1])
            ELSE format('SELECT %1$I AS key FROM old_rows UNION SELECT %1$I FROM new_rows', TG_ARGV[1])
        END;
        EXECUTE format(
            'INSERT INTO vectormill.source_changes (collection_id, key)'
            ' SELECT $1, format(''%%s'', key) FROM (%s) AS changed WHERE length(format(''%%s'', key)) > 0', changed)
            USING collection;
        RETURN NULL;
    END $$
    """,
    "REVOKE ALL ON FUNCTION vectormill.note_changes() FROM PUBLIC",
)

# Files and batches of the OpenAI-compatible interface. They have no foreign keys, because each is deleted at
# its own time.
REQUESTS = (
    """
    CREATE TABLE vectormill.request_files (
        id         uuid CONSTRAINT pk_request_files PRIMARY KEY,
        seq        bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT uq_request_files_seq UNIQUE,
        state      text NOT NULL
                   CONSTRAINT ck_request_files_state CHECK (state IN ('uploading', 'processed', 'deleting')),
        purpose    text NOT NULL
                   CONSTRAINT ck_request_files_purpose CHECK (purpose IN ('batch', 'batch_output')),
        filename   text NOT NULL,
        num_bytes  bigint NOT NULL DEFAULT 0,
        batch_id   uuid,
        created_at timestamptz NOT NULL DEFAULT now(),
        updated_at timestamptz NOT NULL DEFAULT now(),
        expires_at timestamptz
    )
    """,
    "CREATE INDEX ix_request_files_listed ON vectormill.request_files (seq) WHERE state = 'processed'",
    "CREATE INDEX ix_request_files_purpose ON vectormill.request_files (purpose, seq) WHERE state = 'processed'",
    "CREATE INDEX ix_request_files_expires_at ON vectormill.request_files (expires_at) WHERE state = 'processed'",
    "CREATE INDEX ix_request_files_unlisted ON vectormill.request_files (state) WHERE state <> 'processed'",
    """
    CREATE TABLE vectormill.request_file_parts (
        file_id   uuid NOT NULL
                  CONSTRAINT fk_request_file_parts_file_id REFERENCES vectormill.request_files ON DELETE CASCADE,
        seq       integer NOT NULL,
        num_bytes integer NOT NULL,
        content   bytea STORAGE EXTERNAL NOT NULL,  -- compressed already
        CONSTRAINT pk_request_file_parts PRIMARY KEY (file_id, seq)
    )
    """,
    """
    CREATE TABLE vectormill.request_batches (
        id                      uuid CONSTRAINT pk_request_batches PRIMARY KEY,
        seq                     bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT uq_request_batches_seq UNIQUE,
        state                   text NOT NULL
                                CONSTRAINT ck_request_batches_state CHECK (state IN (
                                    'validating', 'in_progress', 'finalizing', 'cancelling', 'completed', 'failed',
                                    'expired', 'cancelled')),
        endpoint                text NOT NULL
                                CONSTRAINT ck_request_batches_endpoint CHECK (
                                    endpoint IN ('/v1/embeddings', '/v1/rerank')),
        model                   text,
        job_id                  uuid,
        input_file_id           uuid NOT NULL,
        output_file_id          uuid,
        error_file_id           uuid,
        completion_window       text NOT NULL,
        output_lifetime_seconds double precision,
        metadata                jsonb,
        idempotency_key         text CONSTRAINT uq_request_batches_idempotency_key UNIQUE,
        content_hash            bytea NOT NULL,
        num_lines               bigint NOT NULL DEFAULT 0,
        num_refused             bigint NOT NULL DEFAULT 0,
        num_completed           bigint NOT NULL DEFAULT 0,
        num_failed              bigint NOT NULL DEFAULT 0,
        num_tokens              bigint NOT NULL DEFAULT 0,
        errors                  jsonb NOT NULL DEFAULT '[]',
        is_overdue              boolean NOT NULL DEFAULT false,
        available_at            timestamptz NOT NULL DEFAULT now(),
        fence                   bigint NOT NULL DEFAULT 0,
        attempt                 integer NOT NULL DEFAULT 0,
        lease_owner             text,
        lease_until             timestamptz,
        created_at              timestamptz NOT NULL DEFAULT now(),
        updated_at              timestamptz NOT NULL DEFAULT now(),
        expires_at              timestamptz NOT NULL,
        in_progress_at          timestamptz,
        finalizing_at           timestamptz,
        cancelling_at           timestamptz,
        completed_at            timestamptz,
        failed_at               timestamptz,
        expired_at              timestamptz,
        cancelled_at            timestamptz,
        finished_at             timestamptz
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
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
        batch_id  uuid NOT NULL
                  CONSTRAINT fk_request_refusals_batch_id REFERENCES vectormill.request_batches ON DELETE CASCADE,
        line      bigint NOT NULL,
        custom_id text,
        code      text NOT NULL,
        message   text NOT NULL,
        param     text,
        CONSTRAINT pk_request_refusals PRIMARY KEY (batch_id, line)
    )
    """,
)

# The triggers write an event in the transaction that ends a job or a run. A delivery has no foreign key to
# its webhook: a commit that ends a job must neither fail nor wait because a webhook is being deleted.
WEBHOOKS = (
    """
    CREATE TABLE vectormill.webhooks (
        id                  bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_webhooks PRIMARY KEY,
        url                 text NOT NULL,
        description         text NOT NULL DEFAULT '',
        events              text[] NOT NULL,
        secret              text NOT NULL,
        former_secret       text,
        former_secret_until timestamptz,
        is_enabled          boolean NOT NULL DEFAULT true,
        disabled_reason     text,
        failing_since       timestamptz,
        last_failed_at      timestamptz,
        num_delivered       bigint NOT NULL DEFAULT 0,
        num_refused         bigint NOT NULL DEFAULT 0,
        num_failed          bigint NOT NULL DEFAULT 0,
        created_at          timestamptz NOT NULL DEFAULT now(),
        updated_at          timestamptz NOT NULL DEFAULT now()
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE TABLE vectormill.webhook_deliveries (
        id           bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_webhook_deliveries PRIMARY KEY,
        webhook_id   bigint NOT NULL,
        event_id     uuid NOT NULL DEFAULT gen_random_uuid(),
        event_type   text NOT NULL,
        payload      text NOT NULL,
        state        text NOT NULL DEFAULT 'pending'
                     CONSTRAINT ck_webhook_deliveries_state CHECK (state IN ('pending', 'delivered', 'failed')),
        due_at       timestamptz DEFAULT now(),
        fence        bigint NOT NULL DEFAULT 0,
        num_attempts integer NOT NULL DEFAULT 0,
        lease_owner  text,
        lease_until  timestamptz,
        status_code  integer,
        error        text,
        created_at   timestamptz NOT NULL DEFAULT now(),
        attempted_at timestamptz,
        ended_at     timestamptz
    )
    """,
    "CREATE INDEX ix_webhook_deliveries_webhook_id ON vectormill.webhook_deliveries (webhook_id, id)",
    "CREATE INDEX ix_webhook_deliveries_state ON vectormill.webhook_deliveries (webhook_id, state, id)",
    "CREATE INDEX ix_webhook_deliveries_created_at ON vectormill.webhook_deliveries (created_at)",
    """
    CREATE INDEX ix_webhook_deliveries_due ON vectormill.webhook_deliveries (webhook_id, due_at)
     WHERE state = 'pending'
    """,
    # Events give moments in UTC, whatever the time zone of the session that ends the job.
    """
    CREATE FUNCTION vectormill.post_job_event() RETURNS trigger LANGUAGE plpgsql
        SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    BEGIN
        INSERT INTO vectormill.webhook_deliveries (webhook_id, event_type, payload)
        SELECT webhook.id, 'job.' || NEW.state,
               json_build_object(
                   'type', 'job.' || NEW.state,
                   'timestamp', clock_timestamp(),
                   'data', json_build_object(
                       'id', NEW.id, 'state', NEW.state, 'model', NEW.model,
                       'collection', (SELECT collection.name
                                        FROM vectormill.generations AS generation
                                        JOIN vectormill.collections AS collection
                                          ON collection.id = generation.collection_id
                                       WHERE generation.id = NEW.generation_id),
                       'num_items', NEW.num_items, 'num_done', NEW.num_done, 'num_failed', NEW.num_failed,
                       'created_at', NEW.created_at, 'started_at', NEW.started_at, 'finished_at', NEW.finished_at))
          FROM vectormill.webhooks AS webhook
         WHERE webhook.is_enabled AND 'job.' || NEW.state = ANY (webhook.events);
        RETURN NULL;
    END $$
    """,
    """
    CREATE FUNCTION vectormill.post_run_event() RETURNS trigger LANGUAGE plpgsql
        SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' AS $$
    BEGIN
        INSERT INTO vectormill.webhook_deliveries (webhook_id, event_type, payload)
        SELECT webhook.id, 'run.' || NEW.state,
               json_build_object(
                   'type', 'run.' || NEW.state,
                   'timestamp', clock_timestamp(),
                   'data', json_build_object(
                       'id', NEW.id, 'state', NEW.state, 'kind', NEW.kind,
                       'collection', (SELECT name FROM vectormill.collections WHERE id = NEW.collection_id),
                       'counts', json_build_object(
                           'num_seen', NEW.num_seen, 'num_unchanged', NEW.num_unchanged,
                           'num_metadata_only', NEW.num_metadata_only, 'num_new', NEW.num_new,
                           'num_changed', NEW.num_changed, 'num_moved', NEW.num_moved,
                           'num_deleted', NEW.num_deleted, 'num_failed', NEW.num_failed),
                       'error', NEW.error,
                       'created_at', NEW.created_at, 'started_at', NEW.started_at, 'finished_at', NEW.finished_at))
          FROM vectormill.webhooks AS webhook
         WHERE webhook.is_enabled AND 'run.' || NEW.state = ANY (webhook.events);
        RETURN NULL;
    END $$
    """,
    "REVOKE ALL ON FUNCTION vectormill.post_job_event(), vectormill.post_run_event() FROM PUBLIC",
    # Jobs that no client submitted send no events: twins, and the jobs of searches and single puts.
    """
    CREATE TRIGGER post_event AFTER UPDATE OF state ON vectormill.jobs FOR EACH ROW
        WHEN (OLD.state <> NEW.state AND NEW.twin_of IS NULL AND NEW.forget_at IS NULL
              AND NEW.state IN ('completed', 'completed_with_errors', 'failed', 'cancelled'))
        EXECUTE FUNCTION vectormill.post_job_event()
    """,
    """
    CREATE TRIGGER post_event AFTER UPDATE OF state ON vectormill.runs FOR EACH ROW
        WHEN (OLD.state <> NEW.state
              AND NEW.state IN ('held', 'completed', 'completed_with_errors', 'failed', 'cancelled', 'skipped'))
        EXECUTE FUNCTION vectormill.post_run_event()
    """,
    # A run that cannot begin is inserted in an ended state, so an update trigger would miss it.
    """
    CREATE TRIGGER post_first_event AFTER INSERT ON vectormill.runs FOR EACH ROW
        WHEN (NEW.state IN ('failed', 'skipped'))
        EXECUTE FUNCTION vectormill.post_run_event()
    """,
)

ACCESS = (
    """
    CREATE TABLE vectormill.api_keys (
        id           bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT pk_api_keys PRIMARY KEY,
        name         text NOT NULL,
        hash         bytea NOT NULL CONSTRAINT uq_api_keys_hash UNIQUE,
        scope        text NOT NULL
                     CONSTRAINT ck_api_keys_scope CHECK (scope IN ('read', 'write', 'sources', 'webhooks', 'admin')),
        created_at   timestamptz NOT NULL DEFAULT now(),
        expires_at   timestamptz,
        revoked_at   timestamptz,
        last_used_at timestamptz
    )
    """,
    "CREATE UNIQUE INDEX uq_api_keys_name ON vectormill.api_keys (name) WHERE revoked_at IS NULL",
    """
    CREATE TABLE vectormill.idempotency_keys (
        operation       text NOT NULL,
        idempotency_key text NOT NULL,
        content_hash    bytea NOT NULL,
        made_id         text,
        created_at      timestamptz NOT NULL DEFAULT now(),
        CONSTRAINT pk_idempotency_keys PRIMARY KEY (operation, idempotency_key)
    )
    """,
    "CREATE INDEX ix_idempotency_keys_created_at ON vectormill.idempotency_keys (created_at)",
)

PROCESSES = (
    """
    CREATE TABLE vectormill.workers (
        name                 text CONSTRAINT pk_workers PRIMARY KEY,
        incarnation          uuid NOT NULL,
        launcher             uuid,
        model                text NOT NULL,
        slots                integer NOT NULL,
        max_tokens_in_flight integer,
        report               jsonb NOT NULL DEFAULT '{}',
        started_at           timestamptz NOT NULL DEFAULT now(),
        heartbeat_at         timestamptz NOT NULL DEFAULT now()
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE TABLE vectormill.heartbeats (
        duty    text CONSTRAINT pk_heartbeats PRIMARY KEY,
        beat_at timestamptz NOT NULL DEFAULT now()
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
)

# Drops the tables of generations too, the views in public that read them, and the triggers on followed
# tables.
REMOVE_EVERYTHING = """
    DO $$
    DECLARE found record;
    BEGIN
        FOR found IN SELECT relname AS name FROM pg_class
                      WHERE relnamespace = 'vectormill'::regnamespace AND relkind IN ('r', 'p')
                        AND relname <> 'alembic_version' LOOP
            EXECUTE format('DROP TABLE IF EXISTS vectormill.%I CASCADE', found.name);
        END LOOP;
        DROP FUNCTION vectormill.note_changes(), vectormill.post_job_event(), vectormill.post_run_event() CASCADE;
    END $$
"""


def upgrade() -> None:
    for statement in (*COLLECTIONS, *JOBS, *RUNS, *REQUESTS, *WEBHOOKS, *ACCESS, *PROCESSES):
        op.execute(statement)


def downgrade() -> None:
    """Drop everything of Vectormill, its collections included."""
    op.execute(REMOVE_EVERYTHING)
