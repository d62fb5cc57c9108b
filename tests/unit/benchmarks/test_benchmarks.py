"""The benchmarks can be asked for, and each has a file and a place in the README."""

from importlib import import_module

import pytest

from benchmarks.__main__ import make_parser
from benchmarks.harness import QUESTIONS, Harness
from benchmarks.tables import README, replace_section


def test_every_question_is_in_the_help_and_has_a_file_and_a_place_in_the_readme() -> None:
    text = README.read_text(encoding="utf-8")
    for name, question in QUESTIONS.items():
        assert f"{name:<12} {question}" in make_parser().format_help()
        assert callable(import_module(f"benchmarks.questions.{name}").run)
        assert "anew" in replace_section(text, name, "anew")


@pytest.mark.tail
def test_a_benchmark_without_a_stack_is_measured_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    report = Harness(items=2000, repeat=1).answer("submission")
    assert "items/s from the first byte to 202, 2,000 items" in report.to_markdown("today", "a machine")
    assert "submission 1 of 1" in capsys.readouterr().err
