"""Deleting: rows that the source no longer has. Only after it was read to its end, and in short transactions."""

from typing import Final

from indexer.context import RunContext
from indexer.progress import ClaimProgress
from indexer.target import find_target
from vectormill.collections.rows.items import remove_items
from vectormill.runs.differences import list_vanished
from vectormill.runs.stages import require_stage

_ROWS_PER_BATCH: Final = 1000


def delete_vanished(context: RunContext, progress: ClaimProgress) -> None:
    """Delete rows that the source no longer has; a row that a client put since the run began stays."""
    run = context.run
    assert run.seq is not None
    after = run.counts.num_seen
    while True:
        context.check()
        with context.engine.begin() as connection:
            progress.save(connection)
            target = find_target(connection, run)
            require_stage(connection, target.stage)
            vanished = list_vanished(connection, target.stage, after=after, limit=_ROWS_PER_BATCH)
            if not vanished:
                return
            keys = [key for _, key in vanished]
            num_deleted = remove_items(connection, target.generation, keys, [run.seq] * len(keys))
            counts = progress.add(num_deleted=num_deleted)
            progress.save(connection, counts)
        progress.counts = counts
        after = vanished[-1][0]
