"""Add the outputs of jobs in object storage, and their parts."""

from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    CREATE TABLE vectormill.job_outputs (
        id           uuid CONSTRAINT pk_job_outputs PRIMARY KEY
                     CONSTRAINT fk_job_outputs_id REFERENCES vectormill.jobs ON DELETE CASCADE,
        url          text NOT NULL CONSTRAINT uq_job_outputs_url UNIQUE,
        state        text NOT NULL
                     CONSTRAINT ck_job_outputs_state CHECK (state IN ('open', 'ended', 'closing', 'closed', 'sweeping', 'swept')),
        fence        bigint NOT NULL DEFAULT 0,
        attempt      bigint NOT NULL DEFAULT 0,
        available_at timestamptz NOT NULL DEFAULT now(),
        lease_owner  text,
        lease_until  timestamptz,
        last_error   text,
        closed_at    timestamptz,
        num_swept    bigint NOT NULL DEFAULT 0
    ) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500)
    """,
    """
    CREATE INDEX ix_job_outputs_due ON vectormill.job_outputs (available_at)
     WHERE state IN ('ended', 'closing', 'closed', 'sweeping')
    """,
    """
    CREATE TABLE vectormill.output_parts (
        job_id     uuid NOT NULL
                   CONSTRAINT fk_output_parts_job_id REFERENCES vectormill.job_outputs ON DELETE CASCADE,
        name       text NOT NULL,
        first_item bigint NOT NULL,
        num_rows   bigint NOT NULL,
        num_bytes  bigint NOT NULL,
        CONSTRAINT pk_output_parts PRIMARY KEY (job_id, name)
    )
    """,
    # Jobs end in several statements, and nobody who looks for ended outputs may have to read all open jobs.
    """
    CREATE FUNCTION vectormill.end_output() RETURNS trigger LANGUAGE plpgsql
        SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        UPDATE vectormill.job_outputs SET state = 'ended', available_at = now() WHERE id = NEW.id AND state = 'open';
        RETURN NULL;
    END $$
    """,
    "REVOKE ALL ON FUNCTION vectormill.end_output() FROM PUBLIC",
    """
    CREATE TRIGGER end_output AFTER UPDATE OF state ON vectormill.jobs FOR EACH ROW
        WHEN (OLD.state <> NEW.state
              AND NEW.state IN ('completed', 'completed_with_errors', 'failed', 'cancelled'))
        EXECUTE FUNCTION vectormill.end_output()
    """,
)


def upgrade() -> None:
    """Create both tables and the trigger. Of what exists only `jobs` is locked, and only for a moment."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop both tables. What lies in object storage stays there, and its manifests can still be read."""
    op.execute("DROP FUNCTION vectormill.end_output() CASCADE")
    op.execute("DROP TABLE vectormill.output_parts")
    op.execute("DROP TABLE vectormill.job_outputs")
