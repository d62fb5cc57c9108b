"""RowKind: what is to be said of one kind of result, for tables, view, commits and exports. All of them: kinds.py.

Results of some items are an array of as many rows: numbers [n, width] of vectors and scores, or objects [n], of which
each is JSON as bytes, or None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from psycopg import Cursor, sql

from vectormill.db.parameters import WireArray
from vectormill.domain.encoding import EncodingSpec

Results = npt.NDArray[Any]

KEPT_TEXT: Final = ("text",)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a generation's table that carries results. `element` is its type without `modifier`."""

    name: str
    element: str
    modifier: int | None = None
    is_nullable: bool = False

    @property
    def definition(self) -> str:
        modifier = "" if self.modifier is None else f"({self.modifier:d})"
        return f"{self.name} {self.element}{modifier}{'' if self.is_nullable else ' NOT NULL'}"


class RowKind(Protocol):
    """One kind. Knows no connection: SQL goes out as text, and what comes back is read."""

    @property
    def result(self) -> str:
        """Return the result that an item has: see vectormill/domain/task.py."""
        ...

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the columns of attributes in which an item's text is kept: two for a pair."""
        ...

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        """Return the columns of the generation's table; the one whose type the view depends on is the first."""
        ...

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        """Return the columns that the view has between key and metadata, of the table `live`."""
        ...

    def sent(self, spec: EncodingSpec, table: str) -> str:
        """A row's result in the form in which `read` takes it."""
        ...

    def gathered(self, sent: str) -> str:
        """Return the aggregate that sends all rows of a group."""
        ...

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        """Results out of what `gathered` gave of some rows, or `sent` of one."""
        ...

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        """Rows for items that have no result."""
        ...

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        """Bytes of a row on the wire; None where rows are of any length."""
        ...

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        """One for each column, by its name."""
        ...


def take_objects(values: Sequence[bytes | None]) -> Results:
    """Objects [n]; NumPy would make an array of characters of them."""
    taken = np.empty(len(values), dtype=np.object_)
    taken[:] = values
    return taken
