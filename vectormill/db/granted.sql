-- What queries of sources could read before there was a reader is granted to it, once: a comment on the role tells that
-- this was done, so that what an operator revokes later stays revoked.

-- Tables that a superuser named vectormill has made went to our schema, which came first on its search path.
SELECT format('ALTER TABLE %s SET SCHEMA public', oid::regclass)
  FROM pg_class
 WHERE relnamespace = to_regnamespace('vectormill') AND relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT relispartition
   AND relname !~ '^(generation_[0-9]+|run_[0-9a-f]{32}_)' AND relname !~ '_default$'
   AND relname NOT IN (
        'alembic_version', 'api_keys', 'calibrations', 'chunk_payloads', 'chunk_truncations', 'chunk_vectors',
        'chunks', 'codebooks', 'collections', 'generations', 'heartbeats', 'idempotency_keys', 'item_errors',
        'job_increments', 'job_inputs', 'job_outputs', 'jobs', 'multi_vector', 'open_job_counts',
        'output_parts', 'proofs', 'removed_chunks', 'request_batches', 'request_file_parts', 'request_files',
        'request_refusals', 'run_parts', 'runs', 'schedules', 'secrets', 'source_changes', 'sources', 'tombstones',
        'webhook_deliveries', 'webhooks', 'workers')
   AND :'own' = 'yes'
   AND NOT EXISTS (SELECT FROM pg_roles
                    WHERE rolname = :'reader' AND shobj_description(pg_roles.oid, 'pg_authid') IS NOT NULL)
\gexec

-- Tables and views in public, but for those of extensions and the views of collections.
SELECT format(statement, pg_class.oid::regclass, grantee)
  FROM pg_class, (VALUES ('GRANT SELECT ON %s TO %I', :'reader'), ('GRANT TRIGGER ON %s TO %I', :'service'))
       AS rights (statement, grantee)
 WHERE relnamespace = to_regnamespace('public') AND relkind IN ('r', 'p', 'v', 'm', 'f')
   AND NOT EXISTS (SELECT FROM pg_depend WHERE classid = CAST('pg_class' AS regclass) AND objid = pg_class.oid
                                           AND deptype = 'e')
   AND NOT EXISTS (
       SELECT FROM pg_rewrite
         JOIN pg_depend ON classid = CAST('pg_rewrite' AS regclass) AND objid = pg_rewrite.oid
         JOIN pg_class AS tables ON tables.oid = refobjid AND tables.relnamespace = to_regnamespace('vectormill')
        WHERE ev_class = pg_class.oid AND refclassid = CAST('pg_class' AS regclass))
   AND :'own' = 'yes'
   AND NOT EXISTS (SELECT FROM pg_roles
                    WHERE rolname = :'reader' AND shobj_description(pg_roles.oid, 'pg_authid') IS NOT NULL)
\gexec

SELECT format('COMMENT ON ROLE %I IS %L', :'reader', 'It reads the queries of sources for Vectormill.')
\gexec
