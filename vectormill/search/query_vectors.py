"""Query vectors: what a collection's rows are compared with, in the terms of its vector type; and rows read back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, find_ranges
from vectormill.db.parameters import WireArray, accept_arrays, find_type, open_array
from vectormill.domain.encoding import BINARY, FLOAT16, FLOAT32, INT8
from vectormill.domain.errors import ItemNotFound
from vectormill.vectors.vector_types import (
    VECTOR_TYPE_BY_NAME,
    VectorType,
    choose_vector_type,
    make_column_rows,
    write_columns,
)


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between a row's vector and a query's: `column operator query`, the query being of
    `query_type`.
    """

    column: str
    operator: str
    query_type: str


# The distance is of the column as it is, so that an index on it can serve: cosine for floats, differing bits for
# binary. int8 codes are restored first, since every dimension has a scale and an offset of its own.
RESTORED: Final = "(CAST({column} AS vector) * CAST(:steps AS vector) + CAST(:offsets AS vector))"
DISTANCES: Final[Mapping[str, Distance]] = {
    FLOAT32: Distance("vectors.embedding", "<=>", "vector"),
    FLOAT16: Distance("vectors.embedding", "<=>", "halfvec"),
    INT8: Distance(RESTORED.format(column="vectors.embedding"), "<=>", "vector"),
    BINARY: Distance("vectors.embedding", "<~>", "bit({dimensions})"),
}
# The name of one search's query in a statement for many.
ASKED: Final = "asked.query"


@dataclass(frozen=True, slots=True)
class QueryVector:
    """A distance to `vectors.embedding` as SQL, what it binds, and what a distance of 1 takes from the score.

    `document` is that of the row the vector was taken from, if it is a passage of one. Of many searches at once,
    `array` is the SQL of all their vectors, and the distance that to ASKED, an element of it.
    """

    distance: str
    values: dict[str, object]
    unit: float
    document: str | None = None
    array: str = ""


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
    """Make a query vector of finite float32 [dimensions], or of the row `like`. None while an int8 collection
    has no ranges.

    Raises ItemNotFound.
    """
    kind, distance = choose_distance(generation)
    values = load_ranges(connection, generation, kind)
    if values is None:
        return None
    document = None
    if like is not None:
        values["query"], document = find_like(connection, generation, kind, like, values)
    else:
        assert embedding is not None, "a search without a row that it is like has a vector"
        values["query"] = write_query(embedding, kind)
    compared = f"{distance.column} {distance.operator} CAST(:query AS {distance.query_type})"
    return QueryVector(compared, values, find_unit(generation, kind), document)


def make_query_vectors(
    connection: Connection, generation: Generation, embeddings: Sequence[npt.NDArray[np.float32]]
) -> QueryVector | None:
    """Make query vectors of finite float32 [dimensions] each. None while an int8 collection has no ranges."""
    kind, distance = choose_distance(generation)
    values = load_ranges(connection, generation, kind)
    if values is None:
        return None
    wire = VECTOR_TYPE_BY_NAME[kind if kind != INT8 else FLOAT32]  # whose codes are compared as floats
    values["queries"] = write_queries(connection, np.stack(embeddings), wire)
    return QueryVector(
        f"{distance.column} {distance.operator} {ASKED}",
        values,
        find_unit(generation, kind),
        array=f"CAST(:queries AS {distance.query_type}[])",
    )


def write_queries(connection: Connection, embeddings: npt.NDArray[np.float32], kind: VectorType) -> WireArray:
    """Return float32 [queries, dimensions] in binary form: as digits they would be ten times as long."""
    dimensions = embeddings.shape[1]
    array, columns = open_array(
        find_oid(connection, kind.column), len(embeddings), kind.column_bytes(dimensions)
    )
    with np.errstate(over="ignore"):  # Postgres refuses what is infinite
        write_columns(columns, make_column_rows(embeddings, kind, None), kind, dimensions)
    return array


def find_oid(connection: Connection, type_name: str) -> int:
    """Find the oid of a type of which statements are to have arrays. Asked once a connection."""
    known: dict[str, int] = connection.info.setdefault("array_types", {})
    if type_name not in known:
        driver = connection.connection.driver_connection
        assert driver is not None
        accept_arrays(driver)
        with driver.cursor() as cursor:
            known[type_name] = find_type(cursor, type_name)
    return known[type_name]


def choose_distance(generation: Generation) -> tuple[str, Distance]:
    """Return the vector type of a collection's rows, and how they are compared."""
    kind = choose_vector_type(generation.spec, in_collection=True).name
    distance = DISTANCES[kind]
    return kind, replace(
        distance, query_type=distance.query_type.format(dimensions=generation.spec.dimensions)
    )


def load_ranges(connection: Connection, generation: Generation, kind: str) -> dict[str, object] | None:
    """Load what the distance binds beside the query. None while an int8 collection has no ranges."""
    if kind != INT8:
        return {}
    ranges = find_ranges(connection, generation.spec)
    if ranges is None:
        return None  # measured before the first row is written
    return {"steps": write_vector(ranges.steps), "offsets": write_vector(ranges.offsets)}


def find_unit(generation: Generation, kind: str) -> float:
    return 2 / generation.spec.dimensions if kind == BINARY else 1.0


def write_query(embedding: npt.NDArray[np.float32], kind: str) -> str:
    return write_signs(embedding) if kind == BINARY else write_vector(embedding)


def find_like(
    connection: Connection, generation: Generation, kind: str, key: str, values: Mapping[str, object]
) -> tuple[str, str | None]:
    """Return the row's vector as the distance reads it, and its document. Raise ItemNotFound."""
    column = "vectors.embedding"
    statement = FIND_LIKE.format(
        embedding=RESTORED.format(column=column) if kind == INT8 else column,
        table=generation.table_name,
        attributes=attributes_name(generation.id),
    )
    row = connection.execute(text(statement), {"key": key, **values}).one_or_none()
    if row is None:
        raise ItemNotFound(
            f"Collection {generation.collection!r} has no item with the key {key!r}, so nothing can be compared "
            "with it."
        )
    return row.embedding, row.document


def write_vector(values: npt.NDArray[np.float32]) -> str:
    """Return a finite vector as pgvector reads it, a JSON array: in a tenth of the time that `repr` takes."""
    return msgspec.json.encode(values.tolist()).decode()


def write_signs(values: npt.NDArray[np.float32]) -> str:
    """Return a binary vector as Postgres reads it: 1 for each value above 0."""
    return "".join("01"[sign] for sign in (values > 0).tolist())


def read_vector(written: str, generation: Generation) -> list[Any]:
    """Return a row's embedding in the numbers that an export gives: floats, int8 codes, or eight bits to a number."""
    kind = choose_vector_type(generation.spec, in_collection=True).name
    if kind == BINARY:
        packed: list[Any] = np.packbits(np.array(list(written), dtype=np.uint8)).tolist()
        return packed
    numbers = json.loads(written)
    return [int(number) for number in numbers] if kind == INT8 else [float(number) for number in numbers]
