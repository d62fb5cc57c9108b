"""docs/core.tsv: the tests of the core, what each costs, and the mutants that it kills.

`tests/conftest.py` gives the tests named there the mark `core`, and `python -m tests.core choose` writes it.
"""

import csv
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
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {
            row["test"]: CoreTest(
                row["test"], float(row["seconds"]), tuple(filter(None, row["mutants"].split(SEPARATOR)))
            )
            for row in csv.DictReader(file, delimiter="\t")
        }


def count_by_file(rows: Iterable[CoreTest]) -> dict[str, float]:
    """Return file -> the processor seconds of its tests."""
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[row.file] = seconds.get(row.file, 0.0) + row.seconds
    return seconds


def write_table(rows: Iterable[CoreTest]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in sorted(rows, key=lambda each: each.test):
            writer.writerow((row.test, f"{row.seconds:.2f}", SEPARATOR.join(sorted(row.mutants))))
