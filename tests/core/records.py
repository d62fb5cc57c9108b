"""What the recorder wrote: the seconds of each test, and the lines of the product that its processes ran."""

import json
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

import coverage

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "build" / "core"
SETTINGS: Final = Path(__file__).parent / "coverage.ini"
# Tests of a running service and of the console are never of the core: their files share one service or browser.
FOLDERS: Final = ("acceptance", "architecture", "contract", "docs", "integration", "integrations", "unit")
TESTS: Final = tuple(f"tests/{name}" for name in FOLDERS)


def list_tests() -> set[str]:
    """Return the tests that there are, slow ones too."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *TESTS]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {line for line in found.stdout.splitlines() if line.startswith("tests/") and "::" in line}


def read_seconds() -> dict[str, float]:
    """Return test -> processor seconds, of the latest record of each test that passed."""
    found = {}
    for path in sorted(FOLDER.glob("costs.*.json"), key=lambda each: each.stat().st_mtime):
        found.update(json.loads(path.read_text(encoding="utf-8")))
    return found


def read_lines() -> dict[str, dict[str, int]]:
    """Return test -> file of the product -> a number whose bit N is set if the test ever ran line N of the file.

    The schema of coverage's files is public: https://coverage.readthedocs.io/en/latest/dbschema.html
    """
    data = FOLDER / "lines"
    if any(FOLDER.glob("lines.*")):
        recorded = coverage.Coverage(data_file=str(data), config_file=str(SETTINGS))
        if data.exists():
            recorded.load()
        recorded.combine()
        recorded.save()
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    query = """
        SELECT context.context, file.path, line_bits.numbits
        FROM line_bits JOIN file ON file.id = file_id JOIN context ON context.id = context_id
        WHERE context.context LIKE 'tests/%'
    """
    with sqlite3.connect(data) as database:
        for test, path, numbits in database.execute(query):
            found[test][str(Path(path).relative_to(ROOT))] |= int.from_bytes(numbits, "little")
    return found
