"""Query vectors: what a collection's rows are compared with, in the terms of its vector type; and rows read back."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.db.rows.attributes import attributes_name
from vectormill.db.rows.calibrations import find_ranges
from vectormill.domain.collection import Generation
from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8
from vectormill.domain.errors import ItemNotFound
from vectormill.vectors.vector_types import choose_vector_type

# The distance is of the column as it is, so that an index on it can serve: cosine for floats, differing bits for
# binary. int8 codes are restored first, since every dimension has a scale and an offset of its own.
RESTORED: Final = "(CAST({column} AS vector) * CAST(:steps AS vector) + CAST(:offsets AS vector))"
DISTANCES: Final[Mapping[str, str]] = {
    FLOAT32: "vectors.embedding <=> CAST(:query AS vector)",
    FLOAT16: "vectors.embedding <=> CAST(:query AS halfvec)",
    INT8: f"{RESTORED.format(column='vectors.embedding')} <=> CAST(:query AS vector)",
    BINARY: "vectors.embedding <~> CAST(:query AS bit({dimensions}))",
}


@dataclass(frozen=True, slots=True)
class QueryVector:
    """A distance to `vectors.embedding` as SQL, what it binds, and what a distance of 1 takes from the score.

    `document` is that of the row the vector was taken from, if it is a passage of one.
    """

    distance: str
    values: dict[str, object]
    unit: float
    document: str | None = None


# One row. A passage knows its document.
FIND_LIKE: Final = """
    SELECT CAST({embedding} AS text) AS embedding, attributes.document
      FROM vectormill.{table} AS vectors
      LEFT JOIN vectormill.{attributes} AS attributes ON attributes.key = vectors.key
     WHERE vectors.key = :key
"""


def make_query_vector(
    connection: Connection,
    generation: Generation,
    embedding: npt.NDArray[np.float32] | None,
    like: str | None,
) -> QueryVector | None:
    """Of a finite float32 [dimensions], or of the row whose key is `like`. None while an int8 collection has no ranges.

    Raises ItemNotFound.
    """
    spec = generation.spec
    kind = choose_vector_type(spec, in_collection=True).name
    values: dict[str, object] = {}
    if kind == INT8:
        ranges = find_ranges(connection, spec)
        if ranges is None:
            return None  # measured before the first row is written
        values |= {"steps": write_vector(ranges.steps), "offsets": write_vector(ranges.offsets)}
    document = None
    if like is not None:
        values["query"], document = find_like(connection, generation, kind, like, values)
    else:
        assert embedding is not None, "a search without a row that it is like has a vector"
        values["query"] = write_signs(embedding) if kind == BINARY else write_vector(embedding)
    distance = DISTANCES[kind].format(dimensions=spec.dimensions)
    return QueryVector(distance, values, 2 / spec.dimensions if kind == BINARY else 1.0, document)


def find_like(
    connection: Connection, generation: Generation, kind: str, key: str, values: Mapping[str, object]
) -> tuple[str, str | None]:
    """The row's vector, as the distance reads it, and its document. Raises ItemNotFound."""
    column = "vectors.embedding"
    statement = FIND_LIKE.format(
        embedding=RESTORED.format(column=column) if kind == INT8 else column,
        table=generation.table_name,
        attributes=attributes_name(generation.id),
    )
    row = connection.execute(text(statement), {"key": key, **values}).one_or_none()
    if row is None:
        raise ItemNotFound(
            f"Collection {generation.collection!r} has no item with the key {key!r}, so nothing can be like it."
        )
    return row.embedding, row.document


def write_vector(values: npt.NDArray[np.float32]) -> str:
    """A finite vector as pgvector reads it, which is as a JSON array: in a tenth of the time that `repr` takes."""
    return msgspec.json.encode(values.tolist()).decode()


def write_signs(values: npt.NDArray[np.float32]) -> str:
    """A binary vector as Postgres reads it: whether each value is above 0."""
    return "".join("01"[sign] for sign in (values > 0).tolist())


def read_vector(written: str, generation: Generation) -> list[Any]:
    """A row's embedding as text, in the numbers that an export gives: floats, int8 codes, or eight bits to a number."""
    kind = choose_vector_type(generation.spec, in_collection=True).name
    if kind == BINARY:
        packed: list[Any] = np.packbits(np.array(list(written), dtype=np.uint8)).tolist()
        return packed
    numbers = json.loads(written)
    return [int(number) for number in numbers] if kind == INT8 else [float(number) for number in numbers]
