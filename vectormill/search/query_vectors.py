"""Query vectors: write the vectors of searches in a collection's vector type, and read vectors of rows back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, find_ranges
from vectormill.collections.index_plan import IS_INDEXED, IS_TOO_LONG, choose_comparison
from vectormill.db.parameters import WireArray, accept_arrays, find_type, open_array
from vectormill.db.session import driver_of
from vectormill.domain.errors import InvalidOption, ItemNotFound
from vectormill.domain.task import DENSE
from vectormill.domain.vector_type import BY_PRODUCT, DOT, VectorType
from vectormill.search.operations import SearchQuery, list_given
from vectormill.vectors.representations import MAX_WEIGHTS, Representations, unpack
from vectormill.vectors.vector_types import make_column_rows, write_columns

# The SQL name of a query's vector in a statement for many searches.
ASKED: Final = "asked.query"
# The largest float16, the type in which vectors of tokens are stored.
LARGEST_NUMBER: Final = float(np.finfo(np.float16).max)

# A query is its dense vector, or several outputs.
Query = npt.NDArray[np.float32] | Representations | None

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
    comparison = choose_comparison(spec)
    values: dict[str, object] = {}
    if spec.kept_type.has_ranges:
        ranges = find_ranges(connection, spec)
        if ranges is None:
            return None  # no row has been written, since ranges are measured before
        values = {"steps": write_vector(ranges.steps), "offsets": write_vector(ranges.offsets)}
    if like is not None:
        wanted = f"CAST({comparison.column} AS text)"
        values["query"], document = find_like(connection, generation, like, wanted, values)
        compared = comparison.write(f"CAST(:query AS {comparison.query_type})")
        return QueryVector(compared, comparison.score, values, document)
    values["queries"] = write_queries(connection, np.stack(embeddings), spec.kept_type.query)
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
    kind = generation.spec.kept_type
    if kind.is_packed:
        packed: list[Any] = np.packbits(np.array(list(written), dtype=np.uint8)).tolist()
        return packed
    return list(map(float if kind.is_float else int, json.loads(written)))


def read_own_vectors(query: SearchQuery, generation: Generation) -> Query:
    """Return a query's own vectors: the dense one alone as float32 [dimensions]. Raise InvalidOption."""
    own = Representations()
    if query.embedding is not None:
        own = replace(own, dense=read_embedding(query.embedding, generation))
    if query.sparse is not None:
        by_place = {int(place): weight for place, weight in query.sparse.items()}
        indices, weights = read_sparse(by_place, generation)
        own = replace(own, indices=indices, weights=weights)
    if query.multi_vector is not None:
        check_amount("multi_vector", len(query.multi_vector), "vectors", generation.spec.max_tokens)
        for number, vector in enumerate(query.multi_vector):
            check_length(f"multi_vector[{number}]", vector, generation.spec.token_dimensions, generation)
        tokens = check_numbers("multi_vector", query.multi_vector).astype(np.float16)  # [tokens, width]
        own = replace(own, vectors=tokens)
    given = list_given(query)
    return (own.dense if given == [DENSE] else own) if given else None


def read_embedding(values: list[float], generation: Generation) -> npt.NDArray[np.float32]:
    check_length("The embedding", values, generation.spec.dimensions, generation)
    embedding = np.array(values, dtype=np.float64)
    largest = np.abs(embedding).max(initial=0)
    if not np.isfinite(largest) or largest == 0:
        raise InvalidOption("The embedding has no direction: its numbers must be finite and not all zero.")
    if generation.spec.similarity == DOT:
        return check_numbers("embedding", values)
    # Only the direction matters, since rows are compared by angle or sign. At length 1, no number exceeds a
    # float16, and no square exceeds the float32 in which pgvector sums.
    embedding /= largest
    return (embedding / np.linalg.norm(embedding)).astype(np.float32)


def read_sparse(
    weights: dict[int, float], generation: Generation
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return the places and weights of a query's sparse vector, without those that are 0, in ascending order."""
    dimensions = generation.spec.sparse_dimensions
    if (place := max(weights, default=0)) >= dimensions:
        raise InvalidOption(
            f"sparse has the place {place}, but the vocabulary of collection {generation.collection!r} has places "
            f"from 0 to {dimensions - 1:,}."
        )
    if min(weights.values(), default=0) < 0:
        raise InvalidOption("sparse has negative weights, which no row of a collection has; leave them out.")
    places = sorted(place for place, weight in weights.items() if weight != 0)
    check_amount("sparse", len(places), "weights other than 0", MAX_WEIGHTS)
    return np.array(places, np.uint32), check_numbers("sparse", [weights[place] for place in places])


def check_length(name: str, vector: Sequence[float], dimensions: int, generation: Generation) -> None:
    """Raise InvalidOption if a vector has another length than those of the collection."""
    if len(vector) != dimensions:
        raise InvalidOption(
            f"{name} has {len(vector)} dimensions, but collection {generation.collection!r} has {dimensions}."
        )


def check_amount(name: str, amount: int, things: str, most: int) -> None:
    """Raise InvalidOption if a query has none of something, or more than a collection keeps for a text."""
    if not 0 < amount <= most:
        raise InvalidOption(f"{name} has {amount:,} {things}; it must have from 1 to {most:,}.")


def check_numbers(name: str, numbers: Any) -> npt.NDArray[np.float32]:
    """Return the numbers as an array. Raise InvalidOption for one that is not finite, or whose products may not be."""
    checked = np.array(numbers, np.float64)
    if not (np.abs(checked) <= LARGEST_NUMBER).all():  # false for NaN too
        raise InvalidOption(f"{name} has numbers that are not finite, or larger than {LARGEST_NUMBER:,.0f}.")
    return checked.astype(np.float32)
