-- Run as a superuser, or as a role that may create roles, in the database of Vectormill. A repetition changes nothing.
-- Each SELECT returns statements, which psql runs then. Their values:
--   owner     owns the schema vectormill and migrates it; it alone backs up and restores
--   service   the role of all processes: rows, and the tables of generations, which it makes itself
--   reader    reads what queries of sources name, if it is granted to it, and nothing of ours
--   own       'yes' if the database has nothing but Vectormill and the tables that it encodes

SELECT format('CREATE ROLE %I LOGIN', name)
  FROM unnest(CAST(ARRAY[:'owner', :'service', :'reader'] AS text[])) AS name
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)
\gexec

SELECT statement FROM (VALUES
    (1, format('GRANT %I, %I TO CURRENT_USER', :'owner', :'service'),
        NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)),
    (2, format('GRANT %I TO %I', :'service', :'owner'), true),
    (3, 'CREATE EXTENSION IF NOT EXISTS vector SCHEMA public', true),
    (4, format('GRANT CONNECT ON DATABASE %I TO %I, %I', current_database(), :'service', :'reader'), true),
    (5, format('GRANT CONNECT, CREATE ON DATABASE %I TO %I', current_database(), :'owner'), true),
    (6, format('GRANT USAGE, CREATE ON SCHEMA public TO %I, %I', :'owner', :'service'), true),
    (7, format('GRANT USAGE ON SCHEMA public TO %I', :'reader'), true),
    (8, format('GRANT pg_read_all_data TO %I', :'owner'), :'own' = 'yes'),
    -- Otherwise tables that this superuser makes would go to our schema, where no source sees them.
    (9, format('ALTER ROLE %I IN DATABASE %I SET search_path = public', current_user, current_database()),
        :'own' = 'yes' AND current_user = 'vectormill')
) AS grants (place, statement, is_wanted) WHERE is_wanted ORDER BY place
\gexec

-- The free memory of the machine decides how an index is built. The service reads these files and no others.
SELECT statement FROM (VALUES
    (1, 'CREATE SCHEMA IF NOT EXISTS vectormill_server'),
    (2, $function$
        CREATE OR REPLACE FUNCTION vectormill_server.read_machine(OUT memory text, OUT processors text,
            OUT most_memory text, OUT used_memory text, OUT memory_use text, OUT quota text)
            LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
            SELECT pg_read_file('/proc/meminfo', 0, 65536, true),
                   pg_read_file('/proc/stat', 0, 65536, true),
                   pg_read_file('/sys/fs/cgroup/memory.max', 0, 100, true),
                   pg_read_file('/sys/fs/cgroup/memory.current', 0, 100, true),
                   pg_read_file('/sys/fs/cgroup/memory.stat', 0, 65536, true),
                   pg_read_file('/sys/fs/cgroup/cpu.max', 0, 100, true)
            $body$
        $function$),
    (3, 'REVOKE EXECUTE ON FUNCTION vectormill_server.read_machine() FROM PUBLIC'),
    (4, format('GRANT USAGE ON SCHEMA vectormill_server TO %I', :'service')),
    (5, format('GRANT EXECUTE ON FUNCTION vectormill_server.read_machine() TO %I', :'service'))
) AS made (place, statement)
 WHERE pg_has_role(current_user, 'pg_read_server_files', 'MEMBER')
 ORDER BY place
\gexec

-- A query of a source could otherwise hold the lock that elects a scheduler for as long as it runs.
SELECT format(statement, pg_proc.oid::regprocedure, :'owner', :'service')
  FROM pg_proc, (VALUES (1, 'GRANT EXECUTE ON FUNCTION %s TO %I, %I'),
                        (2, 'REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC')) AS steps (place, statement)
 WHERE :'own' = 'yes' AND pronamespace = CAST('pg_catalog' AS regnamespace) AND proname ~ '^pg_(try_)?advisory_'
   AND has_function_privilege(:'reader', pg_proc.oid, 'EXECUTE')
 ORDER BY place
\gexec
