"""Tables: results in Parquet as objects of pyarrow, NumPy, pandas and polars. Fetches nothing."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vectormill.domain.errors import InvalidOption, VectormillError

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import polars
    import pyarrow

EXTRA = "dataframes"


class MissingLibrary(VectormillError, ImportError):
    """A library that only tables need is not installed."""


class Matrix(NamedTuple):
    """`keys[i]` is the key of `values[i]`: a vector of [num_keys, width], or a score of [num_keys]."""

    keys: list[str]
    values: "np.ndarray[Any, Any]"


def require(library: str) -> None:
    """Raise MissingLibrary, before anything is fetched."""
    if importlib.util.find_spec(library) is None:
        raise MissingLibrary(
            f"{library} is not installed, and this needs it: pip install 'vectormill[{EXTRA}]'."
        )


def read(path: Path) -> "pyarrow.Table":
    import pyarrow.parquet

    return pyarrow.parquet.read_table(path)


def make_matrix(table: "pyarrow.Table") -> Matrix:
    """Raise InvalidOption for what has no numbers."""
    keys = table["key"].to_pylist()
    if "score" in table.column_names:
        return Matrix(keys, table["score"].to_numpy())
    if "embedding" not in table.column_names:
        raise InvalidOption("Records are not numbers: iterate over them, or use to_arrow().")
    column = table["embedding"].combine_chunks()
    width = column.type.list_size
    return Matrix(keys, column.flatten().to_numpy(zero_copy_only=False).reshape(len(keys), width))


def make_pandas(table: "pyarrow.Table") -> "pandas.DataFrame":
    return table.to_pandas()


def make_polars(table: "pyarrow.Table") -> "polars.DataFrame":
    import polars

    made = polars.from_arrow(table)
    assert isinstance(made, polars.DataFrame)  # of one column alone it would be a Series
    return made
