"""Phases of a claimed run, carried out in order until the run has ended, is held, or is handed back.

Each phase is idempotent. So an indexer that takes over a run repeats the phase in which it was left, and a
transient error is handled by repeating the phase.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Engine

from indexer.checking import check_collection, check_generation
from indexer.context import ClaimProgress, RunContext, Wait
from indexer.indexing import drop_before_bulk, index
from indexer.reindexing import (
    RunHeld,
    begin_reading,
    compare,
    delete_vanished,
    describe_reading,
    encode,
    narrow_reading,
    read_source,
)
from indexer.swapping import swap
from vectormill.db.outages import DATABASE_ERRORS, describe_refusal, is_lasting, is_outage, is_shortage
from vectormill.db.parameters import to_jsonb
from vectormill.domain.errors import LeaseLost, RunCancelled, SourceInterrupted, VectormillError
from vectormill.models.registry import Registry
from vectormill.runs.differences import StageLost, drop_left_stages
from vectormill.runs.run import (
    CANCELLED,
    CHECK,
    CHECKING,
    COMPARING,
    DELETING,
    ENCODING,
    FAILED,
    HELD,
    INDEXING,
    READING,
    REINDEX,
    SWAPPING,
    Run,
    phase_after,
    state_at_end,
)
from vectormill.runs.runs import REPORT_RUN, abandon_run, end_run, find_run, hold_run
from vectormill.settings import Settings
from vectormill.sources.reader import Reader
from vectormill.tracing import span
from vectormill.work.work import Lease, handing_back

logger = logging.getLogger(__name__)

_OUTAGE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Tools:
    """The dependencies of all runs of an indexer. `open_source` returns the reader of a run's source."""

    engine: Engine
    settings: Settings
    registry: Registry
    open_source: Callable[[RunContext], Reader]
    wait: Wait


def read(context: RunContext, progress: ClaimProgress, tools: Tools) -> None:
    source = tools.open_source(context)
    target, seq = begin_reading(context, progress)
    mark = narrow_reading(context, source, target)
    read_source(context, progress, source, target, seq)
    context.report(READING, describe_reading(source, mark))


def write(context: RunContext, progress: ClaimProgress, tools: Tools) -> None:
    """Write all differences. Before a large change the vector index is dropped; it is rebuilt afterwards."""
    drop_before_bulk(context, progress.counts.num_new + progress.counts.num_changed)
    encode(context, progress, tools.wait)


def check(context: RunContext, progress: ClaimProgress, tools: Tools) -> None:
    """Check a generation that the run has built or, for a run of kind `check`, the live generation."""
    if context.run.kind == REINDEX:
        check_generation(context, tools.wait)
    elif context.run.kind == CHECK:
        check_collection(context)


PHASES: Final[Mapping[str, Callable[[RunContext, ClaimProgress, Tools], None]]] = {
    READING: read,
    COMPARING: lambda context, progress, tools: compare(context, progress),
    ENCODING: write,
    DELETING: lambda context, progress, tools: delete_vanished(context, progress),
    INDEXING: lambda context, progress, tools: index(context),
    CHECKING: check,
    SWAPPING: lambda context, progress, tools: swap(context, tools.wait),
}


def carry_out(lease: Lease, run: Run, tools: Tools, check: Callable[[], None]) -> None:
    """Carry out a claimed run to its end, or until it is held or handed back.

    `check` raises LeaseLost, RunCancelled or Stopping. Nothing is raised except a database error that could
    not be recorded; then the run waits until its lease expires.
    """

    def abandon(state: str, reason: str | None = None) -> None:
        logger.warning("Run %s of %s is %s. %s", run.id, run.collection, state, reason or "")
        with tools.engine.begin() as connection:
            abandon_run(connection, lease, state, reason)
        drop_left_stages(tools.engine)

    with handing_back(tools.engine, lease):
        if lease.attempt > tools.settings.max_attempts:
            abandon(FAILED, describe_attempts(lease, run))
            return
        try:
            with span(
                "run", run_id=str(run.id), kind_of_run=run.kind, collection=run.collection, fence=lease.fence
            ):
                _go_through(lease, run, tools, check)
        except (LeaseLost, SourceInterrupted):
            raise
        except RunCancelled:
            abandon(CANCELLED)
        except RunHeld as held:
            logger.warning("Run %s of %s is held: %s", run.id, run.collection, held)
            with tools.engine.begin() as connection:
                end_run(connection, lease, HELD, str(held))
        except VectormillError as error:
            abandon(FAILED, str(error))
        except DATABASE_ERRORS as error:
            if not is_lasting(error):
                raise
            abandon(FAILED, f"Postgres refused a statement of the run: {describe_refusal(error)}.")


def describe_attempts(lease: Lease, run: Run) -> str:
    """Return the error of a run that fails because it was claimed too often."""
    last = f" The last error was: {run.error}" if run.error else ""
    return f"{lease.describe_attempts()} It was in phase {run.phase} (VECTORMILL_MAX_ATTEMPTS).{last}"


def _go_through(lease: Lease, run: Run, tools: Tools, check: Callable[[], None]) -> None:
    progress = ClaimProgress(lease, run)
    phase: str | None = progress.phase
    num_outages = 0  # in this phase after it had begun, which the phase itself may have caused
    while phase is not None:
        check()
        progress.phase = phase
        has_begun = False
        try:
            context = _make_context(lease, tools, check)
            progress.counts = context.run.counts  # a COMMIT whose answer was lost may have changed them
            has_begun = True
            with span(phase):  # traces of jobs that the phase submits belong to this span
                PHASES[phase](context, progress, tools)
            phase, num_outages = phase_after(context.run.kind, phase), 0
            if phase is not None:
                with tools.engine.begin() as connection:
                    progress.save(connection, phase=phase)
        except StageLost:
            logger.warning("Run %s reads its source again, because Postgres lost the staged rows.", run.id)
            phase = READING
        except DATABASE_ERRORS as error:
            num_outages += has_begun
            if not is_outage(error) or is_shortage(error) or num_outages > tools.settings.max_attempts:
                raise
            logger.warning("Cannot reach Postgres; the run is waiting: %s", error)
            tools.wait(_OUTAGE_SECONDS)
    with tools.engine.begin() as connection:
        end_run(connection, lease, state_at_end(progress.counts))
    drop_left_stages(tools.engine)


def _make_context(lease: Lease, tools: Tools, check: Callable[[], None]) -> RunContext:
    """Return a context with the run as the previous phase has left it."""

    def report(phase: str, found: Mapping[str, Any]) -> None:
        with tools.engine.begin() as connection:
            lease.keep(connection, REPORT_RUN, phase=phase, found=to_jsonb(dict(found)))

    with tools.engine.connect() as connection:
        run = find_run(connection, lease.key)

    def hold(connection: Connection) -> None:
        hold_run(connection, lease)

    return RunContext(run, tools.engine, tools.settings, tools.registry, check, report, hold)
