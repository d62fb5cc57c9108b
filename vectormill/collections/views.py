"""Views: point the SQL view of a collection at another generation, and keep its owner, grants, comments and options.

The view is replaced in place if its columns keep their types, which is always so for scores and records. Vectors of
another type or length, or other outputs, require a new view: it gets owner, grants, comments and options of the old
one. That is refused if other objects depend on the old view.
"""

from typing import Any, Final

import psycopg
from psycopg import sql
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import point_view_at
from vectormill.db.session import driver_of
from vectormill.domain.errors import SwapRefused
from vectormill.domain.task import VECTORS
from vectormill.results.representations import OUTPUT_COLUMNS
from vectormill.results.table import choose_kind

FIND_VIEW: Final = """
    SELECT view.oid, pg_get_userbyid(view.relowner) AS owner, view.relowner = current_user::regrole AS is_ours,
           obj_description(view.oid, 'pg_class') AS comment, coalesce(view.reloptions, '{}') AS options,
           EXISTS (
               SELECT FROM unnest(%(kept)s::text[]) AS kept (name)
                WHERE NOT EXISTS (
                    SELECT FROM pg_attribute AS old
                      JOIN pg_attribute AS new
                        ON new.attrelid = to_regclass(%(table)s::text) AND new.attname = old.attname
                     WHERE old.attrelid = view.oid AND old.attname = kept.name
                       AND (old.atttypid, old.atttypmod) = (new.atttypid, new.atttypmod)))
           OR EXISTS (
               SELECT FROM pg_attribute AS old
                WHERE old.attrelid = view.oid AND old.attname = ANY(%(left_out)s::text[])) AS has_other_columns
      FROM pg_class AS view
     WHERE view.oid = to_regclass(format('public.%%I', %(name)s::text)) AND view.relkind = 'v'
"""

# The grants on the view itself (column is NULL) and on its columns.
LIST_GRANTS: Final = """
    SELECT pg_get_userbyid(nullif(acl.grantee, 0)) AS grantee, acl.privilege_type, acl.is_grantable,
           CAST(NULL AS text) AS column
      FROM pg_class AS view, aclexplode(view.relacl) AS acl
     WHERE view.oid = %(oid)s::oid AND acl.grantee <> view.relowner
    UNION ALL
    SELECT pg_get_userbyid(nullif(acl.grantee, 0)), acl.privilege_type, acl.is_grantable, attribute.attname
      FROM pg_attribute AS attribute, aclexplode(attribute.attacl) AS acl
     WHERE attribute.attrelid = %(oid)s::oid AND attribute.attnum > 0
"""

LIST_COLUMN_COMMENTS: Final = """
    SELECT attname AS column, col_description(attrelid, attnum) AS comment
      FROM pg_attribute
     WHERE attrelid = %(oid)s::oid AND attnum > 0 AND col_description(attrelid, attnum) IS NOT NULL
"""

# DROP VIEW would silently drop triggers and rules with the view.
LIST_TRIGGERS: Final = """
    SELECT 'trigger ' || quote_ident(tgname) FROM pg_trigger WHERE tgrelid = %(oid)s::oid AND NOT tgisinternal
    UNION ALL
    SELECT 'rule ' || quote_ident(rulename) FROM pg_rewrite WHERE ev_class = %(oid)s::oid AND rulename <> '_RETURN'
"""

DROP_VIEW: Final = "DROP VIEW {name}"


def replace_view(connection: Connection, generation: Generation) -> None:
    """Make the collection's view read another generation, in the caller's transaction.

    Raise SwapRefused, which names the dependent objects, if a view on which others depend would have to be recreated.
    """
    driver = driver_of(connection)
    collection = generation.collection
    kept = [
        column.name for column in choose_kind(generation.spec).columns(generation.spec) if column.is_shown
    ]
    is_shown = generation.kind == VECTORS  # the view of scores computes its other columns
    values = {
        "name": collection,
        "table": f"vectormill.{generation.table_name}",
        "kept": kept if is_shown else kept[:1],
        "left_out": [name for name in OUTPUT_COLUMNS.values() if name not in kept] if is_shown else [],
    }
    with driver.cursor(row_factory=namedtuple_row) as cursor:
        view: Any = cursor.execute(FIND_VIEW, values).fetchone()
        options = () if view is None else view.options
        if view is None or not view.has_other_columns:
            point_view_at(connection, generation, options)
            return
        name = sql.Identifier("public", collection)
        grants = cursor.execute(LIST_GRANTS, {"oid": view.oid}).fetchall()
        comments = cursor.execute(LIST_COLUMN_COMMENTS, {"oid": view.oid}).fetchall()
        triggers = [row[0] for row in cursor.execute(LIST_TRIGGERS, {"oid": view.oid})]
        if triggers:
            raise SwapRefused(_explain(collection, ", ".join(triggers)))
        try:
            cursor.execute(sql.SQL(DROP_VIEW).format(name=name))
        except psycopg.errors.DependentObjectsStillExist as error:
            raise SwapRefused(_explain(collection, error.diag.message_detail or "other objects")) from error
        point_view_at(connection, generation, options)
        _give(cursor, collection, view, grants, comments)


def _explain(collection: str, dependents: str) -> str:
    return (
        f"The view {collection!r} must be recreated because the type, length or outputs of its vectors change, which "
        f"would drop its dependent objects: {dependents.replace(chr(10), '; ')}. Nothing was changed. Drop these "
        "objects, try again, and recreate them afterwards."
    )


def _give(cursor: Any, collection: str, view: Any, grants: list[Any], comments: list[Any]) -> None:
    """Give the new view the grants, comments and owner of the old one, without default privileges."""
    name = sql.Identifier("public", collection)
    new = cursor.execute("SELECT to_regclass(format('public.%%I', %s::text))::oid AS oid", (collection,))
    for grantee in {grant.grantee for grant in cursor.execute(LIST_GRANTS, {"oid": new.fetchone().oid})}:
        cursor.execute(sql.SQL("REVOKE ALL ON {} FROM {}").format(name, _role(grantee)))
    for grant in grants:
        column = sql.SQL(" ({})").format(sql.Identifier(grant.column)) if grant.column else sql.SQL("")
        ending = sql.SQL(" WITH GRANT OPTION" if grant.is_grantable else "")
        cursor.execute(
            sql.SQL("GRANT {}{} ON {} TO {}{}").format(
                sql.SQL(grant.privilege_type), column, name, _role(grant.grantee), ending
            )
        )
    if view.comment is not None:
        cursor.execute(sql.SQL("COMMENT ON VIEW {} IS {}").format(name, sql.Literal(view.comment)))
    for each in comments:
        column_name = sql.Identifier("public", collection, each.column)
        cursor.execute(sql.SQL("COMMENT ON COLUMN {} IS {}").format(column_name, sql.Literal(each.comment)))
    if not view.is_ours:
        cursor.execute(sql.SQL("ALTER VIEW {} OWNER TO {}").format(name, sql.Identifier(view.owner)))


def _role(grantee: str | None) -> sql.Composable:
    return sql.SQL("PUBLIC") if grantee is None else sql.Identifier(grantee)
