"""Tests of lease renewal when something other than the database fails, and of quarantine."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock
from uuid import uuid4

import pytest

from tests.protocol import SPEC
from tests.waiting import wait_for
from vectormill.jobs.chunk import Claim
from worker.chunk import leases
from worker.chunk.leases import ChunkLease, LeaseKeeper, Quarantine
from worker.engine.request import EncodingCancelled
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
    assert caplog.text.count("is not responding") == 1
    reports.make()
    assert reports.latest() == {"made_at": 75.0}


NEVER = threading.Event()


class Visit:
    """Somebody who goes in on a thread of its own and stays until told to leave."""

    def __init__(self, quarantine: Quarantine, *, is_suspect: bool) -> None:
        self.is_inside, self.leaving = threading.Event(), threading.Event()
        self.cancelled, self.was_cancelled = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(quarantine, is_suspect), daemon=True)
        self._thread.start()

    def _run(self, quarantine: Quarantine, is_suspect: bool) -> None:
        try:
            with quarantine.enter(self.cancelled, is_suspect=is_suspect):
                self.is_inside.set()
                assert self.leaving.wait(60)
        except EncodingCancelled:
            self.was_cancelled.set()

    def leave(self) -> None:
        self.leaving.set()
        self._thread.join(60)


def test_chunks_without_a_loss_are_encoded_together() -> None:
    quarantine = Quarantine()
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(quarantine.enter(NEVER, is_suspect=False))


def test_a_suspect_waits_until_it_is_alone_and_nobody_joins_it() -> None:
    quarantine = Quarantine()
    first = Visit(quarantine, is_suspect=False)
    assert first.is_inside.wait(60)
    suspect = Visit(quarantine, is_suspect=True)
    wait_for(lambda: quarantine._is_closed, because="the suspect stands at the door")
    later, other_suspect = Visit(quarantine, is_suspect=False), Visit(quarantine, is_suspect=True)
    assert not suspect.is_inside.is_set()
    first.leave()
    assert suspect.is_inside.wait(60)
    assert not later.is_inside.is_set()
    assert not other_suspect.is_inside.is_set()
    suspect.leave()
    for visit in (later, other_suspect):  # in whichever order
        visit.leaving.set()
    assert later.is_inside.wait(60)
    assert other_suspect.is_inside.wait(60)


@pytest.mark.parametrize("is_suspect", [True, False])
def test_whoever_is_cancelled_at_the_door_keeps_nobody_out(is_suspect: bool) -> None:
    quarantine = Quarantine()
    inside = Visit(quarantine, is_suspect=not is_suspect)
    assert inside.is_inside.wait(60)
    waiting = Visit(quarantine, is_suspect=is_suspect)
    waiting.cancelled.set()
    assert waiting.was_cancelled.wait(60)
    inside.leave()
    with quarantine.enter(NEVER, is_suspect=True):
        pass
