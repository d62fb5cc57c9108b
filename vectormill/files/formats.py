"""Formats: how files of texts and of vectors are called, and what of it is told to users. Reads and writes none.

A new one gets a row here, and a reader in texts.py and sources/files.py, or a writer in the API's streams.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

# Names of formats as type checkers see them; made by `python -m tests.architecture.derived` from the rows below.
# <names>
InputName = Literal["jsonl", "csv", "tsv", "parquet"]
OutputName = Literal["parquet", "ndjson", "npy"]
RowsName = Literal["parquet", "ndjson"]
# <end>


@dataclass(frozen=True, slots=True)
class InputFormat:
    """A file with a row for each text. The first suffix is the one that is told."""

    name: str
    suffixes: tuple[str, ...]
    is_packed_outside: bool = True  # .gz may follow; Parquet packs what it holds


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A file of vectors. `note` follows its suffix where it is told. A collection's rows need one that has keys."""

    name: str
    suffixes: tuple[str, ...]
    media_type: str
    has_keys: bool = True
    note: str = ""


INPUT_FORMATS: Final = (
    InputFormat("jsonl", (".jsonl", ".ndjson")),
    InputFormat("csv", (".csv",)),
    InputFormat("tsv", (".tsv",)),
    InputFormat("parquet", (".parquet", ".pq"), is_packed_outside=False),
)
OUTPUT_FORMATS: Final[dict[str, OutputFormat]] = {
    row.name: row
    for row in (
        OutputFormat("parquet", (".parquet", ".pq"), "application/vnd.apache.parquet"),
        OutputFormat("ndjson", (".jsonl", ".ndjson"), "application/x-ndjson"),
        OutputFormat(
            "npy", (".npy",), "application/x-npy", has_keys=False, note=" (keys go to OUT.keys.txt)"
        ),
    )
}


def by_suffix(formats: Iterable[Any]) -> dict[str, str]:
    """Return the name of the format for each suffix."""
    return {suffix: row.name for row in formats for suffix in row.suffixes}


def describe_inputs(packings: str = ".gz") -> str:
    """Return the suffixes of inputs as a text: `.jsonl, .csv, .tsv (also .gz), .parquet`."""
    outside = [row.suffixes[0] for row in INPUT_FORMATS if row.is_packed_outside]
    inside = [row.suffixes[0] for row in INPUT_FORMATS if not row.is_packed_outside]
    return f"{', '.join(outside)} (also {packings}), {', '.join(inside)}"


def describe_outputs(*, with_notes: bool = False, of_rows: bool = False) -> str:
    """Return the suffixes of outputs as a text, `.parquet, .jsonl or .npy`; `of_rows` leaves out those that cannot hold
    a collection's rows.
    """
    told = [
        row.suffixes[0] + (row.note if with_notes else "")
        for row in OUTPUT_FORMATS.values()
        if row.has_keys or not of_rows
    ]
    return f"{', '.join(told[:-1])} or {told[-1]}"


INPUT_HELP: Final = f"{describe_inputs()}, a directory of texts, or - for stdin."
OUTPUT_HELP: Final = f"{describe_outputs(with_notes=True)}."
