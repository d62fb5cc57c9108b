"""The context that every phase of a run works with. Knows no phase."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine

from vectormill.models.registry import Registry
from vectormill.runs.run import Run
from vectormill.settings import Settings


@dataclass(frozen=True, slots=True)
class RunContext:
    """Objects that the phases of a claimed run share.

    `check` is to be called between transactions, every few seconds at the least: it renews nothing itself, and raises
    LeaseLost when another indexer may hold the run, RunCancelled when a client wants it to end. `report` keeps what a
    phase found, under the phase's name, where status shows it. `hold` locks the run until its transaction ends, and
    raises as `check` does, from what the database says at that moment.
    """

    run: Run
    engine: Engine
    settings: Settings
    registry: Registry
    check: Callable[[], None]
    report: Callable[[str, Mapping[str, Any]], None]
    hold: Callable[[Connection], None]
