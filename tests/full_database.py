"""Fill a database like that of a large service: 100,000 open jobs, 1,000 workers, and a million chunks."""

from typing import Final

from sqlalchemy import Engine, text

from tests.protocol import SPEC
from vectormill.db.parameters import to_jsonb
from vectormill.jobs.backlog import add_up_counts

NUM_OPEN_JOBS: Final = 100_000
# This is the number of chunks that 1,000 workers with 16 slots may hold.
NUM_IN_FLIGHT: Final = 16_000
NUM_MODELS: Final = 4

PLACES: Final = (
    "INSERT INTO vectormill.collections (name) SELECT 'docs-' || number FROM generate_series(1, 1000) AS number",
    """
    INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state, live_at)
    SELECT id, jsonb_set(CAST(:spec AS jsonb), '{model}', to_jsonb('model-' || id % 4)), 'same', 'live', now()
      FROM vectormill.collections
    """,
    """
    INSERT INTO vectormill.workers (name, incarnation, model, slots, max_tokens_in_flight, report, heartbeat_at)
    SELECT 'worker-' || number, gen_random_uuid(), 'model-' || number % 4, 16, 65536,
           jsonb_build_object('state', 'running', 'state_reason', repeat('x', 1500)), now() + interval '1 hour'
      FROM generate_series(1, 1000) AS number
    """,
    """
    INSERT INTO vectormill.schedules (name, collection_id, cron, timezone, overlap, next_due_at)
    SELECT 'nightly-' || id, id, '0 3 * * *', 'UTC', 'skip', now() + interval '1 day'
      FROM vectormill.collections LIMIT 200
    """,
    """
    INSERT INTO vectormill.runs (id, collection_id, schedule_id, kind, state, created_at, finished_at)
    SELECT gen_random_uuid(), schedules.collection_id, schedules.id, 'reindex', 'completed', ended, ended
      FROM vectormill.schedules, generate_series(1, 250) AS number,
           LATERAL (SELECT now() - make_interval(mins => number)) AS time (ended)
    """,
)
# The oldest open jobs are paused, so that whoever looks for the oldest to dispatch comes across them first. Of the
# others a fifth has begun and one in a hundred is an upload. Half of all write to collections.
JOBS: Final = (
    """
    INSERT INTO vectormill.jobs (id, state, model, spec, generation_id, priority, num_items, num_chunks,
                                 num_open_chunks, created_at, updated_at, started_at, paused_at)
    SELECT gen_random_uuid(),
           CASE WHEN number <= 15000 THEN 'paused' WHEN number % 100 = 0 THEN 'uploading'
                WHEN number % 5 = 0 THEN 'running' ELSE 'queued' END,
           'model-' || number % 4, jsonb_set(CAST(:spec AS jsonb), '{model}', to_jsonb('model-' || number % 4)),
           CASE WHEN number % 2 = 0 THEN number % 1000 + CASE number % 1000 WHEN 0 THEN 1000 ELSE 0 END END,
           number % 7, 2000, 2, 2, now() - interval '1 day', now() - interval '1 hour', now() - interval '1 day',
           CASE WHEN number <= 15000 THEN now() END
      FROM generate_series(1, 99999) AS number
    """,
    """
    INSERT INTO vectormill.jobs (id, state, model, spec, priority, num_items, num_chunks, num_open_chunks, started_at)
    SELECT '00000000-0000-0000-0000-000000000001', 'running', 'model-1',
           jsonb_set(CAST(:spec AS jsonb), '{model}', '"model-1"'), 5, 800000000, 800000, 800000, now()
    """,
    """
    INSERT INTO vectormill.jobs (id, state, model, spec, priority, num_items, num_done, num_chunks, finished_at)
    SELECT gen_random_uuid(), 'completed', 'model-' || number % 4, CAST(:spec AS jsonb), 5, 1, 1, 1,
           now() - interval '1 hour'
      FROM generate_series(1, 20000) AS number
    """,
)
# References are not checked meanwhile, and indexes are made afterwards, which is three times as fast.
CHUNKS: Final = (
    "SET LOCAL session_replication_role = replica",
    """
    INSERT INTO vectormill.chunks (job_id, seq, first_item, num_items, estimated_tokens, state, fence, lease_owner,
                                   lease_until)
    SELECT jobs.id, number, number * 1000, 1000, 4096, CASE WHEN is_held THEN 'leased' ELSE 'pending' END,
           CAST(is_held AS int), owner, now() + interval '1 hour'
      FROM vectormill.jobs, generate_series(0, num_chunks - 1) AS number,
           LATERAL (SELECT num_chunks > 2 AND number < 8000 OR state = 'running' AND number = 0 AND jobs.seq < 50000)
                   AS chosen (is_held),
           LATERAL (SELECT CASE WHEN is_held THEN (SELECT min(name || ':' || left(incarnation::text, 8))
                                                     FROM vectormill.workers) END) AS owners (owner)
     WHERE finished_at IS NULL
    """,
    """
    UPDATE vectormill.chunks SET state = 'queued', queued_at = now() + interval '1 hour'
     WHERE id IN (SELECT id FROM vectormill.chunks WHERE state = 'pending' ORDER BY id DESC LIMIT 1000)
    """,
    "SET LOCAL session_replication_role = origin",
)
LIST_INDEXES: Final = text("""
    SELECT indexname, indexdef FROM pg_indexes
     WHERE schemaname = 'vectormill' AND tablename = 'chunks' AND indexname LIKE 'ix%'
""")
FILLED: Final = (
    "jobs", "chunks", "runs", "workers", "collections", "generations", "schedules", "open_job_counts"
)  # fmt: skip


def fill_database(engine: Engine) -> None:
    """Fill the migrated, empty database behind `engine`, and let Postgres count the rows."""
    with engine.begin() as connection:
        indexes = connection.execute(LIST_INDEXES).all()
        for index in indexes:
            connection.execute(text(f"DROP INDEX vectormill.{index.indexname}"))
        for statement in (*PLACES, *JOBS, *CHUNKS):
            values = {"spec": to_jsonb(SPEC.to_json())} if ":spec" in statement else {}
            connection.execute(text(statement), values)
        for index in indexes:
            connection.execute(text(index.indexdef))
    add_up_counts(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in FILLED:
            connection.execute(text(f"VACUUM ANALYZE vectormill.{table}"))
