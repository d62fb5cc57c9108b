-- Who owns what in the schema vectormill: static tables and functions the owner, what is made at run time the service.
-- Tables that are made at run time have a number in their names, or are partitions.

SELECT format('ALTER SCHEMA vectormill OWNER TO %I', :'owner')
  FROM pg_namespace JOIN pg_roles ON pg_roles.oid = nspowner
 WHERE nspname = 'vectormill' AND rolname <> :'owner' AND pg_has_role(nspowner, 'MEMBER')
\gexec

SELECT format('GRANT USAGE, CREATE ON SCHEMA vectormill TO %I', :'service')
  FROM pg_namespace WHERE nspname = 'vectormill' AND NOT has_schema_privilege(:'service', oid, 'CREATE')
\gexec

SELECT format('ALTER TABLE %s OWNER TO %I', oid::regclass, wanted)
  FROM (SELECT oid, relowner, CASE WHEN relkind = 'p' OR relispartition OR relname ~ '[0-9]' THEN :'service'
                                   ELSE :'owner' END AS wanted
          FROM pg_class
         WHERE relnamespace = to_regnamespace('vectormill')
           AND (relkind IN ('r', 'p', 'v') OR relkind = 'S' AND NOT EXISTS (
               SELECT FROM pg_depend WHERE classid = CAST('pg_class' AS regclass) AND objid = pg_class.oid
                                       AND deptype IN ('a', 'i')))) AS tables
 WHERE pg_get_userbyid(relowner) <> wanted AND pg_has_role(relowner, 'MEMBER')
\gexec

SELECT format('ALTER TYPE %s OWNER TO %I', pg_type.oid::regtype, :'owner')
  FROM pg_type LEFT JOIN pg_class ON pg_class.oid = typrelid
 WHERE typnamespace = to_regnamespace('vectormill') AND (typtype IN ('d', 'e') OR relkind = 'c')
   AND pg_get_userbyid(typowner) <> :'owner' AND pg_has_role(typowner, 'MEMBER')
\gexec

SELECT format('ALTER ROUTINE %s OWNER TO %I', oid::regprocedure, :'owner')
  FROM pg_proc
 WHERE pronamespace = to_regnamespace('vectormill')
   AND pg_get_userbyid(proowner) <> :'owner' AND pg_has_role(proowner, 'MEMBER')
\gexec

-- The views of collections.
SELECT DISTINCT format('ALTER VIEW %s OWNER TO %I', views.oid::regclass, :'service')
  FROM pg_class AS views
  JOIN pg_rewrite ON ev_class = views.oid
  JOIN pg_depend ON classid = CAST('pg_rewrite' AS regclass) AND objid = pg_rewrite.oid
  JOIN pg_class AS tables ON tables.oid = refobjid AND tables.relnamespace = to_regnamespace('vectormill')
 WHERE views.relkind = 'v' AND views.relnamespace = to_regnamespace('public')
   AND refclassid = CAST('pg_class' AS regclass)
   AND pg_get_userbyid(views.relowner) <> :'service' AND pg_has_role(views.relowner, 'MEMBER')
\gexec

SELECT format('GRANT %s ON %s TO %I',
              CASE WHEN relkind = 'S' THEN 'USAGE, SELECT' WHEN relname = 'alembic_version' THEN 'SELECT'
                   ELSE 'SELECT, INSERT, UPDATE, DELETE, REFERENCES' END,
              oid::regclass, :'service')
  FROM pg_class
 WHERE relnamespace = to_regnamespace('vectormill') AND relkind IN ('r', 'v', 'S')
   AND pg_get_userbyid(relowner) = :'owner' AND pg_has_role(relowner, 'MEMBER')
   AND NOT CASE WHEN relkind = 'S' THEN has_sequence_privilege(:'service', oid, 'USAGE')
                WHEN relname = 'alembic_version' THEN has_table_privilege(:'service', oid, 'SELECT')
                ELSE has_table_privilege(:'service', oid, 'REFERENCES') END
\gexec

SELECT format('GRANT EXECUTE ON ROUTINE %s TO %I', oid::regprocedure, :'service')
  FROM pg_proc
 WHERE pronamespace = to_regnamespace('vectormill') AND pg_has_role(proowner, 'MEMBER')
   AND NOT has_function_privilege(:'service', oid, 'EXECUTE')
\gexec
