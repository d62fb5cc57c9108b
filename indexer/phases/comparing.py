"""Comparing: what vanished, whether that is too much to be believed, and which texts have a vector already."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection

from indexer.context import RunContext
from indexer.progress import ClaimProgress
from indexer.target import find_target, live_stage
from vectormill.domain.errors import RunError
from vectormill.runs.differences import count_rows, note_moved, note_vanished, write_moved
from vectormill.runs.run import (
    COMPARING,
    DEFAULT_MAX_CHANGE_SHARE,
    READING,
    Run,
    is_as_confirmed,
    refuse_change,
)
from vectormill.runs.stages import require_stage

_MOVED_PER_BATCH: Final = 2000


class RunHeld(RunError):
    """The run would change more of the collection than it may unasked; it waits to be confirmed."""


def compare(context: RunContext, progress: ClaimProgress) -> None:
    """Raise RunHeld before anything was changed."""
    look_for_vanished(context, progress)
    take_over_vectors(context, progress)


def look_for_vanished(context: RunContext, progress: ClaimProgress) -> None:
    run = context.run
    assert run.seq is not None
    with context.engine.begin() as connection:
        progress.save(connection)
        target = find_target(connection, run)
        require_stage(connection, target.stage)
        num_rows = count_rows(connection, target.stage)
        num_vanished = 0
        if tells_what_vanished(run):
            num_vanished = note_vanished(
                connection,
                target.stage,
                num_rows=num_rows,
                num_known=run.counts.num_seen - run.counts.num_new,
                num_seen=run.counts.num_seen,
                seq=run.seq,
            )
        found: dict[str, Any] = {"num_rows": num_rows, "num_vanished": num_vanished}
        if target.is_live:
            change = {
                "num_rows": num_rows,
                "num_changed": run.counts.num_changed,
                "num_vanished": num_vanished,
            }
        else:
            change = measure_build(connection, run)
    refusal = guard(run, change)
    context.report(COMPARING, found if refusal is None else found | {"held_for": change})
    if refusal is not None:
        raise RunHeld(refusal)


def tells_what_vanished(run: Run) -> bool:
    """Return whether a row that the source lacks is to be deleted.

    It is not where a client has pushed only some rows, or where the source cannot know.
    """
    is_complete = bool(run.options.get("is_complete", True))
    return is_complete and bool(run.report.get(READING, {}).get("tells_what_vanished", True))


def guard(run: Run, change: Mapping[str, int]) -> str | None:
    """Return the sentence for which the run is held, None when it may go on."""
    confirmed = run.options.get("confirmed")
    if run.options.get("confirm") or (confirmed and is_as_confirmed(**change, confirmed=confirmed)):
        return None
    return refuse_change(**change, max_share=max_change_share(run.options))


def measure_build(connection: Connection, run: Run) -> dict[str, int]:
    """Measure how many rows a new generation would lack because the source has lost them meanwhile.

    That it encodes all others is what was asked for, and counts as no change.
    """
    num_rows = count_rows(connection, live_stage(connection, run))
    num_vanished = max(0, num_rows - run.counts.num_seen)
    return {"num_rows": num_rows, "num_changed": 0, "num_vanished": num_vanished}


def max_change_share(options: Any) -> float:
    share = options.get("max_change_share")
    return DEFAULT_MAX_CHANGE_SHARE if share is None else float(share)


def take_over_vectors(context: RunContext, progress: ClaimProgress) -> None:
    """A renamed row, and a passage that only moved, get the vector that their text has in the generation."""
    run = context.run
    if run.counts.num_new + run.counts.num_changed == 0:
        return
    with context.engine.begin() as connection:
        progress.save(connection)
        target = find_target(connection, run)
        require_stage(connection, target.stage)
        note_moved(connection, target.stage)
    after: int | None = 0
    while after is not None:
        context.check()
        with context.engine.begin() as connection:
            progress.save(connection)
            target = find_target(connection, run)
            require_stage(connection, target.stage)
            num_moved, after = write_moved(
                connection,
                target.stage,
                after=after,
                limit=_MOVED_PER_BATCH,
                keep_text=target.keep_text,
            )
            counts = progress.add(num_moved=num_moved)
            progress.save(connection, counts)
        progress.counts = counts
