"""Table: rows of text under a header, as Markdown and for a terminal. Knows nothing of what stands in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as TerminalTable

MEASURE_HEADER = ("measure", "value", "target")


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the row; the others are numbers and stand to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.header), f"{row} has not the columns of {self.header}"

    def to_markdown(self) -> str:
        alignment = (":---", *["---:"] * (len(self.header) - 1))
        return "\n".join(_markdown_row(row) for row in (self.header, alignment, *self.rows))

    def to_terminal(self, title: str) -> TerminalTable:
        table = TerminalTable(title=title, title_justify="left")
        for number, name in enumerate(self.header):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


@dataclass(frozen=True, slots=True)
class Measure:
    """One number beside the one it is to reach; `is_met` is None where nothing was promised."""

    name: str
    value: str
    target: str = ""
    is_met: bool | None = None

    def row(self) -> tuple[str, str, str]:
        return self.name, self.value, self.target if self.is_met is None else judge(self.target, self.is_met)


def judge(target: str, is_met: bool) -> str:
    """A target and whether it was reached, in one cell."""
    return f"{target}, {'met' if is_met else '**missed**'}"


def tabulate(measures: Sequence[Measure]) -> Table:
    """One row per measure."""
    return Table(MEASURE_HEADER, tuple(measure.row() for measure in measures))


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
