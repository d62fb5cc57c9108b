"""What the recorder wrote: the seconds of each test, and the lines of the product that its processes ran."""

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Final

import coverage

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "build" / "core"
SETTINGS: Final = Path(__file__).parent / "coverage.ini"


def read_seconds() -> dict[str, float]:
    """Return test -> processor seconds; a file that was recorded again has only the tests it had then."""
    found: dict[str, float] = {}
    for path in sorted(FOLDER.glob("costs.*.jsonl"), key=lambda each: each.stat().st_mtime):
        costs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        again = {cost["test"].partition("::")[0] for cost in costs}
        found = {test: seconds for test, seconds in found.items() if test.partition("::")[0] not in again}
        found |= {cost["test"]: cost["seconds"] for cost in costs}
    return found


def read_lines() -> dict[str, dict[str, int]]:
    """Return test -> file of the product -> a number whose bit N is set if the test ran line N of the file.

    The schema of coverage's files is public: https://coverage.readthedocs.io/en/latest/dbschema.html
    """
    if any(FOLDER.glob("lines.*")):
        recorded = coverage.Coverage(config_file=str(SETTINGS))
        if (FOLDER / "lines").exists():
            recorded.load()
        recorded.combine()
        recorded.save()
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    query = """
        SELECT context.context, file.path, line_bits.numbits
        FROM line_bits JOIN file ON file.id = file_id JOIN context ON context.id = context_id
        WHERE context.context LIKE 'tests/%'
    """
    with sqlite3.connect(FOLDER / "lines") as database:
        for test, path, numbits in database.execute(query):
            found[test][str(Path(path).relative_to(ROOT))] |= int.from_bytes(numbits, "little")
    return found
