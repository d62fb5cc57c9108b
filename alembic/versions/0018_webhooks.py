"""Webhooks and their deliveries, what a job's or run's end leaves in them, and the trace that a job belongs to.

A trigger, and no code of ours, writes the deliveries: workers and schedulers of the release before end jobs too.
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

MAKE = (
    "ALTER TABLE vectormill.jobs ADD COLUMN traceparent TEXT",
    """
    CREATE TABLE vectormill.webhooks (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        url TEXT NOT NULL,
        description TEXT DEFAULT '' NOT NULL,
        events TEXT[] NOT NULL,
        secret TEXT NOT NULL,
        former_secret TEXT,
        former_secret_until TIMESTAMP WITH TIME ZONE,
        is_enabled BOOLEAN DEFAULT true NOT NULL,
        disabled_reason TEXT,
        failing_since TIMESTAMP WITH TIME ZONE,
        num_delivered BIGINT DEFAULT 0 NOT NULL,
        num_refused BIGINT DEFAULT 0 NOT NULL,
        num_failed BIGINT DEFAULT 0 NOT NULL,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        updated_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_webhooks PRIMARY KEY (id)
    )
     WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE TABLE vectormill.webhook_deliveries (
        id BIGINT GENERATED ALWAYS AS IDENTITY,
        webhook_id BIGINT NOT NULL,
        event_id UUID DEFAULT gen_random_uuid() NOT NULL,
        event_type TEXT NOT NULL,
        payload TEXT NOT NULL,
        state TEXT DEFAULT 'pending' NOT NULL
            CONSTRAINT ck_webhook_deliveries_state CHECK (state IN ('pending', 'delivered', 'failed')),
        fence BIGINT DEFAULT 0 NOT NULL,
        num_attempts INTEGER DEFAULT 0 NOT NULL,
        status_code INTEGER,
        error TEXT,
        due_at TIMESTAMP WITH TIME ZONE DEFAULT now(),
        attempted_at TIMESTAMP WITH TIME ZONE,
        ended_at TIMESTAMP WITH TIME ZONE,
        created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
        CONSTRAINT pk_webhook_deliveries PRIMARY KEY (id)
    )
    """,
    "CREATE INDEX ix_webhook_deliveries_webhook_id ON vectormill.webhook_deliveries (webhook_id, id)",
    "CREATE INDEX ix_webhook_deliveries_state ON vectormill.webhook_deliveries (webhook_id, state, id)",
    "CREATE INDEX ix_webhook_deliveries_created_at ON vectormill.webhook_deliveries (created_at)",
    """
    CREATE INDEX ix_webhook_deliveries_due ON vectormill.webhook_deliveries (webhook_id, due_at)
        WHERE state = 'pending'
    """,
    # Moments in UTC, whatever the session of whoever ends the job is set to.
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
    # Jobs that nobody has submitted say nothing: twins, and those of searches and single puts.
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
    # A run that cannot begin is made as one that has ended.
    """
    CREATE TRIGGER post_first_event AFTER INSERT ON vectormill.runs FOR EACH ROW
        WHEN (NEW.state IN ('failed', 'skipped'))
        EXECUTE FUNCTION vectormill.post_run_event()
    """,
)

UNMAKE = (
    "DROP TRIGGER post_event ON vectormill.jobs",
    "DROP TRIGGER post_event ON vectormill.runs",
    "DROP TRIGGER post_first_event ON vectormill.runs",
    "DROP FUNCTION vectormill.post_job_event(), vectormill.post_run_event()",
    "DROP TABLE vectormill.webhook_deliveries, vectormill.webhooks",
    "ALTER TABLE vectormill.jobs DROP COLUMN traceparent",
)


def upgrade() -> None:
    for statement in MAKE:
        op.execute(statement)


def downgrade() -> None:
    for statement in UNMAKE:
        op.execute(statement)
