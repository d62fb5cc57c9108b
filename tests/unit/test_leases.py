"""What the keeper of leases does when things go wrong beside the database."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock
from uuid import uuid4

import pytest

from tests.protocol import SPEC
from vectormill.domain.chunk import Claim
from worker import leases
from worker.identity import WorkerIdentity
from worker.leases import Lease, LeaseKeeper


class FakeDatabase:
    @contextmanager
    def begin(self) -> Iterator[Any]:
        yield MagicMock()


def make_keeper(report: Any = dict) -> LeaseKeeper:
    identity = WorkerIdentity("fake-cpu0@test", uuid4(), uuid4(), SPEC.model, slots=4)
    return LeaseKeeper(cast(Any, FakeDatabase()), identity, report, heartbeat_seconds=0.01, lease_seconds=30)


def make_lease(chunk_id: int, fence: int) -> Lease:
    return Lease(cast(Claim, SimpleNamespace(chunk_id=chunk_id, fence=fence)))


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


def test_leases_are_renewed_though_the_report_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    renewed = threading.Semaphore(0)

    def renew(connection: Any, claims: Sequence[Claim], lease_seconds: float) -> dict[int, str]:
        renewed.release()
        return {claim.chunk_id: "running" for claim in claims}

    monkeypatch.setattr(leases, "renew_leases", renew)
    monkeypatch.setattr(leases, "beat_as", MagicMock())
    monkeypatch.setattr(leases, "delete_worker", MagicMock())
    is_broken = threading.Event()

    def report() -> dict[str, Any]:
        if is_broken.is_set():
            raise RuntimeError("dictionary changed size during iteration")
        return {}

    keeper = make_keeper(report)
    keeper.start()
    is_broken.set()
    with keeper.hold(make_lease(1, 1)):
        for _ in range(3):
            assert renewed.acquire(timeout=20), "the thread that renews has ended"
    keeper.stop()
    assert "cannot say how it does" in caplog.text
