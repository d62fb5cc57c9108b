"""Who is encoded together, and who alone."""

import threading
from contextlib import ExitStack

import pytest

from tests.waiting import wait_for
from worker.chunk.leases import Quarantine
from worker.engine.request import EncodingCancelled

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
