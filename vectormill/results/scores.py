"""The result `score`: how two texts relate, or what one text is, with a number for each label."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from vectormill.db.parameters import (
    JSONB_VERSION,
    Field,
    FindOid,
)
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RAW, SCORE, SIGMOID, SOFTMAX, TANH
from vectormill.results.kind import Column, LoadedColumn, Parts, Results, encode_text
from vectormill.results.vectors import Numbers
from vectormill.vectors.quantization import Ranges
from vectormill.vectors.vector_types import send_rows

_SCORE_BYTES: Final = 4
# 1 minus the largest difference of a label's score, relative for scores above 1. A 16-bit model reproduces scores to
# some thousandths in any batch, and an int8 model to a hundredth.
LEAST_AGREEMENT_OF_SCORES: Final = 0.98

# The view computes probabilities on reading, so a query that does not select the column does not pay for it.
PROBABILITIES: Final = """
    (SELECT jsonb_object_agg(pair.label, pair.number)
       FROM unnest(CAST({labels} AS text[]), CAST(live.numbers AS real[])) AS pair (label, number)) AS probabilities
"""


# NOT BETWEEN finds NaN too: Postgres sorts it above every number.
SCAN_SCORES: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE is_broken) AS num_broken,
           min(score) FILTER (WHERE NOT is_broken) AS smallest, max(score) FILTER (WHERE NOT is_broken) AS largest,
           (array_agg(key) FILTER (WHERE is_broken))[1 : CAST(:limit AS integer)] AS broken_keys
      FROM (SELECT key, score, NOT (score BETWEEN CAST(:least AS real) AND CAST(:most AS real)) AS is_broken
              FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""

# The valid range of float32 scores by their activation; scores without an activation are cosines.
_LARGEST_FLOAT: Final = 3.4e38
SCALES: Final[Mapping[str, tuple[float, float]]] = {
    SOFTMAX: (0.0, 1.00001),
    SIGMOID: (0.0, 1.00001),
    TANH: (-1.00001, 1.00001),
    RAW: (-_LARGEST_FLOAT, _LARGEST_FLOAT),
    "": (-1.00001, 1.00001),
}


class Scores(Numbers):
    """The ResultKind of scores. Results are float32 [n, labels], kept in a vector column beside score and best label.

    The spec has the names of the labels. A row has its best label by name too, so that users can filter by it in SQL.
    """

    result = SCORE
    needs_pgvector = False
    fault = "are not numbers or are out of range"
    column = "numbers"

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (
            Column("score", "float4"),
            Column("label", "text", is_nullable=True),
            self.define_numbers(spec),
        )

    def shown(self, spec: EncodingSpec) -> Sequence[str]:
        from psycopg import sql

        probabilities = "CAST(NULL AS jsonb) AS probabilities"
        if names_labels(spec.labels):
            probabilities = PROBABILITIES.format(labels=sql.Literal(list(spec.labels)).as_string())
        return "live.score", "live.label", probabilities

    def row_bytes(self, spec: EncodingSpec) -> int | None:
        longest = max((len(label.encode()) for label in spec.labels), default=0)
        return _SCORE_BYTES + longest + spec.kept_type.column_bytes(spec.dimensions)

    def make_fields(
        self, results: Results, spec: EncodingSpec, find_oid: FindOid
    ) -> Mapping[str, Sequence[Field]]:
        scores, best = choose_scores(results, spec.labels)
        encoded = [label.encode() for label in spec.labels] if names_labels(spec.labels) else None
        return {
            "score": scores.astype(">f4").view("V4").tolist(),
            "label": [None if encoded is None else encoded[place] for place in best.tolist()],
            self.column: send_rows(results, spec.kept_type, spec.dimensions),
        }

    def measure(self, results: Results) -> int:
        return 40 * (1 + int(results.shape[1]))

    def write(self, results: Results, spec: EncodingSpec) -> list[Parts]:
        return [[b",", msgspec.json.encode(row)[1:-1]] for row in describe_numbers(results, spec.labels)]

    def arrow_fields(self, spec: EncodingSpec) -> list[Any]:
        """Return the score, and with several labels the best one and the number of each."""
        import pyarrow as pa

        score = pa.field("score", pa.float32(), nullable=False)
        if not names_labels(spec.labels):
            return [score]
        numbers = pa.struct([pa.field(label, pa.float32(), nullable=False) for label in spec.labels])
        return [score, pa.field("label", pa.string()), pa.field("probabilities", numbers)]

    def arrow_arrays(self, results: Results, spec: EncodingSpec) -> list[Any]:
        import pyarrow as pa

        scores, best = choose_scores(results, spec.labels)
        if not names_labels(spec.labels):
            return [pa.array(scores)]
        parts = [pa.array(np.ascontiguousarray(column)) for column in results.T]
        return [
            pa.array(scores),
            pa.array([spec.labels[place] for place in best.tolist()], pa.string()),
            pa.StructArray.from_arrays(parts, fields=list(self.arrow_fields(spec)[-1].type)),
        ]

    def loaded(self, spec: EncodingSpec) -> list[LoadedColumn]:
        def encode_scores(rows: Any) -> list[bytes]:
            scores = rows.column("score").to_numpy(zero_copy_only=False).astype(">f4")
            return list(scores.view("V4").tolist())

        def encode_probabilities(rows: Any) -> list[bytes]:
            values = rows.column("probabilities").to_pylist()
            return [JSONB_VERSION + json.dumps(value, ensure_ascii=False).encode() for value in values]

        columns = [
            LoadedColumn("score", "real", encode_scores),
            LoadedColumn("label", "text", partial(encode_text, name="label")),
            LoadedColumn("probabilities", "jsonb", encode_probabilities),
        ]
        return columns if names_labels(spec.labels) else columns[:1]

    def scan(self, spec: EncodingSpec) -> tuple[str, dict[str, Any]]:
        least, most = SCALES[spec.activation]
        return SCAN_SCORES, {"least": least, "most": most}

    def compare(
        self, kept: Results, now: Results, spec: EncodingSpec, ranges: Ranges | None, tolerance: float
    ) -> dict[str, npt.NDArray[np.floating[Any]]]:
        """Return 1 minus the largest difference of a label's score, relative for scores above 1."""
        differences = np.abs(kept - now) / np.maximum(np.abs(now), 1.0)
        return {SCORE: 1.0 - differences.max(axis=1)}

    def least_agreement(self, spec: EncodingSpec) -> float:
        return LEAST_AGREEMENT_OF_SCORES


class Numbered(TypedDict):
    """A score in API results.

    `label` and `probabilities` are None for a model with one number and no labels.
    """

    score: float
    label: str | None
    probabilities: dict[str, float] | None


def names_labels(labels: tuple[str, ...]) -> bool:
    """Return True if scores are reported with their label and each label's probability."""
    return len(labels) > 1


def choose_scores(
    numbers: npt.NDArray[np.float32], labels: tuple[str, ...]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the score of each row [n] of `numbers` [n, labels], and the index of its best label [n].

    A single number is the score. With two labels the second is the positive one, and its number is the score
    (https://huggingface.co/docs/transformers/tasks/sequence_classification: 0 negative, 1 positive); with
    more it is the best label's number.
    """
    best = numbers.argmax(axis=1) if len(numbers) else np.zeros(0, dtype=np.int64)
    if len(labels) == 2:
        return numbers[:, 1], best
    return np.take_along_axis(numbers, best[:, np.newaxis], axis=1)[:, 0], best


def rank_scores(
    numbers: npt.NDArray[np.float32], labels: tuple[str, ...], limit: int | None = None
) -> list[tuple[int, float]]:
    """Return (index, score) of the rows, the best first; equal scores keep their order."""
    scores, _ = choose_scores(numbers, labels)
    order = np.argsort(-scores, kind="stable")[:limit]
    return [(place, _shorten(scores[place])) for place in order.tolist()]


def describe_numbers(numbers: npt.NDArray[np.float32], labels: tuple[str, ...]) -> list[Numbered]:
    """Return a score for each row; numbers have as many digits as float32 needs."""
    scores, best = choose_scores(numbers, labels)
    rows: list[list[Any]] = [[_shorten(number) for number in row] for row in numbers.tolist()]
    has_labels = names_labels(labels)
    return [
        {
            "score": _shorten(score),
            "label": labels[place] if has_labels else None,
            "probabilities": dict(zip(labels, row, strict=True)) if has_labels else None,
        }
        for score, place, row in zip(scores.tolist(), best.tolist(), rows, strict=True)
    ]


def _shorten(number: float) -> float:
    """Round to nine digits, which distinguish any two float32 values."""
    return float(f"{number:.9g}")
