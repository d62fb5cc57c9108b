"""Late interaction: score rows by the multi-vectors of query and row, in bounded memory.

The score is MaxSim: for each token of the query the largest inner product with any token of the row, summed over the
query's tokens. Source: Khattab and Zaharia, ColBERT, SIGIR 2020, section 3.2.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.search.filters import compile_filter
from vectormill.search.rankings import Statement, leave_out_own, name_tables
from vectormill.search.search import Search
from vectormill.vectors.representations import read_vectors

# The rows whose token vectors are compared at once: 100 of 300 tokens and 128 dimensions are 15 MB as float32.
ROWS_AT_ONCE: Final = 100

# A page by document is made of this many times as many of the best rows, since a document may have several among them.
PASSAGES_PER_DOCUMENT: Final = 32

READ_CANDIDATES: Final = """
    SELECT vectors.key, array_send(vectors.multi_vector) AS vectors
      FROM vectormill.{table} AS vectors
     WHERE vectors.key = ANY(CAST(:keys AS text[]))
"""
READ_ALL: Final = """
    SELECT vectors.key, array_send(vectors.multi_vector) AS vectors
      FROM vectormill.{table} AS vectors
      LEFT JOIN vectormill.{attributes} AS attributes USING (key)
     WHERE {condition}
"""


def score_rows(
    connection: Connection,
    generation: Generation,
    search: Search,
    query: npt.NDArray[np.float16],
    candidates: Statement | None,
    document: str | None,
) -> dict[str, float]:
    """Return the MaxSim of rows with `query` [tokens, width], by key.

    `candidates` is the statement of their keys; None means every row that passes the filter, of which only the best
    are returned. The row that the search is like is left out, by document with its whole document.
    """
    own = query.astype(np.float32)
    if candidates is not None:
        keys = list(connection.execute(text(candidates.sql), candidates.values).scalars())
        return dict(_score(_read_candidates(connection, generation, keys), own, generation))
    scored = _score(_read_all(connection, generation, search, document), own, generation)
    num_kept = search.num_wanted * (PASSAGES_PER_DOCUMENT if search.by_document else 1)
    return dict(heapq.nsmallest(num_kept, scored, key=lambda row: (-row[1], row[0])))


def _read_candidates(
    connection: Connection, generation: Generation, keys: Sequence[str]
) -> Iterator[tuple[str, bytes]]:
    statement = text(READ_CANDIDATES.format(table=generation.table_name))
    for start in range(0, len(keys), ROWS_AT_ONCE):
        for row in connection.execute(statement, {"keys": list(keys[start : start + ROWS_AT_ONCE])}):
            yield row.key, bytes(row.vectors)


def _read_all(
    connection: Connection, generation: Generation, search: Search, document: str | None
) -> Iterator[tuple[str, bytes]]:
    """Yield every row that passes the filter, from a cursor on the server."""
    conditions, values = leave_out_own(search, document)
    if search.condition is not None:
        condition = compile_filter(search.condition, "attributes.metadata")
        conditions.append(condition.sql)
        values |= condition.values
    statement = READ_ALL.format(condition=" AND ".join(["true", *conditions]), **name_tables(generation))
    rows = connection.execute(text(statement), values, execution_options={"yield_per": ROWS_AT_ONCE})
    for row in rows:
        yield row.key, bytes(row.vectors)


def _score(
    rows: Iterator[tuple[str, bytes]], query: npt.NDArray[np.float32], generation: Generation
) -> Iterator[tuple[str, float]]:
    while batch := list(islice(rows, ROWS_AT_ONCE)):
        vectors = [read_vectors(wire, generation.spec.token_dimensions) for _, wire in batch]
        scores = measure_maxsim(query, vectors)
        yield from zip((key for key, _ in batch), scores.tolist(), strict=True)


def measure_maxsim(
    query: npt.NDArray[np.float32], rows: Sequence[npt.NDArray[np.float16]]
) -> npt.NDArray[np.float32]:
    """Return the MaxSim [n] of `query` [tokens, width] with each of n rows [t, width]; 0 for a row without tokens."""
    scores = np.zeros(len(rows), np.float32)
    filled = [place for place, row in enumerate(rows) if len(row)]
    if filled and len(query):
        tokens = np.concatenate([rows[place] for place in filled]).astype(np.float32)
        starts = np.cumsum([0, *(len(rows[place]) for place in filled[:-1])])
        scores[filled] = np.maximum.reduceat(tokens @ query.T, starts, axis=0).sum(axis=1)
    return scores
