"""Kinds of rows: what a collection keeps of an item (a vector, a score or records), for tables, commits and exports.

Results of some items are an array of as many rows: numbers [n, width] of vectors and scores, or objects [n], of which
each is JSON as bytes, or None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from psycopg import Cursor, sql

from vectormill.db.parameters import TEXT_OID, WireArray, find_type, make_bytes_array, open_array
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RECORD, SCORE, VECTOR
from vectormill.vectors.scores import choose_scores, names_labels
from vectormill.vectors.vector_types import (
    VectorType,
    choose_vector_type,
    missing_rows,
    read_columns,
    write_columns,
)

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
        """Return the SQL of a row's result in the form in which `read` takes it."""
        ...

    def gathered(self, sent: str) -> str:
        """Return the aggregate that sends all rows of a group."""
        ...

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        """Return results from what `gathered` gave for some rows, or `sent` for one."""
        ...

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        """Return rows for items that have no result."""
        ...

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        """Return the bytes of a row on the wire; None where their number varies."""
        ...

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        """Return an array for each column, by its name."""
        ...


def take_objects(values: Sequence[bytes | None]) -> Results:
    """Return objects [n]; NumPy alone would make an array of characters of them."""
    taken = np.empty(len(values), dtype=np.object_)
    taken[:] = values
    return taken


class Numbers:
    """Reads and writes numbers [n, width] that are one column of pgvector's types, in the spec's vector type."""

    column: str

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"{kept_type(spec).column}_send({table}.{self.column})"  # as COPY takes them

    def gathered(self, sent: str) -> str:
        return f"string_agg({sent}, '')"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        return read_columns(bytes(wire), kept_type(spec), spec.dimensions)

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return missing_rows(num_rows, kept_type(spec), spec.dimensions)

    def define_numbers(self, spec: EncodingSpec) -> Column:
        return Column(self.column, kept_type(spec).column, spec.dimensions)

    def make_numbers(self, cursor: Cursor[Any], rows: Results, spec: EncodingSpec) -> WireArray:
        """Return rows [n, width] as an array of the column's type."""
        kind = kept_type(spec)
        array, elements = open_array(
            find_type(cursor, kind.column), len(rows), kind.column_bytes(spec.dimensions)
        )
        write_columns(elements, rows, kind, spec.dimensions)
        return array


def kept_type(spec: EncodingSpec) -> VectorType:
    return choose_vector_type(spec, in_collection=True)


class Vectors(Numbers):
    """Implements RowKind. By default of halfvec: a 768-d row stays inline in its page, and WAL is halved."""

    result = VECTOR
    text_columns = KEPT_TEXT
    column = "embedding"

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (self.define_numbers(spec),)

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        return (sql.SQL("live.embedding"),)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return kept_type(spec).column_bytes(spec.dimensions)

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        return {self.column: self.make_numbers(cursor, results, spec)}


FLOAT4_OID: Final = 700
_SCORE_BYTES: Final = 4

# Made when it is asked for: a query that leaves the column out does not compute it.
PROBABILITIES: Final = """
    (SELECT jsonb_object_agg(pair.label, pair.number)
       FROM unnest(CAST({labels} AS text[]), CAST(live.numbers AS real[])) AS pair (label, number)) AS probabilities
"""


class Scores(Numbers):
    """Implements RowKind. Results are float32 [n, labels], which travel as arrays, like vectors.

    The labels are in the spec; a row has its own label by name, so that users' conditions on it are plain ones.
    """

    result = SCORE
    text_columns = ("text", "text_pair")
    column = "numbers"

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (
            Column("score", "float4"),
            Column("label", "text", is_nullable=True),
            self.define_numbers(spec),
        )

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        probabilities: sql.Composable = sql.SQL("CAST(NULL AS jsonb) AS probabilities")
        if names_labels(spec.labels):
            probabilities = sql.SQL(PROBABILITIES).format(labels=sql.Literal(list(spec.labels)))
        return sql.SQL("live.score"), sql.SQL("live.label"), probabilities

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        longest = max((len(label.encode()) for label in spec.labels), default=0)
        return _SCORE_BYTES + longest + kept_type(spec).column_bytes(spec.dimensions)

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        scores, best = choose_scores(results, spec.labels)
        array, elements = open_array(FLOAT4_OID, len(results), _SCORE_BYTES)
        elements[:] = scores.astype(">f4").view("u1").reshape(-1, _SCORE_BYTES)
        labels = [b""] * len(results)
        if names_labels(spec.labels):
            encoded = [label.encode() for label in spec.labels]
            labels = [encoded[place] for place in best.tolist()]
        return {
            "score": array,
            "label": make_bytes_array(TEXT_OID, labels, empty_is_null=True),
            self.column: self.make_numbers(cursor, results, spec),
        }


JSONB_OID: Final = 3802
# jsonb in binary form is a version and then its text (PostgreSQL, jsonb_recv in src/backend/utils/adt/jsonb.c).
JSONB_VERSION: Final = b"\x01"


class Records:
    """Implements RowKind. Results are objects [n], each JSON as bytes that jsonb takes."""

    result = RECORD
    text_columns = KEPT_TEXT

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (Column("output", "jsonb"),)

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        return (sql.SQL("live.output"),)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"CAST({table}.output AS text)"

    def gathered(self, sent: str) -> str:
        return f"array_agg({sent})"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        texts: list[str] = [wire] if isinstance(wire, str) else wire
        return take_objects([text.encode() for text in texts])

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return take_objects([None] * num_rows)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return None

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        return {"output": make_bytes_array(JSONB_OID, [JSONB_VERSION + output for output in results])}


ROW_KINDS: Final[Mapping[str, RowKind]] = {kind.result: kind for kind in (Vectors(), Scores(), Records())}


def choose_kind(spec: EncodingSpec) -> RowKind:
    return ROW_KINDS[spec.result]
