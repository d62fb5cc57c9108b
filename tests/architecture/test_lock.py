"""Every version that the lock names can be installed with the oldest Python that the project promises."""

import tomllib
from importlib.metadata import metadata

import pytest
from packaging.specifiers import SpecifierSet

from tests.architecture.sources import ROOT

LOCKED = [
    line.split("==")[0]
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    if "==" in line and not line.startswith("#")
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLDEST = PROJECT["requires-python"].removeprefix(">=") + ".0"


@pytest.mark.parametrize("name", LOCKED)
def test_a_locked_version_takes_the_oldest_python(name: str) -> None:
    assert OLDEST in SpecifierSet(metadata(name)["Requires-Python"] or "")
