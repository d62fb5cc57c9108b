"""docs/core.tsv: the tests of the core, what each costs, and the mutants that it kills.

`tests/conftest.py` gives the tests named there the mark `core`, and `python -m tests.core choose` writes it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TABLE: Final = Path(__file__).resolve().parents[2] / "docs" / "core.tsv"
COLUMNS: Final = ("test", "seconds", "mutants")
SEPARATOR: Final = "; "


@dataclass(frozen=True, slots=True)
class CoreTest:
    """A test of the core, its processor seconds, and the names of the mutants of which it is the killer."""

    test: str
    seconds: float
    mutants: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.test.partition("::")[0]


def read_table() -> dict[str, CoreTest]:
    """Return the rows by test, none if there is no table yet."""
    if not TABLE.exists():
        return {}
    rows = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
        test, seconds, *mutants = line.split("\t")
        rows[test] = CoreTest(test, float(seconds), tuple(mutants[0].split(SEPARATOR)) if mutants else ())
    return rows


def count_by_file(rows: Iterable[CoreTest]) -> dict[str, float]:
    """Return file -> the processor seconds of its tests."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.file] = seconds.get(row.file, 0.0) + row.seconds
    return seconds


def write_table(rows: Iterable[CoreTest]) -> None:
    lines = ["\t".join(COLUMNS)]
    for row in sorted(rows, key=lambda each: each.test):
        mutants = [SEPARATOR.join(sorted(row.mutants))] if row.mutants else []
        lines.append("\t".join([row.test, f"{row.seconds:.2f}", *mutants]))
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
