"""Kinds of rows: a collection keeps vectors, a score or a record per item; each kind has its columns and formats.

Results of n items are an array: numbers [n, width] for vectors and scores, or objects [n], each None or bytes: the JSON
of records, or the packed form of representations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Protocol

import numpy as np
import numpy.typing as npt
from psycopg import Cursor, sql

from vectormill.db.parameters import (
    JSONB_VERSION,
    TEXT_OID,
    Field,
    WireArray,
    find_type,
    make_bytes_array,
    make_row,
    open_array,
    split_row,
)
from vectormill.domain.encoding import LATE, EncodingSpec
from vectormill.domain.task import (
    DENSE,
    MULTI_VECTOR,
    OUTPUTS,
    RECORD,
    REPRESENTATIONS,
    SCORE,
    SPARSE,
    VECTOR,
)
from vectormill.vectors.representations import (
    Representations,
    read_sparse,
    read_vectors,
    send_sparse,
    send_vectors,
    unpack,
)
from vectormill.vectors.residual_codes import Codebook, restore
from vectormill.vectors.scores import choose_scores, names_labels
from vectormill.vectors.vector_types import (
    VectorType,
    choose_vector_type,
    missing_rows,
    read_columns,
    send_rows,
    write_columns,
)

Results = npt.NDArray[Any]

KEPT_TEXT: Final = ("text",)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of results in a generation's table. `element` is its SQL type without the `modifier`, its length.

    A column may be an array of that type. An array of arrays cannot be sent, so each value is then wrapped in a row of
    the type `wrapper`, whose only field unnest returns. `constraint` ends its definition. A column that is not
    `is_shown` is left out of the view.
    """

    name: str
    element: str
    modifier: int | None = None
    is_nullable: bool = False
    wrapper: str = ""
    constraint: str = ""
    is_shown: bool = True

    @property
    def definition(self) -> str:
        modifier = "" if self.modifier is None else f"({self.modifier:d})"
        array = "[]" if self.wrapper else ""
        return f"{self.name} {self.element}{modifier}{array}{'' if self.is_nullable else ' NOT NULL'}{self.constraint}"

    @property
    def sent(self) -> sql.Composable:
        """Return the SQL of the parameter that has the values of many rows, an array named as the column."""
        kind = sql.SQL(self.wrapper) if self.wrapper else sql.Identifier(self.element)
        return sql.SQL("{}::{}[]").format(sql.Placeholder(self.name), kind)


class RowKind(Protocol):
    """The columns, SQL fragments and wire format of one kind of result. It runs no SQL itself."""

    @property
    def result(self) -> str:
        """Return the name of the result, such as VECTOR of vectormill/domain/task.py."""
        ...

    @property
    def text_columns(self) -> tuple[str, ...]:
        """Return the columns of the attributes table that keep an item's text: two if items may be pairs."""
        ...

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        """Return the columns of results. A new view is required if the type of the first changes, or of any output."""
        ...

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        """Return the view's columns of results as SQL expressions on the table alias `live`."""
        ...

    def sent(self, spec: EncodingSpec, table: str) -> str:
        """Return the SQL expression that sends the result of one row of `table`, for `read` to parse."""
        ...

    def gathered(self, sent: str) -> str:
        """Return the SQL aggregate over the expression `sent` that sends the results of many rows as one value."""
        ...

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        """Parse the value of the SQL of `gathered` for many rows, or of `sent` for one row, into results."""
        ...

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        """Return placeholder results for items without a result."""
        ...

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        """Return the bytes of one row's result on the wire, at most; None if the size varies without a bound."""
        ...

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        """Encode results as one Postgres array per column, by column name, in binary format."""
        ...

    def make_fields(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, Sequence[Field]]:
        """Encode results as the fields of a binary COPY, by column name."""
        ...


def take_objects(values: Sequence[bytes | None]) -> Results:
    """Return the values as an object array [n]; np.array would make a fixed-width bytes array."""
    taken = np.empty(len(values), dtype=np.object_)
    taken[:] = values
    return taken


class Numbers:
    """Shared code of kinds whose results are numbers [n, width] in one pgvector column of the spec's vector type."""

    column: str

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"{kept_type(spec).column}_send({table}.{self.column})"  # pgvector's binary format, as in COPY

    def gathered(self, sent: str) -> str:
        return f"string_agg({sent}, '')"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        return read_columns(bytes(wire), kept_type(spec), spec.dimensions)

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return missing_rows(num_rows, kept_type(spec), spec.dimensions)

    def define_numbers(self, spec: EncodingSpec) -> Column:
        return Column(self.column, kept_type(spec).column, spec.dimensions)

    def make_numbers(self, cursor: Cursor[Any], rows: Results, spec: EncodingSpec) -> WireArray:
        """Encode rows [n, width] as a Postgres array of the column's type."""
        kind = kept_type(spec)
        array, elements = open_array(
            find_type(cursor, kind.column), len(rows), kind.column_bytes(spec.dimensions)
        )
        write_columns(elements, rows, kind, spec.dimensions)
        return array

    def send_numbers(self, rows: Results, spec: EncodingSpec) -> list[bytes]:
        """Encode rows [n, width] as fields of the column."""
        return send_rows(rows, kept_type(spec), spec.dimensions)


def kept_type(spec: EncodingSpec) -> VectorType:
    return choose_vector_type(spec, in_collection=True)


class Vectors(Numbers):
    """The RowKind of vectors. The default type is halfvec: a 768-d row stays inline in its page, and WAL is halved."""

    result = VECTOR
    text_columns: tuple[str, ...] = KEPT_TEXT
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

    def make_fields(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, Sequence[Field]]:
        return {self.column: self.send_numbers(results, spec)}


FLOAT4_OID: Final = 700
_SCORE_BYTES: Final = 4

# The view computes probabilities on reading, so a query that does not select the column does not pay for it.
PROBABILITIES: Final = """
    (SELECT jsonb_object_agg(pair.label, pair.number)
       FROM unnest(CAST({labels} AS text[]), CAST(live.numbers AS real[])) AS pair (label, number)) AS probabilities
"""


class Scores(Numbers):
    """The RowKind of scores. Results are float32 [n, labels], kept in a vector column alongside score and best label.

    The spec has the names of the labels. A row has its best label by name too, so that users can filter by it in SQL.
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
        scores, labels = self._choose(results, spec)
        array, elements = open_array(FLOAT4_OID, len(results), _SCORE_BYTES)
        elements[:] = scores.view("u1").reshape(-1, _SCORE_BYTES)
        return {
            "score": array,
            "label": make_bytes_array(TEXT_OID, labels, empty_is_null=True),
            self.column: self.make_numbers(cursor, results, spec),
        }

    def make_fields(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, Sequence[Field]]:
        scores, labels = self._choose(results, spec)
        return {
            "score": scores.view("V4").tolist(),
            "label": [label or None for label in labels],
            self.column: self.send_numbers(results, spec),
        }

    def _choose(self, results: Results, spec: EncodingSpec) -> tuple[Results, list[bytes]]:
        """Return the scores [n] as Postgres sends them, and the name of each best label, empty if it has none."""
        scores, best = choose_scores(results, spec.labels)
        labels = [b""] * len(results)
        if names_labels(spec.labels):
            encoded = [label.encode() for label in spec.labels]
            labels = [encoded[place] for place in best.tolist()]
        return scores.astype(">f4"), labels


JSONB_OID: Final = 3802


class Objects:
    """Shared code of kinds whose results are objects [n], of sizes without a bound."""

    text_columns = KEPT_TEXT

    def gathered(self, sent: str) -> str:
        return f"array_agg({sent})"

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return take_objects([None] * num_rows)

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        return None


class Records(Objects):
    """The RowKind of records. Results are objects [n], each JSON as bytes that jsonb accepts."""

    result = RECORD

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (Column("output", "jsonb"),)

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        return (sql.SQL("live.output"),)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"CAST({table}.output AS text)"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        texts: list[str] = [wire] if isinstance(wire, str) else wire
        return take_objects([text.encode() for text in texts])

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        return {"output": make_bytes_array(JSONB_OID, self.make_fields(cursor, results, spec)["output"])}

    def make_fields(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, Sequence[bytes]]:
        return {"output": [JSONB_VERSION + output for output in results]}


# The column of each output, in the tables and in the view of a collection.
OUTPUT_COLUMNS: Final[Mapping[str, str]] = {
    DENSE: "embedding",
    SPARSE: "sparse",
    MULTI_VECTOR: "multi_vector",
}
HALVES: Final = "halfvec"
WRAPPER: Final = "vectormill.multi_vector"
CODES: Final = "multi_vector_codes"
# An indexer that knows no codes copies rows without them; this makes it fail.
NOT_BOTH_NULL: Final = " CHECK (num_nonnulls(multi_vector, multi_vector_codes) > 0)"


@dataclass(frozen=True, slots=True)
class ManyRepresentations(Objects):
    """The RowKind of representations. Results are objects [n], each the packed form of an item's outputs.

    Dense vectors have the column type of the kind Vectors, sparse ones are a sparsevec. Multi-vectors are an array of
    halfvec, or if that is NULL, residual codes. Codes beside halves are those of an earlier text and mean nothing:
    a process that knows no codes leaves them. Rows are read as the binary form of a SQL row of these columns.

    Codes are read with `codebook`, that of the vector space, and written if `writes_codes`.
    """

    codebook: Codebook | None = None
    writes_codes: bool = False

    result: ClassVar[str] = REPRESENTATIONS

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        types = {
            DENSE: (kept_type(spec).column, spec.dimensions),
            SPARSE: ("sparsevec", spec.sparse_dimensions),
            MULTI_VECTOR: (HALVES, spec.token_dimensions),
        }
        columns = [Column(OUTPUT_COLUMNS[name], *types[name]) for name in OUTPUTS if spec.has_output(name)]
        if spec.has_output(MULTI_VECTOR):
            columns[-1] = replace(columns[-1], is_nullable=True, wrapper=WRAPPER)
            columns.append(Column(CODES, "bytea", is_nullable=True, constraint=NOT_BOTH_NULL, is_shown=False))
        return tuple(columns)

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        return tuple(sql.Identifier("live", column.name) for column in self.columns(spec) if column.is_shown)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"record_send(ROW({', '.join(f'{table}.{column.name}' for column in self.columns(spec))}))"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        rows: list[bytes] = wire if isinstance(wire, list) else [wire]
        return take_objects([self._read_row(bytes(row), spec).pack() for row in rows])

    def _read_row(self, row: bytes, spec: EncodingSpec) -> Representations:
        fields: dict[str, Any] = dict(
            zip((column.name for column in self.columns(spec)), split_row(row), strict=True)
        )
        read = Representations()
        if spec.has_output(DENSE):
            (dense,) = read_columns(fields["embedding"], kept_type(spec), spec.dimensions).astype(np.float32)
            read = replace(read, dense=dense)
        if spec.has_output(SPARSE):
            indices, weights = read_sparse(fields["sparse"])
            read = replace(read, indices=indices, weights=weights)
        if spec.has_output(MULTI_VECTOR):
            vectors = self.read_tokens(fields["multi_vector"], fields[CODES], spec).astype(np.float16)
            read = replace(read, vectors=vectors)
        return read

    def read_tokens(
        self, halves: bytes | None, codes: bytes | None, spec: EncodingSpec
    ) -> npt.NDArray[np.floating[Any]]:
        """Return the token vectors [t, width] of a row's two columns. Raise CodebookMissing."""
        if halves is not None:
            return read_vectors(halves, spec.token_dimensions)
        assert codes is not None, "a row has halves or codes"
        return restore(codes, self.codebook)

    def make_arrays(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, WireArray]:
        fields = self.make_fields(cursor, results, spec)
        arrays = {}
        for column in self.columns(spec):
            values = fields[column.name]
            if column.wrapper:
                oid = find_type(cursor, f"{column.element}[]")
                values = [None if value is None else make_row([(oid, value)]) for value in values]
            arrays[column.name] = make_bytes_array(
                find_type(cursor, column.wrapper or column.element),
                [value or b"" for value in values],
                empty_is_null=True,
            )
        return arrays

    def make_fields(
        self, cursor: Cursor[Any], results: Results, spec: EncodingSpec
    ) -> Mapping[str, Sequence[Field]]:
        rows = [unpack(packed) for packed in results]
        fields: dict[str, Sequence[Field]] = {}
        if spec.has_output(DENSE):
            dense = np.array([row.dense for row in rows], np.float32).reshape(len(rows), spec.dimensions)
            fields["embedding"] = send_rows(dense, kept_type(spec), spec.dimensions)
        if spec.has_output(SPARSE):
            fields["sparse"] = [send_sparse(row.indices, row.weights, spec.sparse_dimensions) for row in rows]
        if spec.has_output(MULTI_VECTOR):
            oid = find_type(cursor, HALVES)
            if self.codebook is not None and self.writes_codes:
                fields["multi_vector"] = [None] * len(rows)
                fields[CODES] = self.codebook.encode([row.vectors for row in rows])
            else:
                fields["multi_vector"] = [send_vectors(row.vectors, oid) for row in rows]
                fields[CODES] = [None] * len(rows)
        return fields


class VectorsInTexts(Vectors):
    """The RowKind of vectors of late chunking, where a passage is kept with the text that it is read in."""

    text_columns = ("text", "text_pair")


VECTORS_IN_TEXTS: Final = VectorsInTexts()
ROW_KINDS: Final[Mapping[str, RowKind]] = {
    kind.result: kind for kind in (Vectors(), Scores(), Records(), ManyRepresentations())
}


def choose_kind(spec: EncodingSpec) -> RowKind:
    return VECTORS_IN_TEXTS if spec.long_texts == LATE else ROW_KINDS[spec.result]
