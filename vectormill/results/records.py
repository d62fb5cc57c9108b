"""The result `record`: what a schema asks for, with its position in the text, as JSON.

A record is a path of steps from a root type of the schema to a leaf. A job returns an item's records as a list. A
collection stores them grouped by the type that they begin with, as jsonb, so that `output -> 'person'` are the records
of persons.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from vectormill.db.parameters import JSONB_VERSION, FindOid
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import RECORD
from vectormill.jobs.item import UNSTORABLE_RECORD, ItemFailure, has_nul
from vectormill.results.kind import (
    Column,
    LoadedColumn,
    Objects,
    Parts,
    Results,
    encode_jsonb,
    take_objects,
)
from vectormill.vectors.quantization import Ranges

Step = dict[str, Any]
Path = Annotated[list[Step], msgspec.Meta(min_length=1)]

_PATHS: Final = msgspec.json.Decoder(list[Path])
_GROUPED: Final = msgspec.json.Decoder(dict[str, list[msgspec.Raw]])


SCAN_RECORDS: Final = """
    SELECT count(*) AS num_rows, count(*) FILTER (WHERE is_broken) AS num_broken,
           count(*) FILTER (WHERE is_empty) AS num_empty,
           (array_agg(key) FILTER (WHERE is_broken))[1 : CAST(:limit AS integer)] AS broken_keys
      FROM (SELECT key, jsonb_typeof(output) <> 'object' AS is_broken, output = '{{}}' AS is_empty
              FROM vectormill.{table}
             WHERE ctid >= CAST(:first AS tid) AND ctid < CAST(:end AS tid)) AS scanned
"""


class Records(Objects):
    """The ResultKind of records. Results are objects [n], each JSON as bytes that jsonb accepts."""

    result = RECORD
    needs_pgvector = False
    fault = "are not objects of types"

    def columns(self, spec: EncodingSpec) -> tuple[Column, ...]:
        return (Column("output", "jsonb"),)

    def sent(self, spec: EncodingSpec, table: str) -> str:
        return f"CAST({table}.output AS text)"

    def read(self, wire: Any, spec: EncodingSpec) -> Results:
        texts: list[str] = [wire] if isinstance(wire, str) else wire
        return take_objects([text.encode() for text in texts])

    def make_fields(
        self, results: Results, spec: EncodingSpec, find_oid: FindOid
    ) -> Mapping[str, Sequence[bytes]]:
        return {"output": [JSONB_VERSION + output for output in results]}

    def keep(
        self, found: Mapping[int, bytes], spec: EncodingSpec
    ) -> tuple[Mapping[int, bytes], Mapping[int, ItemFailure]]:
        """Group each record; those that jsonb refuses fail."""
        grouped, failures = {}, {}
        for item, record in found.items():
            try:
                grouped[item] = group_records(record)
            except UnstorableRecord as error:
                failures[item] = ItemFailure(UNSTORABLE_RECORD, str(error))
        return grouped, failures

    def keep_again(self, results: Results) -> Results:
        return take_objects([None if record is None else group_records(record) for record in results])

    def deliver(self, results: Results) -> Results:
        return take_objects([None if output is None else list_records(output) for output in results])

    def write(self, results: Results, spec: EncodingSpec) -> list[Parts]:
        return [[b',"output":', output] for output in results]

    def arrow_fields(self, spec: EncodingSpec) -> list[Any]:
        import pyarrow as pa

        return [pa.field("output", pa.string(), nullable=False)]

    def arrow_arrays(self, results: Results, spec: EncodingSpec) -> list[Any]:
        import pyarrow as pa

        return [pa.array([output.decode() for output in results], pa.string())]

    def loaded(self, spec: EncodingSpec) -> list[LoadedColumn]:
        return [LoadedColumn("output", "jsonb", partial(encode_jsonb, name="output"))]

    def scan(self, spec: EncodingSpec) -> tuple[str, dict[str, Any]]:
        return SCAN_RECORDS, {}

    def compare(
        self, kept: Results, now: Results, spec: EncodingSpec, ranges: Ranges | None, tolerance: float
    ) -> dict[str, npt.NDArray[np.floating[Any]]]:
        """Return 1 for records that are equal up to the tolerance of their numbers, and 0 for others."""
        pairs = zip(kept.tolist(), now.tolist(), strict=True)
        return {
            RECORD: np.array(
                [float(are_alike(json.loads(one), json.loads(other), tolerance)) for one, other in pairs]
            )
        }

    def least_agreement(self, spec: EncodingSpec) -> float:
        return 1.0


def are_alike(first: Any, second: Any, tolerance: float) -> bool:
    """Return True if two records are equal up to small differences of confidences, which vary by batch."""
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, abs_tol=tolerance)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            are_alike(first[name], second[name], tolerance) for name in first
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(
            are_alike(*pair, tolerance) for pair in zip(first, second, strict=True)
        )
    return bool(first == second)


class UnstorableRecord(Exception):
    """The item's records cannot be stored in a collection; the message says why."""


def group_records(output: bytes) -> bytes:
    """Return an item's list of records grouped by the type that each begins with, in their given order.

    Raises UnstorableRecord for what jsonb would reject: NUL, half of a surrogate pair, or anything but a list
    of paths.
    """
    grouped: dict[str, list[Path]] = {}
    try:
        for path in _PATHS.decode(output):
            grouped.setdefault(path[0]["type"], []).append(path)
        encoded = msgspec.json.encode(grouped)
    except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError) as error:
        raise UnstorableRecord(f"the records cannot be stored as JSON: {error}") from error
    if has_nul(encoded):
        raise UnstorableRecord("the records contain a NUL character (U+0000), which Postgres cannot store")
    return encoded


def list_records(grouped: bytes) -> bytes:
    """Return grouped records as a list again, type by type in the order of their code points."""
    by_type = _GROUPED.decode(grouped)
    return msgspec.json.encode([path for name in sorted(by_type) for path in by_type[name]])
