"""Count open jobs where they change, and find them by generation, so that no statement has to read all of them."""

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_OPEN = "('uploading', 'queued', 'running', 'paused', 'cancelling')"
_COUNTED = """model, {row}.state, {row}.priority, {row}.generation_id,
       vectormill.round_open({row}.num_items - {row}.num_done - {row}.num_failed, {row}.num_items),
       vectormill.round_open({row}.num_open_chunks, {row}.num_chunks)"""

STATEMENTS = (
    """
    CREATE TABLE vectormill.open_job_counts (
        model         text NOT NULL,
        state         text NOT NULL,
        priority      smallint NOT NULL,
        generation_id bigint,
        num_jobs      bigint NOT NULL,
        num_items     bigint NOT NULL,
        num_chunks    bigint NOT NULL
    ) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000)
    """,
    # Rounded up to 64ths of the job, so that a job of a million chunks changes the counts some 128 times.
    """
    CREATE FUNCTION vectormill.round_open(num_open bigint, num_all bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
    RETURN greatest(num_open, least(num_all,
        (num_open + greatest(num_all / 64, 1) - 1) / greatest(num_all / 64, 1) * greatest(num_all / 64, 1)))
    """,
    # Rows are only added, so no transaction waits for another one's count; the scheduler adds them up now and then.
    f"""
    CREATE FUNCTION vectormill.count_open_job() RETURNS trigger LANGUAGE plpgsql
        SET search_path = pg_catalog, pg_temp AS $$
    BEGIN
        INSERT INTO vectormill.open_job_counts
               (num_jobs, model, state, priority, generation_id, num_items, num_chunks)
        SELECT sign, model, state, priority, generation_id, sign * num_items, sign * num_chunks
          FROM (SELECT -1, OLD.{_COUNTED.format(row="OLD")} WHERE TG_OP <> 'INSERT'
                 UNION ALL
                SELECT 1, NEW.{_COUNTED.format(row="NEW")} WHERE TG_OP <> 'DELETE')
               AS changed (sign, model, state, priority, generation_id, num_items, num_chunks)
         WHERE state IN {_OPEN};
        RETURN NULL;
    END $$
    """,  # noqa: S608 - constants
    "REVOKE ALL ON FUNCTION vectormill.count_open_job() FROM PUBLIC",
    """
    CREATE TRIGGER count_open_job AFTER INSERT OR DELETE ON vectormill.jobs FOR EACH ROW
        EXECUTE FUNCTION vectormill.count_open_job()
    """,
    f"""
    CREATE TRIGGER count_changed_job AFTER UPDATE ON vectormill.jobs FOR EACH ROW
        WHEN ((OLD.state IN {_OPEN} OR NEW.state IN {_OPEN})
              AND (OLD.{_COUNTED.format(row="OLD")}) IS DISTINCT FROM (NEW.{_COUNTED.format(row="NEW")}))
        EXECUTE FUNCTION vectormill.count_open_job()
    """,
    # The triggers hold a lock until COMMIT that keeps all writers from `jobs`.
    f"""
    INSERT INTO vectormill.open_job_counts (num_jobs, model, state, priority, generation_id, num_items, num_chunks)
    SELECT count(*), model, state, priority, generation_id, sum(num_items), sum(num_chunks)
      FROM (SELECT jobs.{_COUNTED.format(row="jobs")} FROM vectormill.jobs WHERE state IN {_OPEN})
           AS open (model, state, priority, generation_id, num_items, num_chunks)
     GROUP BY model, state, priority, generation_id
    """,  # noqa: S608 - constants
    # The dispatcher reads the beginning of this index ten times a second, and paused jobs must not stand there.
    "CREATE INDEX ix_jobs_dispatched ON vectormill.jobs (model, priority, seq) WHERE state IN ('queued', 'running')",
    "DROP INDEX vectormill.ix_jobs_in_progress",
    f"""
    CREATE INDEX ix_jobs_open ON vectormill.jobs (generation_id, coalesce(place, seq))
     WHERE state IN {_OPEN} AND generation_id IS NOT NULL
    """,
    f"""
    CREATE INDEX ix_jobs_open_twins ON vectormill.jobs (twin_of)
     WHERE state IN {_OPEN} AND twin_of IS NOT NULL
    """,
    # A hash, because clients choose the metadata, and a tree refuses long values.
    f"""
    CREATE INDEX ix_jobs_changes_of ON vectormill.jobs USING hash ((metadata ->> 'changes_of'))
     WHERE state IN {_OPEN} AND metadata ? 'changes_of'
    """,
    "CREATE INDEX ix_generations_collection_id ON vectormill.generations (collection_id)",
    "CREATE INDEX ix_runs_builds ON vectormill.runs (collection_id, finished_at) WHERE kind = 'index'",
)


def upgrade() -> None:
    """Create the counts, their triggers and the indexes. Writers of `jobs` wait, a second for a million jobs."""
    for statement in STATEMENTS:
        op.execute(statement)


def downgrade() -> None:
    """Drop what `upgrade` created, and create the index again that it dropped."""
    op.execute(f"""
        CREATE INDEX ix_jobs_in_progress ON vectormill.jobs (model, priority, seq) WHERE state IN {_OPEN}
    """)
    for name in (
        "jobs_dispatched",
        "jobs_open",
        "jobs_open_twins",
        "jobs_changes_of",
        "runs_builds",
        "generations_collection_id",
    ):
        op.execute(f"DROP INDEX vectormill.ix_{name}")
    op.execute("DROP FUNCTION vectormill.count_open_job() CASCADE")
    op.execute("DROP FUNCTION vectormill.round_open(bigint, bigint) CASCADE")
    op.execute("DROP TABLE vectormill.open_job_counts")
