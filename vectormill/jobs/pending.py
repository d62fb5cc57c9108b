"""Pending: how many items wait or are being encoded, in all jobs together."""

from sqlalchemy import Connection, text

from vectormill.jobs.job import OPEN_JOB_STATES

# Jobs in progress are few, and found by their own index. An upload's items count from the moment that it is complete.
COUNT_PENDING_ITEMS = text(f"""
    SELECT CAST(coalesce(sum(num_items - num_done - num_failed), 0) AS bigint) FROM vectormill.jobs
     WHERE state IN {OPEN_JOB_STATES}
""")


def count_pending_items(connection: Connection) -> int:
    number: int = connection.execute(COUNT_PENDING_ITEMS).scalar_one()
    return number
