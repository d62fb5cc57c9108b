"""A backend whose load fails, hangs or ends its process is left for the next one, and the report says why."""

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import pytest

from tests.faulty_engine import FaultyEncoder, MakeEngine, encode
from vectormill.domain.errors import ModelError
from worker.devices.backends import Backend
from worker.encoder import backends
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


def _load(order: EncoderOrder, loaders: Sequence[str]) -> object:
    """Load with a table of these backends, named after what they do."""
    table = {name: Backend(name, "numpy", f"{__name__}:{name}", True) for name in loaders}
    vars(backends)["BACKENDS"] = table
    return backends.load_encoder(order)


load_after_a_signal = partial(_load, loaders=("end_by_signal", "SoundEncoder"))
load_after_an_error = partial(_load, loaders=("fail", "SoundEncoder"))
load_after_a_hang = partial(_load, loaders=("hang", "SoundEncoder"))
load_with_no_sound_backend = partial(_load, loaders=("end_by_signal", "fail"))
load_ended_from_outside = partial(_load, loaders=("end_from_outside", "SoundEncoder"))


@pytest.mark.parametrize(
    ("factory", "reason", "seconds"),
    [
        ("load_after_a_signal", "SIGFPE", 600.0),
        ("load_after_an_error", "the compiler met a shape that it does not know", 600.0),
        ("load_after_a_hang", "loading took more than 5 s", 5.0),
    ],
)
def test_a_backend_that_cannot_load_is_left_for_the_next_one_with_the_reason_in_the_report(
    make_engine: MakeEngine, factory: str, reason: str, seconds: float
) -> None:
    engine = make_engine(f"{__name__}:{factory}", model_load_timeout_seconds=seconds)
    engine.start()
    assert not encode(engine, ["fine"]).failures
    report = engine._executor.report
    assert report is not None
    assert report.backend.value == "SoundEncoder"
    assert reason in report.backend.reason
    assert len(report.notes) == 1
    assert reason in report.notes[0]


def test_a_model_that_no_backend_loads_is_refused_with_the_reason_of_each(make_engine: MakeEngine) -> None:
    engine = make_engine(f"{__name__}:load_with_no_sound_backend")
    with pytest.raises(ModelError, match=r"Cannot load .*: .*SIGFPE.*; fail cannot run this model"):
        engine.start()


def test_a_backend_whose_process_was_ended_by_somebody_else_is_not_blamed(make_engine: MakeEngine) -> None:
    engine = make_engine(f"{__name__}:load_ended_from_outside")
    with pytest.raises(ModelError, match="SIGTERM"):
        engine.start()
