"""The demo of re-indexing: index a table, change one percent, re-index, and search with a filter.

The table holds docstrings, in the embedded Postgres, and is created as a user would; the rest uses the API.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from vectormill.cli.printing import print_json, print_report
from vectormill.domain.errors import VectormillError

if TYPE_CHECKING:
    import psycopg

    from vectormill.client import Client
    from vectormill.corpus import Docstring

TABLE: Final = "library"
COLLECTION: Final = "library_docs"
QUERY: Final = "how to parse a date"
FILTER: Final[Mapping[str, Any]] = {"module": {"in": ["datetime", "time", "calendar"]}}
NEAREST: Final = 5
POLL_SECONDS: Final = 0.05
# Rows are divided into this many lots by a hash of their names; a lot is half a percent of the table.
NUM_LOTS: Final = 200

CREATE_TABLE: Final = """
    DROP TABLE IF EXISTS library;
    CREATE TABLE library (
        name text PRIMARY KEY,
        docstring text NOT NULL,
        module text NOT NULL,
        depth integer NOT NULL,
        lot integer NOT NULL
    )
"""
COPY_ROWS: Final = "COPY library (name, docstring, module, depth, lot) FROM STDIN"
QUERY_ROWS: Final = "SELECT name, docstring, module, depth FROM library"
# These statements change one row in a hundred: some are inserted, some updated, some deleted.
CHANGES: Final[Mapping[str, str]] = {
    "another text": "UPDATE library SET docstring = docstring || ' (Edited.)' WHERE lot = 0",
    "other metadata": "UPDATE library SET depth = depth + 10 WHERE lot = 1 AND depth = 2",
    "renamed": "UPDATE library SET name = name || '.renamed' WHERE lot = 1 AND depth = 3",
    "deleted": "DELETE FROM library WHERE lot = 2 AND depth = 2",
    "new": """
        INSERT INTO library SELECT name || '.new', 'New: ' || docstring, module, depth, lot FROM library
         WHERE lot = 2 AND depth = 3
    """,
}
COUNTS: Final = ("unchanged", "new", "changed", "metadata_only", "moved", "deleted", "failed")


@dataclass(frozen=True, slots=True)
class Round:
    """One run, the reason for it, and the number of rows of the table at that time."""

    title: str
    run: Mapping[str, Any]
    num_rows: int

    @property
    def seconds(self) -> float:
        finished, created = (
            datetime.fromisoformat(str(self.run[name])) for name in ("finished_at", "created_at")
        )
        return (finished - created).total_seconds()

    def count(self, name: str) -> int:
        return int(self.run["counts"][f"num_{name}"])


def make_table(
    connection: "psycopg.Connection[Any]", docstrings: Iterable["Docstring"], reader: str | None
) -> int:
    """Create the table with one row for each docstring, let the reader see it, and return the number of rows."""
    connection.execute(CREATE_TABLE)
    if reader is not None:
        connection.execute(f'GRANT SELECT ON library TO "{reader}"')
    num_rows = 0
    with connection.cursor() as cursor, cursor.copy(COPY_ROWS) as copy:
        for docstring in docstrings:
            if "\0" not in docstring.text:  # Postgres cannot store NUL in a text
                path = docstring.key.split(".")
                lot = zlib.crc32(docstring.key.encode()) % NUM_LOTS
                copy.write_row((docstring.key, docstring.text, path[0], len(path), lot))
                num_rows += 1
    return num_rows


def change_table(connection: "psycopg.Connection[Any]") -> dict[str, int]:
    """Change about one percent of the table; return how many rows were inserted, updated and deleted."""
    return {what: connection.execute(statement).rowcount for what, statement in CHANGES.items()}


def count_rows(connection: "psycopg.Connection[Any]", table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert row is not None
    return int(row[0])


def follow_table(client: "Client", model: str | None) -> None:
    """Create a collection whose source is the table."""
    client.create_collection(COLLECTION, model=model)
    client.set_source(
        COLLECTION,
        "sql",
        {
            "query": QUERY_ROWS,
            "key": "name",
            "text": "docstring",
            "metadata": ["module", "depth"],
        },
    )


def reindex(
    client: "Client",
    connection: "psycopg.Connection[Any]",
    title: str,
    on_poll: Callable[[Mapping[str, Any]], None],
) -> Round:
    """Run a re-index and return its Round. Raise VectormillError if it did not complete."""
    started = client.reindex(COLLECTION)
    run = client.wait_run(started["id"], on_poll, poll_seconds=POLL_SECONDS)
    if run["state"] not in ("completed", "completed_with_errors"):
        raise VectormillError(f"Run {run['id']} ended as {run['state']}: {run['error']}")
    return Round(title, run, count_rows(connection, TABLE))


def print_rounds(
    rounds: Sequence[Round], matches: Sequence[Mapping[str, Any]], *, is_json: bool = False
) -> None:
    """Print the changes and cost of each run, and the matches of a search with a filter."""
    if is_json:
        print_json({"runs": [dict(each.run) for each in rounds], "search": list(matches)})
        return
    rows = [("rows of the table", *(f"{each.num_rows:,}" for each in rounds))]
    rows += [(name.replace("_", " "), *(f"{each.count(name):,}" for each in rounds)) for name in COUNTS]
    rows += [("seconds", *(f"{each.seconds:.2f}" for each in rounds))]
    rows += [("of the first run", *(f"{each.seconds / rounds[0].seconds:.1%}" for each in rounds))]
    print_report("The runs", ("", *(each.title for each in rounds)), rows)
    wishes = ", ".join(f"{field} is one of {', '.join(wish['in'])}" for field, wish in FILTER.items())
    found = [
        (
            f"{match['score']:.3f}",
            match["key"],
            ", ".join(f"{field} {value}" for field, value in match["metadata"].items()),
        )
        for match in matches
    ]
    print_report(f"Nearest to: {QUERY}, where {wishes}", ("score", "row of the table", "metadata"), found)
