"""Late interaction: score rows by the multi-vectors of query and row, in bounded memory.

The score is MaxSim: for each token of the query the largest inner product with any token of the row, summed over the
query's tokens. Source: Khattab and Zaharia, ColBERT, SIGIR 2020, section 3.2.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Row, text

from vectormill.collections.codebooks import open_kind
from vectormill.collections.collection import Generation
from vectormill.db.session import driver_of
from vectormill.results.representations import ManyRepresentations
from vectormill.search.filter_sql import compile_filter
from vectormill.search.rankings import Statement, count_ranked, leave_out_own, name_tables
from vectormill.search.search import Search
from vectormill.vectors.representations import limit_rows

# Postgres leaves the attributes out where neither the condition nor the document is asked for.
READ_ROWS: Final = """
    SELECT vectors.key, array_send(vectors.multi_vector) AS halves, vectors.multi_vector_codes AS codes,
           {document} AS document
      FROM vectormill.{table} AS vectors
      LEFT JOIN vectormill.{attributes} AS attributes USING (key)
     WHERE {condition}
"""
IS_CANDIDATE: Final = "vectors.key = ANY(CAST(:keys AS text[]))"
# This many rows beyond twice the kept ones are collected before the worse ones are dropped.
SPARE_ROWS: Final = 100


@dataclass(slots=True)
class BestRows:
    """The best of any number of rows, or the best row of each of the best documents, in bounded memory.

    `num_seen` is the number of rows that were scored, and `counts` has the number of candidates of each ranking.
    """

    num_kept: int
    by_document: bool
    num_seen: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    _best: dict[str, tuple[float, str]] = field(
        default_factory=dict
    )  # by key or document: the order and key of a row

    def add(self, key: str, document: str | None, score: float) -> None:
        self.num_seen += 1
        group, row = (document or key) if self.by_document else key, (-score, key)
        if group not in self._best or row < self._best[group]:
            self._best[group] = row
            if len(self._best) > 2 * self.num_kept + SPARE_ROWS:
                self._drop()

    def read_scores(self) -> dict[str, float]:
        """Return the scores of the rows by their keys, best first."""
        self._drop()
        return {key: -order for order, key in self._best.values()}

    def _drop(self) -> None:
        ordered = sorted(self._best.items(), key=lambda each: each[1])
        self._best = dict(ordered[: self.num_kept])


def score_rows(
    connection: Connection,
    generation: Generation,
    search: Search,
    query: npt.NDArray[np.float16],
    candidates: Statement | None,
    document: str | None,
    best: BestRows,
) -> Iterator[None]:
    """Add rows with their MaxSim with `query` [tokens, width] to `best`; the iterator stops after each block of rows.

    `candidates` is the statement of their keys; None means every row that passes the filter. The row that the search is
    like is left out, by document with its whole document.
    """
    kind = open_kind(driver_of(connection), generation.spec)
    assert isinstance(kind, ManyRepresentations)
    own = query.astype(np.float32)
    if candidates is None:
        conditions, values = leave_out_own(search, document)
        condition = compile_filter(search.condition, "attributes.metadata")
        statement = write_rows(generation, search, " AND ".join([condition.sql, *conditions]))
        blocks = _read_blocks(connection, generation, statement, values | condition.values)
    else:
        blocks = _read_candidates(connection, generation, search, candidates, best)
    with closing(blocks):
        for rows in blocks:
            vectors = [kind.read_tokens(row.halves, row.codes, generation.spec) for row in rows]
            for row, score in zip(rows, measure_maxsim(own, vectors).tolist(), strict=True):
                best.add(row.key, row.document, score)
            yield


def write_rows(generation: Generation, search: Search, condition: str) -> str:
    document = "attributes.document" if search.by_document else "NULL"
    return READ_ROWS.format(document=document, condition=condition, **name_tables(generation))


def _read_blocks(
    connection: Connection, generation: Generation, statement: str, values: Mapping[str, object]
) -> Generator[Sequence[Row[Any]]]:
    """Yield the rows of a statement in blocks whose vectors fit into memory, from a cursor on the server."""
    num_rows = limit_rows(generation.spec.token_dimensions)
    options = {"yield_per": num_rows}
    with connection.execute(text(statement), values, execution_options=options) as rows:
        yield from rows.partitions(num_rows)


def _read_candidates(
    connection: Connection, generation: Generation, search: Search, candidates: Statement, best: BestRows
) -> Generator[Sequence[Row[Any]]]:
    statement = text(write_rows(generation, search, IS_CANDIDATE))
    for found in _read_blocks(connection, generation, candidates.sql, candidates.values):
        best.counts = best.counts or count_ranked(found)
        yield connection.execute(statement, {"keys": [row.key for row in found]}).all()


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
