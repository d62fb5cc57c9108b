"""Backends that end their process, raise or hang while they load, for engines that have to go on to the next one."""

import os
import signal
import time
from typing import NoReturn

from tests.faulty_engine import FaultyEncoder
from worker.encoder import backends
from worker.encoder.backends import Backend
from worker.encoder.encoder import Choice, EncoderOrder, EncoderReport

Notes = tuple[str, ...]


class SoundEncoder(FaultyEncoder):
    """Reports the backend that was chosen, and what was left before it."""

    def __init__(self, order: EncoderOrder, choice: Choice, precision: Choice, notes: Notes) -> None:
        super().__init__(order)
        self._choice, self._notes = choice, notes

    def describe(self) -> EncoderReport:
        return EncoderReport(self._choice, self._choice, self._choice, "none", 1, 0.0, self._notes)


def end_by_signal(order: EncoderOrder, choice: Choice, precision: Choice, notes: Notes) -> NoReturn:
    os.kill(os.getpid(), signal.SIGFPE)
    raise AssertionError("the signal ends the process")


def end_from_outside(order: EncoderOrder, choice: Choice, precision: Choice, notes: Notes) -> NoReturn:
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal ends the process")


def fail(order: EncoderOrder, choice: Choice, precision: Choice, notes: Notes) -> NoReturn:
    raise RuntimeError("the compiler met a shape that it does not know")


def hang(order: EncoderOrder, choice: Choice, precision: Choice, notes: Notes) -> NoReturn:
    time.sleep(3600)  # the hang itself: the engine has to end it
    raise AssertionError("the engine ends it")


def _load(order: EncoderOrder, *loaders: str) -> object:
    """Load with a table of these backends, named after what they do."""
    table = {name: Backend(name, "numpy", f"tests.deadly_backends:{name}", True) for name in loaders}
    vars(backends)["BACKENDS"] = table
    return backends.load_encoder(order)


def load_after_a_signal(order: EncoderOrder) -> object:
    return _load(order, "end_by_signal", "SoundEncoder")


def load_after_an_error(order: EncoderOrder) -> object:
    return _load(order, "fail", "SoundEncoder")


def load_after_a_hang(order: EncoderOrder) -> object:
    return _load(order, "hang", "SoundEncoder")


def load_with_no_sound_backend(order: EncoderOrder) -> object:
    return _load(order, "end_by_signal", "fail")


def load_ended_from_outside(order: EncoderOrder) -> object:
    return _load(order, "end_from_outside", "SoundEncoder")
