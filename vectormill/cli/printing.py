"""Print answers on stdout: a table on a terminal, tab-separated lines elsewhere, or JSON lines."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from vectormill.client.views import ProgressView

REPORT_WIDTH: Final = 120

View = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer, and the exit code with which the command ends."""

    answer: Any
    exit_code: int


def print_answer(answer: Any, view: View | None, *, is_json: bool) -> None:
    """Print what a command returned: as JSON, one line for each record of a list, or by its view.

    Without a view, the answer is a sentence for stderr, or None. Raise typer.Exit with the exit code of an
    Outcome.
    """
    exit_code = 0
    if isinstance(answer, Outcome):
        answer, exit_code = answer.answer, answer.exit_code
    if view is None:
        if answer is not None:
            tell(answer)
    elif not is_json:
        view(answer)
    else:
        for record in answer if isinstance(answer, list | Iterator) else [answer]:
            print_json(record)
    if exit_code:
        raise typer.Exit(exit_code)


def tell(sentence: str) -> None:
    """Print a sentence on stderr, so that stdout holds results only."""
    typer.echo(sentence, err=True)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; successive lines are NDJSON."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


Column = str | tuple[str, str | Callable[[Any], Any]]


def listing(*columns: Column) -> View:
    """Return a view that shows records as a table.

    A column is the name of a field, which is also its title, or a title with a field or a function of the
    record.
    """
    pairs = [(column, column) if isinstance(column, str) else column for column in columns]

    def view(records: Iterable[Mapping[str, Any]]) -> None:
        rows = (
            [record.get(value) if isinstance(value, str) else value(record) for _, value in pairs]
            for record in records
        )
        print_table([title for title, _ in pairs], rows)

    return view


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on a terminal, and tab-separated lines of full width elsewhere."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.print(_make_table(columns, rows))
        return
    for row in rows:
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
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for row in rows:
        # Text, because Rich would read a key such as "[red]" as markup.
        table.add_row(*(Text(_plain(cell)) for cell in row))
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
