"""Listing: results on stdout, as a table on a terminal, tab-separated elsewhere, or as JSON lines. Knows no result."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

REPORT_WIDTH: Final = 120


def print_json(value: Any) -> None:
    """Print one line of JSON, so that many of them make NDJSON."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table on a terminal, and tab-separated lines of full width elsewhere."""
    console = Console()
    if console.is_terminal:
        console.print(_make_table(columns, rows))
        return
    for row in rows:
        sys.stdout.write("\t".join(_plain(cell) for cell in row) + "\n")


def print_listing(
    found: Iterable[Any], columns: Sequence[str], describe: Callable[[Any], Sequence[Any]], *, is_json: bool
) -> None:
    """Print each result as a line of JSON, or as the row that `describe` makes of it."""
    if is_json:
        for each in found:
            print_json(each)
    else:
        print_table(columns, map(describe, found))


def print_report(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table with a title, on a terminal and in a log alike."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    console.print(Text(f"\n{title}", style="bold"))
    console.print(_make_table(columns, rows))


def _make_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(*columns, box=box.SIMPLE_HEAD, show_header=any(columns), pad_edge=False)
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))  # Text: a key such as "[red]" is no markup
    return table


def _plain(cell: Any) -> str:
    text = "" if cell is None else str(cell)
    return " ".join(text.split()) if any(character in text for character in "\t\n\r") else text
