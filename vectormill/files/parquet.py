"""Parquet: the only module that opens Parquet files, to read them and to write them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vectormill.domain.errors import InvalidItem

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet


def open_parquet(file: Any) -> "pyarrow.parquet.ParquetFile":
    """Open a path, or a file that can be sought, for reading. Raise the errors of pyarrow."""
    import pyarrow.parquet  # imported here because this takes a tenth of a second

    return pyarrow.parquet.ParquetFile(file)


def open_writer(sink: Any, schema: "pyarrow.Schema", **options: Any) -> "pyarrow.parquet.ParquetWriter":
    """Open a path or a file for writing a table of this schema."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetWriter(sink, schema, **options)


def read_table(path: Path) -> "pyarrow.Table":
    """Return a whole file in memory."""
    with open_parquet(path) as file:
        return file.read()


@contextmanager
def naming(name: str, error: type[Exception] = InvalidItem) -> Iterator[None]:
    """Raise `error`, with the file's name, for the errors of pyarrow in the block."""
    import pyarrow

    try:
        yield
    # A page that cannot be decoded raises OSError, and the name of a column that is not UTF-8 raises UnicodeError.
    except (pyarrow.ArrowException, OSError, UnicodeError) as cause:
        raise error(f"{name} cannot be read as Parquet: {str(cause).strip().rstrip('.')}.") from cause
