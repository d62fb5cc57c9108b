"""The lock names, for every package, a version that the oldest promised Python takes, and the hashes of its files."""

import re
import tomllib
from importlib.metadata import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.architecture.sources import ROOT

LOCKED = re.findall(
    r"^(\S+==[^\\\n]+?) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)",
    (ROOT / "requirements.lock").read_text(encoding="utf-8"),
    re.MULTILINE,
)
REQUIREMENTS = [Requirement(line) for line, _ in LOCKED]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLDEST = PROJECT["requires-python"].removeprefix(">=") + ".0"


def test_every_package_of_the_lock_has_hashes_and_nothing_else_stands_there() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith(("#", "    --hash"))]
    assert len(lines) == len(LOCKED) > 200
    assert "://" not in text, "the index is whichever pip is configured for"


def test_the_lock_leaves_the_build_of_torch_to_the_machine() -> None:
    names = {requirement.name for requirement in REQUIREMENTS}
    assert not {name for name in names if name.startswith(("torch", "triton", "nvidia-c", "cuda-"))}
    assert {"filelock", "sympy", "networkx"} <= names, "what every build of torch needs"


def test_locked_versions_take_the_oldest_python() -> None:
    here = [one for one in REQUIREMENTS if one.marker is None or one.marker.evaluate()]
    refused = [
        one.name for one in here if OLDEST not in SpecifierSet(metadata(one.name)["Requires-Python"] or "")
    ]
    assert len(here) > 200
    assert refused == []
