"""A backend whose load fails, hangs or ends its process is left for the next one, and the report says why."""

import pytest

from tests.faulty_engine import MakeEngine, encode
from vectormill.domain.errors import ModelError

FACTORIES = "tests.deadly_backends:"


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
    engine = make_engine(FACTORIES + factory, model_load_timeout_seconds=seconds)
    engine.start()
    assert not encode(engine, ["fine"]).failures
    report = engine._executor.report
    assert report is not None
    assert report.backend.value == "SoundEncoder"
    assert reason in report.backend.reason
    assert len(report.notes) == 1
    assert reason in report.notes[0]


def test_a_model_that_no_backend_loads_is_refused_with_the_reason_of_each(make_engine: MakeEngine) -> None:
    engine = make_engine(FACTORIES + "load_with_no_sound_backend")
    with pytest.raises(ModelError, match=r"cannot be loaded, because .*SIGFPE.*; fail cannot run this model"):
        engine.start()


def test_a_backend_whose_process_was_ended_by_somebody_else_is_not_blamed(make_engine: MakeEngine) -> None:
    engine = make_engine(FACTORIES + "load_ended_from_outside")
    with pytest.raises(ModelError, match="SIGTERM"):
        engine.start()
