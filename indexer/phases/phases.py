"""Phases: what a claimed run goes through, in order, until it has ended, is held, or is handed back.

Each phase may be repeated from its beginning, and what it wrote stays: so whoever takes a run over goes on in the phase
in which it was left, and an error that passes is answered by doing the phase again.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Engine

from indexer.context import RunContext
from indexer.phases.canary import check_generation
from indexer.phases.checking import check_collection
from indexer.phases.comparing import RunHeld, compare
from indexer.phases.deleting import delete_vanished
from indexer.phases.encoding import Wait, encode
from indexer.phases.indexing import drop_before_bulk, index
from indexer.phases.reading import Source, begin_reading, describe_reading, read_source
from indexer.phases.swapping import swap
from indexer.progress import Progress
from vectormill.db.outages import DATABASE_ERRORS, describe_refusal, is_lasting, is_outage, is_shortage
from vectormill.db.runs.run_claims import RunClaim, end_run, fail_run, hand_back_run, hold_run, report_run
from vectormill.db.runs.runs import cancel_encoding, find_run
from vectormill.db.runs.stages import StageLost, drop_stage
from vectormill.domain.errors import LeaseLost, RunCancelled, SourceInterrupted, VectormillError
from vectormill.domain.run import (
    CANCELLED,
    CHECK,
    CHECKING,
    COMPARING,
    DELETING,
    ENCODING,
    HELD,
    INDEXING,
    READING,
    REINDEX,
    SWAPPING,
    phase_after,
    state_at_end,
)
from vectormill.models.registry import Registry
from vectormill.settings import Settings
from vectormill.tracing import span
from vectormill.work.loop import Stopping, back_off

logger = logging.getLogger(__name__)

_OUTAGE_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of every run of an indexer. `open_source` gives the reader of a run's source."""

    engine: Engine
    settings: Settings
    registry: Registry
    open_source: Callable[[RunContext], Source]
    wait: Wait


def read(context: RunContext, progress: Progress, tools: Tools) -> None:
    source = tools.open_source(context)
    target, seq = begin_reading(context, progress)
    read_source(context, progress, source, target, seq)
    context.report(READING, describe_reading(source))


def write(context: RunContext, progress: Progress, tools: Tools) -> None:
    """Write what differs; a large change is written without the vector index, which is built anew afterwards."""
    drop_before_bulk(context, progress.counts.num_new + progress.counts.num_changed)
    encode(context, progress, tools.wait)


def check(context: RunContext, progress: Progress, tools: Tools) -> None:
    """The canary of a generation that was built; or all that a run of kind check looks at."""
    if context.run.kind == REINDEX:
        check_generation(context, tools.wait)
    elif context.run.kind == CHECK:
        check_collection(context)


PHASES: Final[Mapping[str, Callable[[RunContext, Progress, Tools], None]]] = {
    READING: read,
    COMPARING: lambda context, progress, tools: compare(context, progress),
    ENCODING: write,
    DELETING: lambda context, progress, tools: delete_vanished(context, progress),
    INDEXING: lambda context, progress, tools: index(context),
    CHECKING: check,
    SWAPPING: lambda context, progress, tools: swap(context, tools.wait),
}


def carry_out(claim: RunClaim, tools: Tools, check: Callable[[], None]) -> None:
    """Carry a run out as far as it comes; `check` raises LeaseLost, RunCancelled or Stopping.

    Raises nothing but an error of the database that could not even be told of: the run's lease ends then.
    """
    progress = Progress(claim)
    try:
        run = claim.run
        with span(
            "run", run_id=str(run.id), kind_of_run=run.kind, collection=run.collection, fence=claim.fence
        ):
            _go_through(progress, tools, check)
    except LeaseLost:
        logger.warning("Run %s was lost to another indexer, which goes on with it.", claim.run.id)
    except Stopping:
        _write(tools, lambda connection: hand_back_run(connection, claim))
    except RunCancelled:
        _write(tools, lambda connection: _cancel(connection, claim, progress))
    except RunHeld as held:
        reason = str(held)
        logger.warning("Run %s of %s is held: %s", claim.run.id, claim.run.collection, reason)
        _write(tools, lambda connection: end_run(connection, claim, HELD, reason))
    except SourceInterrupted as error:
        _hand_back_failed(tools, claim, error)
    except VectormillError as error:
        _fail(tools, claim, str(error))
    except DATABASE_ERRORS as error:
        if is_lasting(error):
            _fail(tools, claim, f"Postgres refused a statement of the run: {describe_refusal(error)}.")
        else:
            _hand_back_failed(tools, claim, error)
    except Exception as error:  # noqa: BLE001 - whatever it was, the run is tried again, and ends by its attempts
        _hand_back_failed(tools, claim, error)


def _go_through(progress: Progress, tools: Tools, check: Callable[[], None]) -> None:
    phase: str | None = progress.phase
    num_outages = (
        0  # of this phase, after it had begun: Postgres was there, and was lost by what the phase does
    )
    while phase is not None:
        check()
        progress.phase = phase
        has_begun = False
        try:
            context = _make_context(progress.claim, tools, check)
            has_begun = True
            with span(phase):  # jobs that it submits are of this trace
                PHASES[phase](context, progress, tools)
            phase, num_outages = phase_after(context.run.kind, phase), 0
            if phase is not None:
                with tools.engine.begin() as connection:
                    progress.save(connection, phase=phase)
        except StageLost:
            logger.warning("Run %s reads again: Postgres lost what it had staged.", progress.claim.run.id)
            phase = READING
        except DATABASE_ERRORS as error:
            num_outages += has_begun
            if not is_outage(error) or is_shortage(error) or num_outages > tools.settings.max_attempts:
                raise
            logger.warning("Postgres cannot be reached; the run waits: %s", error)
            tools.wait(_OUTAGE_SECONDS)
    with tools.engine.begin() as connection:
        run_id = progress.claim.run.id
        if end_run(connection, progress.claim, state_at_end(progress.counts)):
            drop_stage(connection, run_id)


def _make_context(claim: RunClaim, tools: Tools, check: Callable[[], None]) -> RunContext:
    """Return the context for the next phase, with the run as the previous phase left it."""

    def report(phase: str, found: Mapping[str, Any]) -> None:
        with tools.engine.begin() as connection:
            report_run(connection, claim, phase, found)

    with tools.engine.connect() as connection:
        run = find_run(connection, claim.run.id)

    def hold(connection: Connection) -> None:
        hold_run(connection, claim)

    return RunContext(run, tools.engine, tools.settings, tools.registry, check, report, hold)


def _cancel(connection: Connection, claim: RunClaim, progress: Progress) -> None:
    run = find_run(connection, claim.run.id)
    cancel_encoding(connection, run)
    if end_run(connection, claim, CANCELLED):
        drop_stage(connection, run.id)


def _fail(tools: Tools, claim: RunClaim, reason: str) -> None:
    logger.warning("Run %s of %s failed: %s", claim.run.id, claim.run.collection, reason)

    def end(connection: Connection) -> None:
        if fail_run(connection, claim, reason):
            drop_stage(connection, claim.run.id)

    _write(tools, end)


def _hand_back_failed(tools: Tools, claim: RunClaim, error: Exception) -> None:
    pause = back_off(claim.run.attempt)
    logger.error("Run %s met an error; it is tried again in %g s.", claim.run.id, pause, exc_info=error)
    reason = f"{type(error).__name__}: {error}"[:1000]
    _write(
        tools,
        lambda connection: hand_back_run(
            connection, claim, pause_seconds=pause, error=reason, is_counted=True
        ),
    )


def _write(tools: Tools, act: Callable[[Connection], object]) -> None:
    with tools.engine.begin() as connection:
        act(connection)
