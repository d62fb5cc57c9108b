"""Spreads of repeated measurements, the units they are written in, and tables as Markdown and for a terminal."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rich.table import Table as TerminalTable

README: Final = Path(__file__).resolve().parent / "README.md"
MIB: Final = 1 << 20
NOT_MEASURED: Final = "not measured"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measurement: how a value is formatted, and by `write_bound` the bound that it has to keep."""

    write: Callable[[float], str]
    write_bound: Callable[[float], str]

    def __call__(self, value: "float | Spread") -> str:
        """Format a value, or a median with its extremes where these look different when formatted."""
        if not isinstance(value, Spread):
            return self.write(value)
        median, low, high = self.write(value.median), self.write(value.low), self.write(value.high)
        return median if low == high else f"{median} ({low} to {high})"


def write_number(value: float) -> str:
    """Format a number with three significant digits and thousands separators: 0.512, 9.87, 48.1, 1,234."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3g}"


NUMBER: Final = Unit(write_number, lambda bound: f"{bound:,g}")
SECONDS: Final = Unit(lambda value: f"{write_number(value)} s", lambda bound: f"{bound:g} s")
RATIO: Final = Unit(lambda value: f"{value:.2f}×", lambda bound: f"{bound:g}×")
# Shares read 41.3%, and 0.07% below one percent.
SHARE: Final = Unit(
    lambda value: f"{value:.1%}" if abs(value) >= 0.01 else f"{value:.2%}",
    lambda bound: f"{100 * bound:g}%",
)
# Six digits, so that 0.9999 and 0.99995 differ.
COSINE: Final = Unit(lambda value: f"{value:.6f}", lambda bound: f"{bound:g}")
MEBIBYTES: Final = Unit(lambda value: f"{value / MIB:,.0f} MiB", lambda bound: f"{bound / 1e6:g} MB")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the smallest and the largest of repeated values. Three repetitions allow nothing finer."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of these values. Raise ValueError when there is none."""
        if not values:
            raise ValueError("a spread needs at least one measurement")
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def of_ratios(cls, values: Sequence[float], others: Sequence[float]) -> Self:
        """Return the spread of ratios of values that were measured side by side in the same repetition."""
        return cls.of([value / other for value, other in zip(values, others, strict=True)])


def find_percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest measured value that `percent` percent of all do not exceed (nearest rank)."""
    if not values:
        raise ValueError("a percentile needs at least one measurement")
    return sorted(values)[max(1, math.ceil(len(values) * percent / 100)) - 1]


@dataclass(frozen=True, slots=True)
class Table:
    """A table whose first column names the row; the other columns are numbers, aligned to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.header), f"{row} does not have the columns of {self.header}"

    def to_markdown(self) -> str:
        alignment = (":---", *["---:"] * (len(self.header) - 1))
        lines = (self.header, alignment, *self.rows)
        return "\n".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
        )

    def to_terminal(self, title: str) -> TerminalTable:
        table = TerminalTable(title=title, title_justify="left")
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


Measure = tuple[str, str, str]  # name, value, target


def told(name: str, value: float | Spread, unit: Unit) -> Measure:
    """Return a measure without a target."""
    return name, unit(value), ""


def at_least(name: str, value: float | Spread, bound: float, unit: Unit) -> Measure:
    """Return a measure whose median must reach the bound."""
    median = value.median if isinstance(value, Spread) else value
    return name, unit(value), judge(f"≥ {unit.write_bound(bound)}", median >= bound)


def at_most(name: str, value: float | Spread, bound: float, unit: Unit) -> Measure:
    """Return a measure whose median must not exceed the bound."""
    median = value.median if isinstance(value, Spread) else value
    return name, unit(value), judge(f"≤ {unit.write_bound(bound)}", median <= bound)


def judge(target: str, is_met: bool) -> str:
    """Return a cell with a target and whether it was reached."""
    return f"{target}, {'met' if is_met else '**missed**'}"


def tabulate(measures: Sequence[Measure]) -> Table:
    """Return one row per measure."""
    return Table(("measure", "value", "target"), tuple(measures))


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one benchmark: a line on its subject, tables, and notes on how it was measured."""

    subject: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self, date: str, facts: str) -> str:
        """Return the report as its section of the README; `facts` is a line about the machine."""
        parts = [f"{date}: {self.subject}", facts, *(table.to_markdown() for table in self.tables)]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts)


def opening_marker(name: str) -> str:
    return f"<!-- {name}: written by --write -->"


def closing_marker(name: str) -> str:
    return f"<!-- end of {name} -->"


def replace_section(text: str, name: str, content: str) -> str:
    """Replace the content between the markers of one benchmark in a text.

    Raise ValueError without markers.
    """
    opening, closing = opening_marker(name), closing_marker(name)
    before, has_opening, rest = text.partition(opening)
    _, has_closing, after = rest.partition(closing)
    if not has_opening or not has_closing:
        raise ValueError(f"The README has no section for {name}: it needs the lines {opening} and {closing}.")
    return f"{before}{opening}\n\n{content.strip()}\n\n{closing}{after}"
