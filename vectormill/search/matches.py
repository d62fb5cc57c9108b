"""Matches: run searches in Postgres, and read from their plans if an index found the rows.

One statement runs one search, or a round: several searches that differ in little but their vectors. For a collection of
a few thousand rows, planning and the round trip of a statement cost as much as the search itself."""

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from sqlalchemy import Connection, Row, TextClause, text
from sqlalchemy.exc import OperationalError, ProgrammingError

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, estimate_num_rows
from vectormill.collections.indexes import count_unindexed
from vectormill.domain.errors import Conflict, SearchTimeout, TextsNotKept
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.search.filter import Filter, list_fields
from vectormill.search.late_interaction import score_rows
from vectormill.search.query_vectors import (
    QueryVector,
    find_representations,
    make_query_vector,
    make_query_vectors,
    make_sparse_query,
    read_vector,
)
from vectormill.search.rankings import Ranking, Statement, write_given, write_round
from vectormill.search.search import BY_TEXT, BY_VECTOR, VECTOR, Match, Nearest, Search, check_search
from vectormill.vectors.representations import Representations

# Up to this number, rows are found by an index on their metadata and compared exactly within a few milliseconds.
FEW_ROWS: Final = 2000
# Bound values that do not influence the plan of a search.
UNPLANNED: Final = ("query", "queries", "sparse", "words", "own")


@dataclass(frozen=True, slots=True)
class PlannedReading:
    """The plan of Postgres for a search: the rankings by vector index, and about how many rows are read without one.

    `num_filtered` is the estimated number of rows from an index on metadata or words; None if no such index is used.
    `num_rows_unindexed` is the number of rows that are read beside the index of sparse weights; None without it.
    """

    by_index: frozenset[str]
    num_rows_read: int | None
    num_filtered: int | None
    num_rows_unindexed: int | None = None

    @property
    def is_by_index(self) -> bool:
        return bool(self.by_index)


UNREAD: Final = PlannedReading(frozenset(), None, None)


class Plans:
    """A cache of EXPLAIN results: statements that differ only in their vectors or words are explained once."""

    def __init__(self, connection: Connection, generation: Generation) -> None:
        self._connection = connection
        self._generation = generation
        self._readings: dict[tuple[str, str], PlannedReading] = {}

    def choose(
        self, write: Callable[..., Statement], *, is_exact: bool, is_filtered: bool, in_parts: bool = True
    ) -> tuple[Statement, PlannedReading]:
        """Return the statement to run, made by `write`, and its plan. It is exact if requested, or if a filter leaves
        few rows.

        With `in_parts`, sparse weights are searched among the rows that their index has and among the others. Without
        that index, or if it is not worth it, each part would read all rows, so they are searched as one.

        The planner underestimates the vector index if the filter removes most of its rows: 12 ms instead of 3 ms where
        200 of 20,000 rows satisfy the filter, and some of the nearest are missed.
        """
        statement = write(is_exact=is_exact, in_parts=in_parts)
        reading = self.explain(statement)
        if in_parts and "sparse" in statement.values and "sparse" not in reading.by_index:
            statement = write(is_exact=is_exact)
            reading = self.explain(statement)
        if reading.is_by_index and is_filtered:
            exact = write(is_exact=True)
            exactly = self.explain(exact)
            if exactly.num_filtered is not None and exactly.num_filtered <= FEW_ROWS:
                return exact, exactly
        return statement, reading

    def explain(self, statement: Statement) -> PlannedReading:
        values = {name: value for name, value in statement.values.items() if name not in UNPLANNED}
        kind = (statement.sql, repr(values))
        if kind not in self._readings:
            self._readings[kind] = self._read_plan(statement)
        return self._readings[kind]

    def _read_plan(self, statement: Statement) -> PlannedReading:
        explained = text(f"EXPLAIN (FORMAT JSON) {statement.sql}")
        (plan,) = self._connection.execute(explained, statement.values).scalar_one()
        nodes = list(walk_plan(plan["Plan"]))
        table, attributes = self._generation.table_name, attributes_name(self._generation.id)
        of_attributes = [node for node in nodes if node.get("Relation Name") == attributes]
        served = [node for node in of_attributes if is_by_own_index(node, f"{attributes}_pkey")]
        num_filtered = max((int(node["Plan Rows"]) for node in served), default=None)
        ordered = [node["Order By"] for node in nodes if "Order By" in node]
        by_index = frozenset("sparse" if "sparse <#>" in order else "vector" for order in ordered)
        if "sparse" in by_index:
            return PlannedReading(by_index, None, num_filtered, count_unindexed(self._connection, table))
        if by_index:
            return PlannedReading(by_index, None, num_filtered)
        whole = [node for node in nodes if is_scan(node) and node["Relation Name"] == table]
        if whole and num_filtered is None:  # all parallel processes together
            num_processes = 1 + max(int(node.get("Workers Planned", 0)) for node in nodes)
            num_rows = max(int(node["Plan Rows"]) for node in whole) * num_processes
            if any("Filter" in node for node in whole):  # the estimate is of the rows that remain
                num_rows = max(num_rows, estimate_num_rows(self._connection, table) or 0)
            return PlannedReading(by_index, num_rows, None)
        if any(is_scan(node) and "Filter" in node for node in of_attributes):
            num_rows = estimate_num_rows(self._connection, attributes) or 0
            return PlannedReading(by_index, num_rows, num_filtered)
        return PlannedReading(by_index, None, num_filtered)


def is_scan(node: Mapping[str, Any]) -> bool:
    """Return whether the plan node scans a whole table."""
    return bool(node["Node Type"] == "Seq Scan")


def is_by_own_index(node: Mapping[str, Any], primary_key: str) -> bool:
    """Return whether the plan node finds rows by an index other than the primary key."""
    below = [inner for inner in walk_plan(node) if "Index Name" in inner]
    return any(inner["Index Name"] != primary_key for inner in below)


def walk_plan(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the plan node and all nodes below it."""
    yield node
    for below in node.get("Plans", ()):
        yield from walk_plan(below)


# The most searches in one statement, which keeps its vectors and rows small.
MOST_TOGETHER: Final = 32
# A search for more rows than this runs alone.
MOST_ROWS: Final = 100
# Without an index, searches in larger tables run alone: then Postgres scans the table with several processes
# (min_parallel_table_scan_size), which it does not do within a lateral join.
MOST_ROWS_READ: Final = 10_000

# A query is its dense vector, or several outputs.
SearchWithVector = tuple[Search, npt.NDArray[np.float32] | Representations | None]


def find_company(search: Search) -> Hashable | None:
    """Return the key that searches must share to run in one statement; None for a search that must run alone.

    The number of rows is part of the key, since an index scan for more rows may find nearer ones.
    """
    is_bare = search.mode == BY_VECTOR and search.like is None and not search.by_document
    is_bare &= search.outputs == (DENSE,)
    if not is_bare or VECTOR in search.include or search.num_wanted > MOST_ROWS:
        return None
    # The repr tells 1 from True, which are equal in Python.
    return search.num_wanted, search.ef_search, search.include, repr(search.condition)


def divide_into_rounds(searches: Sequence[Search]) -> list[list[int]]:
    """Group the indices of the searches into rounds, each of which one statement runs."""
    rounds: list[list[int]] = []
    open_rounds: dict[Hashable, list[int]] = {}
    for place, search in enumerate(searches):
        company = find_company(search)
        together = None if company is None else open_rounds.get(company)
        if together is None or len(together) == MOST_TOGETHER:
            together = []
            rounds.append(together)
            if company is not None:
                open_rounds[company] = together
        together.append(place)
    return rounds


def cut_pages(searches: Sequence[Search], rows: Iterable[Any]) -> list[list[Any]]:
    """Return the rows of each search's page. A row's `place` is the number of its search, from 1; rows are in order."""
    of_place: Mapping[int, list[Any]] = {place: [] for place in range(1, len(searches) + 1)}
    for row in rows:
        of_place[row.place].append(row)
    return [
        found[search.offset : search.num_wanted]
        for search, found in zip(searches, of_place.values(), strict=True)
    ]


# hnsw.ef_search is the number of candidates of an index scan: 40 by pgvector's default, at most 1,000. If it equals the
# number of wanted rows, the last of these are often missed: of 20,000 random vectors, the worst case, 200 candidates
# held 73 % of the 200 nearest, and 400 held 93 %.
LEAST_CANDIDATES: Final = 100
CANDIDATES_PER_ROW: Final = 2
MOST_CANDIDATES: Final = 1000
# Each ranking of a hybrid search has this many rows, since a row far down in one may come first after fusion.
LEAST_FUSED: Final = 100
FUSED_PER_ROW: Final = 4
# A document may have several passages among the nearest rows. A search by document first reads 4 times its limit, then
# 32 times if these hold too few documents.
PASSAGES_PER_DOCUMENT: Final = (4, 32)


# These settings last until the transaction ends. The time-out ends searches whose client has gone. The iterative scan
# lets an index return more rows than its candidates; relaxed order is enough, since the statement sorts the rows. A
# larger ef_search in the server's settings stays. Custom plans make sure that the explained plan is the one that runs.
PREPARE_SEARCH: Final = text("""
    SELECT set_config('statement_timeout', :timeout, true),
           set_config('hnsw.iterative_scan', 'relaxed_order', true),
           set_config('hnsw.ef_search', CAST(greatest(
               CAST(:num_candidates AS integer), CAST(nullif(current_setting('hnsw.ef_search', true), '') AS integer)
           ) AS text), true),
           set_config('plan_cache_mode', 'force_custom_plan', true)
""")
SET_CANDIDATES: Final = text("SELECT set_config('hnsw.ef_search', CAST(:num_candidates AS text), true)")

# When nothing was found, so many fields are looked for in so many rows: some milliseconds at most.
MOST_FIELDS_SOUGHT: Final = 10
FIND_MISSING_FIELDS: Final = """
    SELECT field FROM unnest(CAST(:fields AS text[])) AS field
     WHERE NOT EXISTS (SELECT 1 FROM (SELECT metadata FROM vectormill.{attributes} LIMIT 2000) AS row
                        WHERE row.metadata ? field)
"""

FIND_LANGUAGE: Final = text(
    "SELECT keep_text, language FROM vectormill.collections WHERE id = :collection_id"
)


def find_matches(
    connection: Connection,
    generation: Generation,
    searches: Sequence[SearchWithVector],
    *,
    timeout_seconds: float = 30.0,
) -> list[Nearest]:
    """Return the nearest rows of each search, best first. A search by vector comes with finite float32 [dimensions].

    Nearest means the highest cosine similarity, or the largest inner product if the collection compares by it; of bits
    it is the cosine of the signs, 1 - 2 × the share that differs. With an HNSW index (pgvector 0.8 or newer) the rows
    are approximately the nearest, but never fewer. Raise SearchTimeout if all searches together take too long (without
    an index a search reads every row),
    InvalidOption, TextsNotKept, ItemNotFound, and Conflict if the generation is removed meanwhile.
    """
    deadline = time.monotonic() + timeout_seconds
    plans = Plans(connection, generation)
    prepared = None

    def prepare_for(search: Search) -> None:
        nonlocal prepared
        seconds = max(deadline - time.monotonic(), 0.001)
        # Settings last until the transaction ends, so they are only sent again for other values; the remaining time is
        # rounded up to seconds for that reason.
        wanted = (search.num_wanted, search.ef_search, math.ceil(seconds))
        if wanted != prepared:
            prepare(connection, search, seconds)
            prepared = wanted

    for search, _ in searches:
        check_search(search)
    found: list[Nearest | None] = [None] * len(searches)
    with explaining(generation, timeout_seconds):
        for places in divide_into_rounds([search for search, _ in searches]):
            if len(places) > 1:
                prepare_for(searches[places[0]][0])
                together = [searches[place] for place in places]
                for place, nearest in zip(
                    places, find_round(connection, generation, together, plans), strict=True
                ):
                    found[place] = nearest
            for place in places:
                if found[place] is None:
                    search, embedding = searches[place]
                    prepare_for(search)
                    found[place] = find_one(connection, generation, search, embedding, plans)
        return [
            nearest
            if nearest.matches or search.condition is None
            else replace(
                nearest, missing_fields=find_missing_fields(connection, generation, search.condition)
            )
            for nearest, (search, _) in zip(found, searches, strict=True)
            if nearest is not None
        ]


def find_missing_fields(connection: Connection, generation: Generation, condition: Filter) -> list[str]:
    """Return the fields of a filter that none of the first rows of the collection has."""
    fields = sorted(list_fields(condition))[:MOST_FIELDS_SOUGHT]
    sought = FIND_MISSING_FIELDS.format(attributes=attributes_name(generation.id))
    return list(connection.execute(read_statement(sought), {"fields": fields}).scalars())


def prepare(connection: Connection, search: Search, timeout_seconds: float) -> None:
    num_candidates = choose_num_candidates(search.num_wanted)
    timeout = f"{math.ceil(timeout_seconds * 1000)}ms"
    connection.execute(PREPARE_SEARCH, {"timeout": timeout, "num_candidates": num_candidates}).all()
    if search.ef_search is not None:
        connection.execute(SET_CANDIDATES, {"num_candidates": search.ef_search}).all()


def find_round(
    connection: Connection, generation: Generation, searches: Sequence[SearchWithVector], plans: Plans
) -> list[Nearest | None]:
    """Run the searches of one round in one statement. The result is None for each search that must run alone."""
    first, _ = searches[0]
    whole = replace(first, limit=first.num_wanted, offset=0)
    embeddings = [embedding for _, embedding in searches if isinstance(embedding, np.ndarray)]
    queries = make_query_vectors(connection, generation, embeddings)
    if queries is None:
        return [Nearest([], 0) for _ in searches]
    write = partial(write_round, generation, whole, queries)
    statement, reading = plans.choose(write, is_exact=False, is_filtered=whole.condition is not None)
    if (reading.num_rows_read or 0) > MOST_ROWS_READ:
        return [None for _ in searches]
    rows = connection.execute(read_statement(statement.sql), statement.values).all()
    pages = cut_pages([search for search, _ in searches], rows)
    return [
        make_nearest(page, search, generation, reading)
        if find_shortage(search, reading, page, whole.limit) is None
        else None
        for (search, _), page in zip(searches, pages, strict=True)
    ]


def find_one(
    connection: Connection,
    generation: Generation,
    search: Search,
    query: npt.NDArray[np.float32] | Representations | None,
    plans: Plans,
) -> Nearest:
    """Run one search, repeatedly with more rows and finally with all, until its page is full."""
    language = find_language(connection, generation) if search.reads_words else None
    document = None
    if search.like is not None and set(search.outputs) - {DENSE}:
        query, document = find_representations(connection, generation, search.like)
    queries = make_queries(connection, generation, search, query, document)
    if queries is None:
        return Nearest([], 0)
    if MULTI_VECTOR in search.outputs:
        assert isinstance(query, Representations)
        num_candidates = max(LEAST_FUSED, FUSED_PER_ROW * search.num_wanted)
        candidates, reading = None, UNREAD
        if search.num_rankings:
            best = Ranking(generation, search, queries, num_candidates, language)
            candidates, reading = plans.choose(
                best.write_keys, is_exact=False, is_filtered=search.condition is not None
            )
        else:
            reading = replace(UNREAD, num_rows_read=estimate_num_rows(connection, generation.table_name))
        scores = score_rows(connection, generation, search, query.vectors, candidates, document)
        given = write_given(generation, search, scores)
        page = connection.execute(read_statement(given.sql), given.values).all()
        return make_nearest(page, search, generation, reading)
    rows: Sequence[Row[Any]] = []
    reading = UNREAD
    shortage: str | None = None
    repeated_because: str | None = None
    for num_ranked, is_exact, in_parts in plan_attempts(search):
        if not (is_exact or in_parts or "sparse" in reading.by_index):
            continue  # the statement would be the last one
        repeated_because = None if in_parts or search.mode == BY_TEXT else shortage
        ranking = Ranking(generation, search, queries, num_ranked, language)
        statement, reading = plans.choose(
            ranking.write_page, is_exact=is_exact, is_filtered=search.condition is not None, in_parts=in_parts
        )
        rows = connection.execute(read_statement(statement.sql), statement.values).all()
        shortage = find_shortage(search, reading, rows, num_ranked)
        if shortage is None:
            break
    return make_nearest(rows, search, generation, reading, repeated_because)


def make_queries(
    connection: Connection,
    generation: Generation,
    search: Search,
    query: npt.NDArray[np.float32] | Representations | None,
    document: str | None,
) -> dict[str, QueryVector] | None:
    """Return a query for each ranking by an output; None if an int8 collection has no ranges yet, and so no rows.

    `document` is that of the row that the search is like, if it is a passage. Raise ItemNotFound.
    """
    queries: dict[str, QueryVector] = {}
    if DENSE in search.ranked_outputs:
        is_packed = isinstance(query, Representations)
        dense = query.dense if isinstance(query, Representations) else query
        near = make_query_vector(connection, generation, dense, None if is_packed else search.like)
        if near is None:
            return None
        queries["vector"] = replace(near, document=document) if is_packed else near
    if SPARSE in search.ranked_outputs:
        assert isinstance(query, Representations)
        queries["sparse"] = make_sparse_query(generation, query, document)
    return queries


def plan_attempts(search: Search) -> list[tuple[int | None, bool, bool]]:
    """Return the attempts of a search: how many rows each one ranks (None for all), and two conditions.

    They say whether it must be exact, and whether sparse weights are searched in parts. A query of rare words matches
    fewer rows than the index is asked for: then its weights alone are compared exactly before everything is.
    """
    num_wanted = search.num_wanted
    num_ranked = max(LEAST_FUSED, FUSED_PER_ROW * num_wanted) if search.is_fused else num_wanted
    if search.by_document:
        few, many = (factor * num_ranked for factor in PASSAGES_PER_DOCUMENT)
        return [(few, False, True), (many, False, True), (many, False, False), (None, True, False)]
    return [(num_ranked, False, True), (num_ranked, False, False), (num_ranked, True, False)]


def find_shortage(
    search: Search, reading: PlannedReading, rows: Sequence[Row[Any]], num_ranked: int | None
) -> str | None:
    """Return the reason why the search may have more results than `rows`; None if these are complete."""
    num_nearest = rows[0].num_nearest if rows else 0
    found = {"vector": num_nearest, "sparse": rows[0]._mapping.get("num_weighed", num_nearest) if rows else 0}
    is_full = len(rows) == search.limit
    if is_full and not search.is_fused:
        return None
    is_cut = num_ranked is not None and (max(found.values()) >= num_ranked or not rows)
    if search.by_document and is_cut and not is_full:
        return f"the {num_ranked:,} nearest passages belong to fewer documents than requested"
    # Fusion needs the whole ranking, not only as many rows as the page.
    num_wanted = num_ranked if search.is_fused or search.by_document else search.num_wanted
    fewest = min((found[name] for name in reading.by_index), default=None)
    if fewest is not None and num_wanted is not None and fewest < num_wanted:
        which = "" if search.condition is None else " that satisfy the filter"
        return f"the index returned only {fewest:,} of {num_wanted:,} rows{which}"
    return None


def make_nearest(
    rows: Sequence[Row[Any]],
    search: Search,
    generation: Generation,
    reading: PlannedReading,
    repeated_because: str | None = None,
) -> Nearest:
    matches = [make_match(row, search, generation) for row in rows]
    if search.min_score is not None:
        matches = [match for match in matches if match.score >= search.min_score]
    return Nearest(matches, reading.num_rows_read, repeated_because, reading.num_rows_unindexed)


def make_match(row: Row[Any], search: Search, generation: Generation) -> Match:
    shown = row._mapping
    written = shown.get("embedding")
    return Match(
        row.key,
        float(row.score),
        metadata=shown.get("metadata"),
        text=shown.get("text"),
        embedding=None if written is None else read_vector(written, generation),
        passage=row.passage if isinstance(row.passage, dict) else None,
        vector_rank=shown.get("vector_rank"),
        text_rank=shown.get("text_rank"),
        sparse_rank=shown.get("sparse_rank"),
    )


def find_language(connection: Connection, generation: Generation) -> str:
    """Return the text search configuration of the collection's texts. Raise TextsNotKept if it keeps none."""
    row = connection.execute(FIND_LANGUAGE, {"collection_id": generation.collection_id}).one_or_none()
    if row is None or not row.keep_text:
        raise TextsNotKept(
            f"Collection {generation.collection!r} does not keep texts, so it cannot be searched by words. Run "
            f"`vectormill collections change {generation.collection} --keep-text` to keep new texts, and index the "
            "earlier ones again, or search by vector."
        )
    return f"pg_catalog.{row.language}"


@contextmanager
def explaining(generation: Generation, timeout_seconds: float) -> Iterator[None]:
    """Raise SearchTimeout for a cancelled statement of the block, and Conflict for a table that no longer exists."""
    try:
        yield
    except OperationalError as error:
        if not isinstance(error.orig, psycopg.errors.QueryCanceled):
            raise
        raise SearchTimeout(
            f"Searching {generation.collection!r} took more than {timeout_seconds:g} s and was stopped. Without an "
            f"index every row is read: `vectormill collections index {generation.collection}` says why there is none, "
            "and with `--policy hnsw --wait` builds one."
        ) from error
    except ProgrammingError as error:
        if not isinstance(error.orig, psycopg.errors.UndefinedTable):
            raise
        raise Conflict(
            f"The generation of {generation.collection!r} was removed during the search; search again."
        ) from error


@functools.lru_cache(maxsize=512)
def read_statement(sql: str) -> TextClause:
    """Return the SQL as a TextClause; the cache saves parsing it for parameters again."""
    return text(sql)


def choose_num_candidates(num_wanted: int) -> int:
    return min(MOST_CANDIDATES, max(LEAST_CANDIDATES, CANDIDATES_PER_ROW * num_wanted))
