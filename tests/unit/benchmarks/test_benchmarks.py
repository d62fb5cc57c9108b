"""The benchmarks can be asked for, and each has a place in the README."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.results.readme import README, replace_section
from benchmarks.suite import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_named_in_the_help_and_has_a_place_in_the_readme(name: str) -> None:
    assert name in CliRunner().invoke(app, [name, "--help"]).output
    assert "anew" in replace_section(README.read_text(encoding="utf-8"), name, "anew")
