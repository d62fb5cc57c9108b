"""Query vectors: write the vectors of searches in a collection's vector type, and read vectors of rows back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, find_ranges
from vectormill.collections.index_plan import BY_PRODUCT, IS_INDEXED, IS_TOO_LONG, choose_comparison
from vectormill.collections.row_kinds import kept_type
from vectormill.db.parameters import WireArray, accept_arrays, find_type, open_array
from vectormill.db.session import driver_of
from vectormill.domain.encoding import BINARY, FLOAT32, INT8
from vectormill.domain.errors import ItemNotFound
from vectormill.vectors.representations import Representations, unpack
from vectormill.vectors.vector_types import (
    VECTOR_TYPE_BY_NAME,
    VectorType,
    make_column_rows,
    write_columns,
)

# The SQL name of a query's vector in a statement for many searches.
ASKED: Final = "asked.query"
SPARSE_DISTANCE: Final = "vectors.sparse <#> CAST(:sparse AS sparsevec)"


@dataclass(frozen=True, slots=True)
class QueryVector:
    """The vector of one search, or of many, in SQL: its distance to that of a row of `vectors`, and the bound values.

    `score` is the SQL of the score by the distance. Only rows that fulfil `conditions` are found. With `parts`,
    conditions of which each row fulfils one, rows are found for each of these, by an index on its rows. If the vector
    is that of a row which is a passage, `document` is its document. `array` is the SQL of all vectors; for many
    searches the distance is to ASKED, one of these.
    """

    distance: str
    score: str
    values: dict[str, object]
    document: str | None = None
    array: str = ""
    conditions: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


# Read what the row of a key has in SQL, and its document if it is a passage.
FIND_LIKE: Final = """
    SELECT {wanted} AS found, attributes.document
      FROM vectormill.{table} AS vectors
      LEFT JOIN vectormill.{attributes} AS attributes ON attributes.key = vectors.key
     WHERE vectors.key = :key
"""


def make_query_vector(
    connection: Connection,
    generation: Generation,
    embeddings: Sequence[npt.NDArray[np.float32]],
    like: str | None = None,
) -> QueryVector | None:
    """Make the query of one or many vectors, each finite float32 [dimensions], or of the row with the key `like`.

    Return None if an int8 collection has no ranges yet, and so no rows. Raise ItemNotFound.
    """
    spec = generation.spec
    kind, comparison = kept_type(spec).name, choose_comparison(spec)
    values: dict[str, object] = {}
    if kind == INT8:
        ranges = find_ranges(connection, spec)
        if ranges is None:
            return None  # no row has been written, since ranges are measured before
        values = {"steps": write_vector(ranges.steps), "offsets": write_vector(ranges.offsets)}
    if like is not None:
        wanted = f"CAST({comparison.column} AS text)"
        values["query"], document = find_like(connection, generation, like, wanted, values)
        compared = comparison.write(f"CAST(:query AS {comparison.query_type})")
        return QueryVector(compared, comparison.score, values, document)
    wire = VECTOR_TYPE_BY_NAME[kind if kind != INT8 else FLOAT32]  # int8 codes are compared as floats
    values["queries"] = write_queries(connection, np.stack(embeddings), wire)
    array = f"CAST(:queries AS {comparison.query_type}[])"
    query = ASKED if len(embeddings) > 1 else f"({array})[1]"
    return QueryVector(comparison.write(query), comparison.score, values, array=array)


def make_sparse_query(generation: Generation, query: Representations, document: str | None) -> QueryVector:
    """Make the query of a sparse vector. Rows that share no word with it have the product 0, and are not found."""
    pairs = zip((query.indices + 1).tolist(), query.weights.tolist(), strict=True)  # its text counts from 1
    words = ",".join(f"{place}:{weight:.9g}" for place, weight in pairs)
    return QueryVector(
        SPARSE_DISTANCE,
        BY_PRODUCT,
        {"sparse": f"{{{words}}}/{generation.spec.sparse_dimensions}"},
        document,
        conditions=(f"({SPARSE_DISTANCE}) < 0",),
        parts=(IS_INDEXED, IS_TOO_LONG),
    )


def find_representations(
    connection: Connection, generation: Generation, key: str
) -> tuple[Representations, str | None]:
    """Return the outputs of the row `key`, and its document or None. Raise ItemNotFound."""
    kind = open_kind(driver_of(connection), generation.spec)
    outputs, document = find_like(connection, generation, key, kind.sent(generation.spec, "vectors"), {})
    return unpack(kind.read(outputs, generation.spec)[0]), document


def write_queries(connection: Connection, embeddings: npt.NDArray[np.float32], kind: VectorType) -> WireArray:
    """Encode float32 [queries, dimensions] as a Postgres array in binary format, a tenth of the size of text."""
    dimensions, oids = embeddings.shape[1], connection.info.setdefault("array_types", {})
    if kind.column not in oids:  # the first query of this connection
        driver = driver_of(connection)
        accept_arrays(driver)
        with driver.cursor() as cursor:
            oids[kind.column] = find_type(cursor, kind.column)
    array, columns = open_array(oids[kind.column], len(embeddings), kind.column_bytes(dimensions))
    with np.errstate(over="ignore"):  # Postgres refuses infinity
        write_columns(columns, make_column_rows(embeddings, kind, None), kind, dimensions)
    return array


def find_like(
    connection: Connection, generation: Generation, key: str, wanted: str, values: Mapping[str, object]
) -> tuple[Any, str | None]:
    """Return the value of the SQL `wanted` for the row `key`, and its document or None. Raise ItemNotFound."""
    statement = FIND_LIKE.format(
        wanted=wanted, table=generation.table_name, attributes=attributes_name(generation.id)
    )
    row = connection.execute(text(statement), {"key": key, **values}).one_or_none()
    if row is None:
        raise ItemNotFound(f"Collection {generation.collection!r} has no item {key!r} to compare with.")
    return row.found, row.document


def write_vector(values: npt.NDArray[np.float32]) -> str:
    """Return a finite vector as pgvector parses it, a JSON array; this takes a tenth of the time of `repr`."""
    return msgspec.json.encode(values.tolist()).decode()


def read_vector(written: str, generation: Generation) -> list[Any]:
    """Parse a row's embedding to the numbers of an export: floats, int8 codes, or bytes of eight bits each."""
    kind = kept_type(generation.spec).name
    if kind == BINARY:
        packed: list[Any] = np.packbits(np.array(list(written), dtype=np.uint8)).tolist()
        return packed
    numbers = json.loads(written)
    return [int(number) for number in numbers] if kind == INT8 else [float(number) for number in numbers]
