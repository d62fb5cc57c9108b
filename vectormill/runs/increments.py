"""Increments: which rows of a source a run has to read, if a column of the source tells when each was changed.

Each run reports the newest value of that column that it has read. A later run reads from the value of the run
before the last one on, so that a transaction which was open during one run is found by the next. It also reads the
rows whose texts the last run could not encode, since nothing else would try them again before all rows are read.
"""

import hashlib
import json
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.runs.differences import list_failed_keys
from vectormill.runs.run import GOOD_RUN_STATES, READING, REINDEX, Run
from vectormill.sources.options import FULL_EVERY_HOURS
from vectormill.sources.source import Source

# The member of the report of a reading.
CHANGED: Final = "changed"

# Marks were once compared by Python, whose order of texts is not that of a database; those are not taken up.
ORDER: Final = "database"
# With more rows that could not be encoded, all rows are read.
MOST_FAILED: Final = 10_000

# Uses ix_runs_collection_id, and stops after two rows.
LIST_MARKS: Final = text(f"""
    SELECT report #> '{{{READING},{CHANGED}}}' AS mark, generation_id, num_failed, job_id,
           EXISTS (SELECT 1 FROM vectormill.jobs WHERE jobs.id = runs.job_id AND state <> 'deleting') AS has_job
      FROM vectormill.runs
     WHERE collection_id = :collection_id AND kind = '{REINDEX}' AND state IN {GOOD_RUN_STATES}
     ORDER BY created_at DESC LIMIT 2
""")
IS_RECENT: Final = text("SELECT CAST(:moment AS timestamptz) > now() - make_interval(hours => :hours)")
NOW: Final = text("SELECT now()::text")


def find_digest(source: Source) -> str:
    """Return a digest of what a source reads, so that marks of another query are not taken for its own."""
    said = json.dumps([source.kind, dict(source.options), dict(source.split), ORDER], sort_keys=True)
    return hashlib.sha256(said.encode()).hexdigest()


def begin_mark(
    connection: Connection, run: Run, generation_id: int, source: Source
) -> tuple[dict[str, Any], list[str]]:
    """Return the mark of a run that begins to read, and the keys of rows that the last run could not encode.

    `since` in the mark is None if it has to read all rows: for the first two runs on a generation or with another
    source, if the last complete reading is older than the source allows, if nothing tells any more which texts the last
    run could not encode, and if the run was told so.
    """
    digest = find_digest(source)
    whole = {"source": digest, "since": None, "newest": None, "whole_at": connection.scalar(NOW)}
    if run.options.get("full"):
        return whole, []
    found = connection.execute(LIST_MARKS, {"collection_id": run.collection_id}).all()
    marks = [row.mark for row in found if row.mark and row.generation_id == generation_id]
    if len(marks) < 2 or any(mark["source"] != digest or mark["newest"] is None for mark in marks):
        return whole, []
    last, before = marks
    hours = int(source.options.get("full_every_hours", FULL_EVERY_HOURS))
    if not connection.scalar(IS_RECENT, {"moment": last["whole_at"], "hours": hours}):
        return whole, []
    mark = {**last, "since": before["newest"]}
    if not found[0].num_failed:
        return mark, []
    failed = list_failed_keys(connection, found[0].job_id, after=-1, limit=MOST_FAILED + 1)
    if not found[0].has_job or len(failed) > MOST_FAILED:
        return whole, []
    return mark, [key for _, key, _ in failed]
