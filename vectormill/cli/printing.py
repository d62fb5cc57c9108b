"""Print answers on stdout: a table on a terminal, tab-separated lines elsewhere, or JSON lines."""

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vectormill.client.progress import ProgressView

REPORT_WIDTH: Final = 120
# The first column names the record. Up to the length of a UUID it keeps its width, and other columns give way.
NAME_WIDTH: Final = 36

View = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer, and the exit code with which the command ends; on stderr if the results themselves are on stdout."""

    answer: Any
    exit_code: int
    is_aside: bool = False


def print_answer(answer: Any, view: View | None, *, is_json: bool) -> None:
    """Print what a command returned: as JSON, one line for each record of a list, or by its view.

    Without a view, the answer is a sentence for stderr, or None. Raise typer.Exit with the exit code of an
    Outcome.
    """
    outcome = answer if isinstance(answer, Outcome) else Outcome(answer, 0)
    answer = outcome.answer
    with redirect_stdout(sys.stderr if outcome.is_aside else sys.stdout):
        if view is None:
            if answer is not None:
                tell(answer)
        elif not is_json:
            view(answer)
        else:
            for record in answer if isinstance(answer, list | Iterator) else [answer]:
                print_json(record)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def tell(sentence: str) -> None:
    """Print a sentence on stderr, so that stdout holds results only."""
    typer.echo(sentence, err=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; successive lines are NDJSON."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


Column = str | tuple[str, str | Callable[[Any], Any]]


def listing(*columns: Column) -> View:
    """Return a view that shows records as a table."""
    return lambda records: print_table(*tabulate(columns, records))


def tabulate(
    columns: Sequence[Column], records: Iterable[Mapping[str, Any]]
) -> tuple[list[str], Iterator[list[Any]]]:
    """Return the titles and the rows of records in a table.

    A column is the name of a field, which is also its title, or a title with a field or a function of the
    record.
    """
    pairs = [(column, column) if isinstance(column, str) else column for column in columns]
    rows = (
        [record.get(value) if isinstance(value, str) else value(record) for _, value in pairs]
        for record in records
    )
    return [title for title, _ in pairs], rows


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on a terminal, and tab-separated lines of full width elsewhere; a single column has no title."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        table = _make_table(columns, rows)
        table.padding = (0, 1, 0, 0)
        console.print(table)
        return
    rows = iter(rows)
    first = list(itertools.islice(rows, 1))  # an error comes before the titles
    for row in itertools.chain([columns] if len(columns) > 1 and any(columns) else [], first, rows):
        sys.stdout.write("\t".join(_plain(cell) for cell in row) + "\n")


def print_facts(facts: Iterable[tuple[str, Any]]) -> None:
    """Print names and values; empty values are left out."""
    print_table(("", ""), [(name, value) for name, value in facts if value not in (None, "", {}, [])])


def print_report(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table with a title, in the same form on a terminal and in a log."""
    from rich.text import Text

    console = make_report_console()
    console.print(Text(f"\n{title}", style="bold"))
    console.print(_make_table(columns, rows))


def make_report_console() -> "Console":
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=REPORT_WIDTH)


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> "Table":
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    # Text, because Rich would read a key such as "[red]" as markup. What is too wide is folded and not cut.
    for title in columns:
        table.add_column(Text(title, overflow="fold"), overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(_plain(cell)) for cell in row))
    longest = max(map(cell_len, map(str, table.columns[0].cells)), default=0)
    table.columns[0].width = longest if longest <= NAME_WIDTH else None
    return table


def _plain(cell: Any) -> str:
    text = "" if cell is None else str(cell)
    return " ".join(text.split()) if any(character in text for character in "\t\n\r") else text


def follow(
    wait: Callable[..., Any], identifier: str, look_at: "Callable[[Mapping[str, Any]], ProgressView]"
) -> Any:
    """Show the progress of a job or run until it ends, and return the ended job or run."""
    from vectormill.client.progress import Progress

    with Progress(look_at) as progress:
        return wait(identifier, progress)
