"""Find the tables of a database that still contain some text, plain or compressed in a payload."""

from sqlalchemy import Engine, text

from vectormill.jobs.chunk import decode_payload

LIST_TABLES = text("""
    SELECT format('%I.%I', nspname, relname) FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
     WHERE nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') AND nspname NOT LIKE 'pg_temp%'
       AND relkind IN ('r', 'p') AND NOT relispartition
     ORDER BY 1
""")


def find_residue(engine: Engine, wanted: str) -> list[str]:
    """Return the tables that have the text in some row."""
    found = []
    with engine.connect() as connection:
        tables = list(connection.execute(LIST_TABLES).scalars())
        for table in tables:
            for row in connection.execute(text(f"SELECT CAST(kept AS text) FROM {table} AS kept")).scalars():
                if wanted in row or wanted.encode().hex() in row:
                    found.append(table)
        for blob in connection.execute(text("SELECT items FROM vectormill.chunk_payloads")).scalars():
            for item in decode_payload(bytes(blob)):
                if wanted.encode() in item.text or wanted.encode() in item.metadata:
                    found.append("vectormill.chunk_payloads")
    return found
