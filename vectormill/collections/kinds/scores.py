"""Scores: the score, its label, and the numbers of all labels, which are a vector of pgvector's to the database.

So a chunk of them travels as arrays, like vectors. The labels are in the spec; a row has its own label by name, so that
users' conditions on it are plain ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from psycopg import Cursor, sql

from vectormill.collections.kinds.row_kind import Column, Results
from vectormill.collections.kinds.vectors import kept_type, make_numbers, send_numbers
from vectormill.db.parameters import TEXT_OID, WireArray, make_bytes_array, open_array
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import SCORE
from vectormill.vectors.scores import choose_scores, names_labels
from vectormill.vectors.vector_types import missing_rows, read_columns

FLOAT4_OID: Final = 700
_SCORE_BYTES: Final = 4

# Made when it is asked for: a query that leaves the column out does not compute it.
PROBABILITIES: Final = """
    (SELECT jsonb_object_agg(pair.label, pair.number)
       FROM unnest(CAST({labels} AS text[]), CAST(live.numbers AS real[])) AS pair (label, number)) AS probabilities
"""


class Scores:
    """Implements RowKind. Results are float32 [n, labels]."""

    result = SCORE
    text_columns = ("text", "text_pair")

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (
            Column("score", "float4"),
            Column("label", "text", is_nullable=True),
            Column("numbers", kept_type(spec).column, spec.dimensions),
        )

    def shown(self, spec: EncodingSpec) -> Sequence[sql.Composable]:
        probabilities: sql.Composable = sql.SQL("CAST(NULL AS jsonb) AS probabilities")
        if names_labels(spec.labels):
            probabilities = sql.SQL(PROBABILITIES).format(labels=sql.Literal(list(spec.labels)))
        return sql.SQL("live.score"), sql.SQL("live.label"), probabilities

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return send_numbers(f"{table}.numbers", spec)

    def gathered(self, sent: str) -> str:
        return f"string_agg({sent}, '')"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        return read_columns(bytes(wire), kept_type(spec), spec.dimensions)

    def missing(self, num_rows: int, spec: EncodingSpec) -> Results:
        return missing_rows(num_rows, kept_type(spec), spec.dimensions)

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
            "numbers": make_numbers(cursor, results, spec),
        }
