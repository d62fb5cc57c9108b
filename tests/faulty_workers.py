"""Workers for tests that are proven from time to time, and the mender's rounds, page by page.

A faulty worker computes the opposite of each vector (protocol.results_of), until a bad proof ends its process. Until
then it is alive for longer than any test.
"""

from itertools import chain, repeat
from unittest.mock import patch
from uuid import UUID, uuid4

from sqlalchemy import Engine

from scheduler import reaper
from scheduler.reaper import Recomputer
from tests.database import ask, execute
from tests.protocol import SPEC, register_worker
from vectormill.workers.proofs import begin_period, fail_period, list_unrepaired_periods, prove_period


class ProvenWorker:
    """A worker's process, and its current period between two proofs; the process that follows it has its name."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._start(is_faulty=False)

    def _start(self, *, is_faulty: bool) -> None:
        self.incarnation: UUID = uuid4()
        register_worker(self._engine, name=self._name, incarnation=self.incarnation)
        execute(
            self._engine,
            "UPDATE vectormill.workers SET heartbeat_at = now() + interval '1 day' WHERE name = :name",
            name=self._name,
        )
        self._begin(is_faulty=is_faulty)

    def _begin(self, *, is_faulty: bool) -> None:
        self.period = ask(self._engine, begin_period, self._name, self.incarnation, SPEC.model, {})
        self.is_faulty = is_faulty

    def prove(self, *, is_faulty: bool) -> bool:
        """End the period by a proof, and begin the next one, which is faulty or not. Return whether the proof was good.

        After a bad one the process is gone, and another one goes on.
        """
        if not self.is_faulty:
            ask(self._engine, prove_period, self.period)
            self._begin(is_faulty=is_faulty)
            return True
        ask(self._engine, fail_period, self.period, "its vectors are the opposite of what they should be")
        execute(self._engine, "DELETE FROM vectormill.workers WHERE name = :name", name=self._name)
        self._start(is_faulty=is_faulty)
        return False


def mend_pages(engine: Engine, current: Recomputer, num_pages: int) -> bool:
    """Let a round of the mender's read so many pages of two chunks. Return whether a period is left to be repaired."""
    clock = chain(repeat(0.0, 1 + num_pages), repeat(1.0))
    with patch.object(reaper, "PAGE_CHUNKS", 2), patch.object(reaper, "time") as time:
        time.monotonic.side_effect = lambda: next(clock)
        current.recompute()
    return bool(ask(engine, list_unrepaired_periods))
