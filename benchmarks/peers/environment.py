"""Environments of peers, made once from pinned requirements. Knows nothing of what runs in them."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.order import BenchmarkFailed

ROOT: Final = Path(__file__).resolve().parents[2]
# Beside the code and not tracked: an environment is a gigabyte, and shall outlive one run.
HOME: Final = ROOT / ".bench"
REQUIREMENTS: Final = Path(__file__).resolve().parent
TEXTS: Final = "texts"
STAMP: Final = ".installed"
INSTALL_SECONDS: Final = 1800.0
SHOWN_CHARS: Final = 300


def prepare_environment(name: str, home: Path = HOME, requirements: Path = REQUIREMENTS) -> Path:
    """The Python of an environment with what NAME.txt pins, made anew when that has changed.

    Raises BenchmarkFailed with pip's last words when it cannot be installed.
    """
    directory, pins = home / name, requirements / f"{name}.txt"
    python = directory / "bin" / "python"
    if not is_prepared(name, home, requirements):
        shutil.rmtree(directory, ignore_errors=True)
        _run(name, [sys.executable, "-m", "venv", str(directory)])
        # Without dependencies: the pins are complete, and some leave out what a package names and never needs here.
        _run(name, [*_pip(python), "--no-deps", "--requirement", str(pins)])
        _stamp(directory, pins)
    return python


def is_prepared(name: str, home: Path = HOME, requirements: Path = REQUIREMENTS) -> bool:
    """Whether the environment is there with what is pinned now."""
    return _is_current(home / name, requirements / f"{name}.txt")


def prepare_texts(home: Path = HOME, requirements: Path = REQUIREMENTS) -> Path:
    """The directory of packages that are read and never imported. Raises BenchmarkFailed as above."""
    directory, pins = home / TEXTS, requirements / f"{TEXTS}.txt"
    if not _is_current(directory, pins):
        shutil.rmtree(directory, ignore_errors=True)
        target = ["--target", str(directory), "--no-deps", "--no-compile"]
        _run(TEXTS, [*_pip(Path(sys.executable)), *target, "--requirement", str(pins)])
        _stamp(directory, pins)
    return directory


def _pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]


def _run(name: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkFailed(f"The environment {name} could not be made: {error}.") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        # Hints may follow an error, and warnings come before it.
        words = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise BenchmarkFailed(f"The environment {name} could not be made: {words[:SHOWN_CHARS].rstrip('.')}.")


def _is_current(directory: Path, pins: Path) -> bool:
    stamp = directory / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == _digest(pins)


def _stamp(directory: Path, pins: Path) -> None:
    (directory / STAMP).write_text(_digest(pins), encoding="utf-8")


def _digest(pins: Path) -> str:
    """Of the pins and of this Python, which an environment is bound to."""
    return hashlib.sha256(pins.read_bytes() + sys.version.encode()).hexdigest()
