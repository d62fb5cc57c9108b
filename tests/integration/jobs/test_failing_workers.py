"""A worker that cannot load its model says so where people look, and is given nothing to do."""

from collections.abc import Callable, Iterator
from typing import cast
from uuid import uuid4

import pytest
from sqlalchemy import Engine

from tests.protocol import SPEC, make_items, submit
from tests.waiting import wait_for
from vectormill.db.chunks.dispatch import list_rooms
from vectormill.db.jobs.waiting import explain_waits
from vectormill.db.workers import ALIVE_SECONDS, count_failing_workers, count_workers
from vectormill.domain.errors import ModelError
from worker.app import start_engine
from worker.engine.engine import Engine as LoadedEngine
from worker.identity import FailureNotice, WorkerIdentity

REASON = "openvino cannot run this model: the model process was ended by SIGFPE"
IDENTITY = WorkerIdentity("fake-cpu0@host", uuid4(), uuid4(), SPEC.model, 16)


class BrokenEngine:
    """Stands for an engine whose model is loaded at the third try."""

    def __init__(self, number: int) -> None:
        self._number = number

    def start(self) -> None:
        if self._number < 3:
            raise ModelError(REASON)

    def report(self) -> dict[str, object]:
        pooling, revision = SPEC.pooling, SPEC.revision
        return {"state": "dead", "state_reason": REASON, "pooling": pooling, "revision": revision}


@pytest.fixture
def notice(engine: Engine) -> Iterator[FailureNotice]:
    notice = FailureNotice(engine, IDENTITY, 0.05)
    yield notice
    notice.end()


def test_a_job_waits_with_the_reason_why_no_worker_can_load_its_model(
    engine: Engine, notice: FailureNotice
) -> None:
    job = submit(engine, make_items(2))
    notice.tell(BrokenEngine(1).report())

    def explain() -> str | None:
        with engine.connect() as connection:
            reason = explain_waits(connection, [job])[job.id]
        return reason if REASON in reason else None

    assert f"fake-cpu0@host is dead ({REASON})" in wait_for(explain)
    with engine.connect() as connection:
        assert count_workers(connection) == {}
        assert count_failing_workers(connection) == 1
        assert list_rooms(connection, ALIVE_SECONDS) == []


def test_a_model_that_is_not_loaded_is_tried_again_after_growing_pauses(notice: FailureNotice) -> None:
    made: list[BrokenEngine] = []
    pauses: list[float] = []

    def make() -> BrokenEngine:
        made.append(BrokenEngine(len(made) + 1))
        return made[-1]

    start_engine(cast(Callable[[], LoadedEngine], make), notice, pauses.append)
    assert len(made) == 3
    assert pauses == [30.0, 60.0]
