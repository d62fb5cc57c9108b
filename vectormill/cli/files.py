"""The files that commands read and write: - is standard input or output."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectormill.domain.errors import InvalidItem
from vectormill.files.outputs import STDOUT
from vectormill.jobs.job import FILE

if TYPE_CHECKING:
    from vectormill.files.ndjson import ItemJson


def read_input(
    input: str,
    key_field: str | None,
    text_field: str,
    pair_field: str | None = None,
    metadata_fields: Sequence[str] | None = None,
    *,
    strict: bool,
    format: str | None = None,
) -> "Iterable[ItemJson]":
    """Return the items of a file. The first item, or with `strict` every item, is validated now."""
    from vectormill.rows.columns import Columns
    from vectormill.rows.inputs import RowReading, look_at_texts, read_texts

    columns = Columns(text_field, key_field, pair_field, tuple(metadata_fields or ()))
    return look_at_texts(read_texts(input, RowReading(columns, is_strict=strict), format), whole=strict)


def name_output(out: Path) -> Path:
    """Return the file that -o names; - is stdout."""
    return STDOUT if str(out) == "-" else out


def tell_written(path: Path) -> str | None:
    """Return the sentence with which a command ends that has written a file; none if that was stdout."""
    return None if path == STDOUT else f"Wrote {path}."


def read_lines(input: str) -> Iterator[str]:
    """Yield the lines of a UTF-8 file, or of stdin if it is -, with their ends and without a byte order mark."""
    with nullcontext(sys.stdin.buffer) if input == "-" else Path(input).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                name = "standard input" if input == "-" else input
                raise InvalidItem(
                    f"{name}, line {number}: not valid UTF-8 (byte {error.start + 1} of the line)."
                ) from error


def name_file(input: str) -> dict[str, Any]:
    """Return metadata that name the file of a job's texts, by which the console lists it; empty for standard input."""
    return {} if input == "-" else {FILE: Path(input).name}
