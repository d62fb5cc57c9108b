"""How many rows a table has, about: as the planner has it, which reads no row."""

from typing import Final

from sqlalchemy import Connection, text

ESTIMATE_ROWS: Final = text("SELECT CAST(reltuples AS bigint) FROM pg_class WHERE oid = to_regclass(:table)")


def estimate_num_rows(connection: Connection, table: str) -> int | None:
    """Of a table of the schema vectormill; None where there is none, or nothing has counted it yet."""
    estimate = connection.execute(ESTIMATE_ROWS, {"table": f"vectormill.{table}"}).scalar_one_or_none()
    return None if estimate is None or estimate < 0 else int(estimate)
