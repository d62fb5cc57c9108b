"""Late interaction: score rows by the multi-vectors of query and row, in bounded memory.

The score is MaxSim: for each token of the query the largest inner product with any token of the row, summed over the
query's tokens. Source: Khattab and Zaharia, ColBERT, SIGIR 2020, section 3.2.
"""

import heapq
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import Generation
from vectormill.collections.row_kinds import ManyRepresentations
from vectormill.db.session import driver_of
from vectormill.search.filters import compile_filter
from vectormill.search.rankings import Statement, leave_out_own, name_tables
from vectormill.search.search import Search
from vectormill.vectors.representations import limit_rows

# A page by document is made of this many times as many of the best rows, since a document may have several among them.
PASSAGES_PER_DOCUMENT: Final = 32

# Postgres leaves the attributes out where the condition does not name them.
READ_ROWS: Final = """
    SELECT vectors.key, array_send(vectors.multi_vector) AS halves, vectors.multi_vector_codes AS codes
      FROM vectormill.{table} AS vectors
      LEFT JOIN vectormill.{attributes} AS attributes USING (key)
     WHERE {condition}
"""
IS_CANDIDATE: Final = "vectors.key = ANY(CAST(:keys AS text[]))"


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
    kind = open_kind(driver_of(connection), generation.spec)
    assert isinstance(kind, ManyRepresentations)
    if candidates is not None:
        keys = list(connection.execute(text(candidates.sql), candidates.values).scalars())
        return dict(_score(_read_candidates(connection, generation, keys), query, generation, kind))
    num_kept = search.num_wanted * (PASSAGES_PER_DOCUMENT if search.by_document else 1)
    with closing(_read_all(connection, generation, search, document)) as rows:
        scored = _score(rows, query, generation, kind)
        return dict(heapq.nsmallest(num_kept, scored, key=lambda row: (-row[1], row[0])))


def _read_candidates(
    connection: Connection, generation: Generation, keys: Sequence[str]
) -> Iterator[Row[Any]]:
    statement = text(READ_ROWS.format(condition=IS_CANDIDATE, **name_tables(generation)))
    num_rows = limit_rows(generation.spec.token_dimensions)
    for start in range(0, len(keys), num_rows):
        yield from connection.execute(statement, {"keys": list(keys[start : start + num_rows])})


def _read_all(
    connection: Connection, generation: Generation, search: Search, document: str | None
) -> Generator[Row[Any]]:
    """Yield every row that passes the filter, from a cursor on the server."""
    conditions, values = leave_out_own(search, document)
    condition = compile_filter(search.condition, "attributes.metadata")
    values |= condition.values
    statement = READ_ROWS.format(
        condition=" AND ".join([condition.sql, *conditions]), **name_tables(generation)
    )
    options = {"yield_per": limit_rows(generation.spec.token_dimensions)}
    with connection.execute(text(statement), values, execution_options=options) as rows:
        yield from rows


def _score(
    rows: Iterator[Row[Any]],
    query: npt.NDArray[np.float16],
    generation: Generation,
    kind: ManyRepresentations,
) -> Iterator[tuple[str, float]]:
    own = query.astype(np.float32)
    while batch := list(islice(rows, limit_rows(generation.spec.token_dimensions))):
        vectors = [kind.read_tokens(row.halves, row.codes, generation.spec) for row in batch]
        scores = measure_maxsim(own, vectors)
        yield from zip((row.key for row in batch), scores.tolist(), strict=True)


def measure_maxsim(
    query: npt.NDArray[np.float32], rows: Sequence[npt.NDArray[np.floating[Any]]]
) -> npt.NDArray[np.float32]:
    """Return the MaxSim [n] of `query` [tokens, width] with each of n rows [t, width]; 0 for a row without tokens."""
    scores = np.zeros(len(rows), np.float32)
    filled = [place for place, row in enumerate(rows) if len(row)]
    if filled and len(query):
        tokens = np.concatenate([rows[place] for place in filled]).astype(np.float32)
        starts = np.cumsum([0, *(len(rows[place]) for place in filled[:-1])])
        scores[filled] = np.maximum.reduceat(tokens @ query.T, starts, axis=0).sum(axis=1)
    return scores
