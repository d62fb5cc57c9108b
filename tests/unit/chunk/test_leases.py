"""What the keeper of leases does when things go wrong beside the database."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock
from uuid import uuid4

import pytest

from tests.protocol import SPEC
from vectormill.jobs.chunks.chunk import Claim
from worker.chunk import leases
from worker.chunk.leases import ChunkLease, LeaseKeeper
from worker.identity import WorkerIdentity
from worker.report import ReportMaker


class FakeDatabase:
    @contextmanager
    def begin(self) -> Iterator[Any]:
        yield MagicMock()


def make_keeper(report: Any = dict) -> LeaseKeeper:
    identity = WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), SPEC.model, slots=4)
    return LeaseKeeper(cast(Any, FakeDatabase()), identity, report, heartbeat_seconds=0.01, lease_seconds=30)


def make_lease(chunk_id: int, fence: int) -> ChunkLease:
    return ChunkLease(cast(Claim, SimpleNamespace(chunk_id=chunk_id, fence=fence)))


def test_a_worker_that_claims_its_own_lapsed_chunk_keeps_the_second_lease_and_ends_the_first() -> None:
    keeper = make_keeper()
    first, second, other = make_lease(1, 1), make_lease(1, 2), make_lease(2, 1)
    with keeper.hold(other):
        holding_first = keeper.hold(first)
        holding_first.__enter__()
        with keeper.hold(second):
            assert first.ended.is_set()
            assert first.is_lost
            holding_first.__exit__(None, None, None)
            assert keeper.num_held == 2, "the second lease is renewed no more"
            assert not second.ended.is_set()
        assert keeper.num_held == 1
        assert not other.ended.is_set()
    assert keeper.num_held == 0


def hang() -> dict[str, Any]:
    threading.Event().wait(60)
    raise AssertionError("nobody waits for a driver that hangs")


def fail() -> dict[str, Any]:
    raise RuntimeError("dictionary changed size during iteration")


@pytest.mark.parametrize("broken", [hang, fail])
def test_leases_are_renewed_and_signs_of_life_given_though_no_report_can_be_made(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[], dict[str, Any]]
) -> None:
    renewed, beaten = threading.Semaphore(0), threading.Semaphore(0)
    sent: list[Mapping[str, Any]] = []

    def renew(connection: Any, claims: Sequence[Claim], lease_seconds: float) -> dict[int, str]:
        renewed.release()
        return {claim.chunk_id: "running" for claim in claims}

    def beat(connection: Any, identity: WorkerIdentity, report: Mapping[str, Any]) -> bool:
        sent.append(report)
        beaten.release()
        return True

    monkeypatch.setattr(leases, "renew_leases", renew)
    monkeypatch.setattr(leases, "beat_as", beat)
    monkeypatch.setattr(leases, "delete_worker", MagicMock())
    answers: Iterator[Callable[[], dict[str, Any]]] = iter([lambda: {"state": "ready"}])
    reports = ReportMaker(lambda: next(answers, broken)(), 0.01)
    reports.make()
    keeper = make_keeper(reports.latest)
    reports.start()
    keeper.start()
    with keeper.hold(make_lease(1, 1)):
        for _ in range(3):
            assert renewed.acquire(timeout=60), "the thread that renews waits for the report"
            assert beaten.acquire(timeout=60), "the thread that gives signs of life waits for the report"
    keeper.stop()
    reports.stop()
    assert sent[-1] == {"state": "ready"}


def test_a_report_that_grows_old_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    reports = ReportMaker(lambda: {"made_at": now[0]}, 5, clock=lambda: now[0])
    reports.make()
    for now[0] in (30.0, 70.0, 75.0):
        assert reports.latest() == {"made_at": 0.0}
    assert caplog.text.count("does not answer") == 1
    reports.make()
    assert reports.latest() == {"made_at": 75.0}
