"""Listing: results on stdout, as a table on a terminal, tab-separated elsewhere, or as JSON lines. Knows no result."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_json(value: Any) -> None:
    """One line of JSON, so that many of them make NDJSON."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str | None = None) -> None:
    """A table for people; where no terminal is, lines with tabs, never cut to some width."""
    console = Console()
    if not console.is_terminal:
        for row in rows:
            sys.stdout.write("\t".join(_plain(cell) for cell in row) + "\n")
        return
    table = Table(*columns, title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=any(columns))
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))  # Text: a key such as "[red]" is no markup
    console.print(table)


def _plain(cell: Any) -> str:
    text = "" if cell is None else str(cell)
    return " ".join(text.split()) if any(character in text for character in "\t\n\r") else text
