"""Matches: run searches in Postgres, each by the same steps, whatever it compares.

| step         | module              | what it does |
| ------------ | ------------------- | ------------ |
| candidates   | rankings            | the best rows by vectors, sparse weights or words, or by several fused |
| exact scores | late_interaction    | MaxSim of the candidates, or of all rows, if multi-vectors are compared |
| groups       | rankings            | the best row of each document, if the search is by document |
| page         | rankings            | the rows from offset on, with the included columns |

The steps are repeated with more candidates, and in the end with all, until the page has as many rows as exist and were
asked for, or until the deadline: then the answer is what was found, and says so.

One statement runs one search, or a batch: several searches that differ only in their vectors. For a collection of a few
thousand rows, planning and the round trip of a statement cost as much as the search itself.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import psycopg
from sqlalchemy import Connection, Row, TextClause, text
from sqlalchemy.exc import DBAPIError

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, estimate_num_rows
from vectormill.collections.operations import find_passage
from vectormill.domain.errors import Conflict, SearchTimeout, TextsNotKept
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.jobs.item import PASSAGE
from vectormill.search.filter import list_fields
from vectormill.search.late_interaction import BestRows, score_rows
from vectormill.search.operations import MatchBody, SearchAnswer
from vectormill.search.query_vectors import (
    Query,
    QueryVector,
    find_representations,
    make_query_vector,
    make_sparse_query,
    read_vector,
)
from vectormill.search.rankings import (
    Depth,
    PlannedReading,
    Plans,
    Ranking,
    Statement,
    count_ranked,
    write_batch,
    write_given,
)
from vectormill.search.search import (
    BY_VECTOR,
    DEPTH,
    MAX_OFFSET,
    METADATA,
    TEXT,
    VECTOR,
    Deadline,
    Search,
    check_search,
)
from vectormill.vectors.representations import Representations

# The most searches in one statement, which keeps its vectors and rows small.
MAX_BATCH_SEARCHES: Final = 32
# A search for more rows than this runs alone.
MOST_ROWS: Final = 100
# Without an index, searches in larger tables run alone: then Postgres scans the table with several processes
# (min_parallel_table_scan_size), which it does not do within a lateral join.
MOST_ROWS_READ: Final = 10_000
# A document may have several passages among the nearest rows. A search by document first ranks as many rows as one
# whose rankings are fused, and these times its tier if they hold too few documents.
PASSAGES_PER_DOCUMENT: Final = 32
OVER: Final = "the time of the request was over before this search ended"
# This share of the time, and at most so many seconds, is left for the page of what was found until then.
PAGE_SHARE: Final = 0.1
MOST_PAGE_SECONDS: Final = 1.0
# A statement may end later than the deadline by this share of the time, or by a tenth of a second, which saves a round
# trip for each.
SLACK_SHARE: Final = 0.05
LEAST_SLACK_SECONDS: Final = 0.1

SearchWithVector = tuple[Search, Query]

# These settings last until the transaction ends. The time-out ends a statement at the deadline. The iterative scan lets
# an index return more rows than its candidates; relaxed order is enough, since the statement sorts the rows. Custom
# plans make sure that the explained plan is the one that runs.
PREPARE_SEARCH: Final = text("""
    SELECT set_config('statement_timeout', :timeout, true),
           set_config('hnsw.iterative_scan', 'relaxed_order', true),
           set_config('hnsw.ef_search', CAST(CAST(:num_candidates AS integer) AS text), true),
           set_config('plan_cache_mode', 'force_custom_plan', true)
""")
FIND_CANDIDATES: Final = text("SELECT nullif(current_setting('hnsw.ef_search', true), '')")

# When nothing was found, so many fields are looked for in so many rows: some milliseconds at most.
MOST_FIELDS_SOUGHT: Final = 10
FIND_MISSING_FIELDS: Final = """
    SELECT field FROM unnest(CAST(:fields AS text[])) AS field
     WHERE NOT EXISTS (SELECT 1 FROM (SELECT metadata FROM vectormill.{attributes} LIMIT 2000) AS row
                        WHERE row.metadata ? field)
"""

# BM25 has no order for a query that is satisfied without any of its words, whose tree is T or empty.
FIND_LANGUAGE: Final = text("""
    SELECT keep_text, 'pg_catalog.' || language AS language, CAST(CAST(indexrelid AS regclass) AS text) AS bm25
      FROM vectormill.collections
      LEFT JOIN pg_index ON indexrelid = to_regclass('vectormill.' || :name || '_search_' || language) AND indisvalid
       AND querytree(websearch_to_tsquery(CAST('pg_catalog.' || language AS regconfig), :words)) NOT IN ('T', '')
     WHERE id = :collection_id
""")


@dataclass(frozen=True, slots=True)
class Found:
    """The page that one attempt of a search found in rankings of `num_ranked` rows, None for all.

    `counts` are the rows that the rankings gave, by their names.
    """

    search: Search
    num_ranked: int | None
    rows: Sequence[Row[Any]]
    reading: PlannedReading
    counts: Mapping[str, int]
    incomplete_because: str | None = None

    @property
    def shortage(self) -> str | None:
        """Return the reason why the search may have more or better results; None if it has none."""
        search, num_ranked = self.search, self.num_ranked
        is_full = len(self.rows) == search.limit
        if num_ranked is None or not search.num_rankings or (is_full and not search.needs_depth):
            return None
        is_cut = not self.rows or max(self.counts.values()) >= num_ranked
        if search.by_document and is_cut and not is_full:
            return f"the {num_ranked:,} nearest passages belong to fewer documents than requested"
        fewest = min((self.counts.get(name, 0) for name in self.reading.by_index), default=num_ranked)
        if fewest < num_ranked:
            which = "" if search.condition is None else " that satisfy the filter"
            return f"the index returned only {fewest:,} of {num_ranked:,} rows{which}"
        return None


def find_matches(
    connection: Connection,
    generation: Generation,
    searches: Sequence[SearchWithVector],
    deadline: Deadline | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[SearchAnswer]:
    """Return the nearest rows of each search, best first. A search by vector comes with finite float32 [dimensions].

    Nearest means the highest cosine similarity, or the largest inner product if the collection compares by it; of bits
    it is the cosine of the signs, 1 - 2 × the share that differs. With an HNSW index (pgvector 0.8 or newer) the rows
    are approximately the nearest, but never fewer. By default there are 30 seconds for all searches together, and for
    `check`, which is called first. Raise SearchTimeout if the deadline comes before anything is found (without an index
    a search reads every row), InvalidOption, TextsNotKept, ItemNotFound, Conflict if the generation is removed
    meanwhile, and the errors of `check`.
    """
    for search, _ in searches:
        check_search(search)
    finder = Finder(connection, generation, deadline or Deadline(30.0))
    found: list[SearchAnswer | None] = [None] * len(searches)
    with finder.explaining(searches[0][0]):
        check()
    try:
        for places in divide_into_batches([search for search, _ in searches]):
            if len(places) > 1:
                together = finder.find_batch([searches[place] for place in places])
                for place, nearest in zip(places, together, strict=True):
                    found[place] = nearest
            for place in places:
                if found[place] is None:
                    found[place] = finder.find_one(*searches[place])
    except SearchTimeout:
        if not any(found):
            raise
    return [answer or SearchAnswer(data=[], num_rows_read=None, incomplete_because=OVER) for answer in found]


def find_batch_key(search: Search) -> Hashable | None:
    """Return the key that searches must share to run in one statement; None for a search that must run alone.

    The number of rows is part of the key, since an index scan for more rows may find nearer ones.
    """
    is_bare = (
        search.mode == BY_VECTOR and search.like is None and search.outputs == (DENSE,) and search.is_sliced
    )
    if not is_bare or VECTOR in search.include or search.offset or search.limit > MOST_ROWS:
        return None
    # The repr tells 1 from True, which are equal in Python.
    return search.limit, search.ef_search, search.include, repr(search.condition)


def divide_into_batches(searches: Sequence[Search]) -> list[list[int]]:
    """Group the indices of the searches into batches, each of which one statement runs."""
    batches: list[list[int]] = []
    open_batches: dict[Hashable, list[int]] = {}
    for place, search in enumerate(searches):
        batch_key = find_batch_key(search)
        together = None if batch_key is None else open_batches.get(batch_key)
        if together is None or len(together) == MAX_BATCH_SEARCHES:
            together = []
            batches.append(together)
            if batch_key is not None:
                open_batches[batch_key] = together
        together.append(place)
    return batches


class Finder:
    """Runs the searches of one call, within its deadline."""

    def __init__(self, connection: Connection, generation: Generation, deadline: Deadline) -> None:
        self._connection = connection
        self._generation = generation
        self._deadline = deadline
        self._plans = Plans(connection, generation)
        self._num_candidates: int | None = None  # as prepared, with the time that was left then
        self._prepared_seconds = 0.0
        self._is_aborted = False  # True after a time-out, until the transaction is rolled back
        self._slack_seconds = max(SLACK_SHARE * deadline.seconds, LEAST_SLACK_SECONDS)
        self._page_seconds = min(PAGE_SHARE * deadline.seconds, MOST_PAGE_SECONDS)

    def find_batch(self, searches: Sequence[SearchWithVector]) -> list[SearchAnswer | None]:
        """Run the searches of one batch in one statement. The result is None for each search that must run alone."""
        first, _ = searches[0]
        embeddings = [embedding for _, embedding in searches if isinstance(embedding, np.ndarray)]
        with self.explaining(first):
            queries = make_query_vector(self._connection, self._generation, embeddings)
            if queries is None:
                return [SearchAnswer(data=[], num_rows_read=0) for _ in searches]
            write = partial(write_batch, self._generation, first, queries)
            statement, reading = self._plans.choose(write, Depth(first.limit))
            if (reading.num_rows_read or 0) > MOST_ROWS_READ:
                return [None for _ in searches]
            rows = self._run(first, statement)
            pages: list[list[Row[Any]]] = [[] for _ in searches]
            for row in rows:
                pages[row.place - 1].append(row)
            found = [
                Found(search, first.limit, page, reading, count_ranked(page))
                for (search, _), page in zip(searches, pages, strict=True)
            ]
            return [None if each.shortage else self._tell(each) for each in found]

    def find_one(self, search: Search, query: Query) -> SearchAnswer:
        """Run one search, with more candidates and in the end with all of them, until its page is full."""
        with self.explaining(search):
            asked = self._connection, self._generation, search
            words = find_language(*asked) if search.reads_words else (None, None)
            document = None
            self._prepare(search)
            if search.like is not None and set(search.outputs) - {DENSE}:
                query, document = find_representations(self._connection, self._generation, search.like)
            queries = make_queries(*asked, query, document)
            if queries is None:
                return SearchAnswer(data=[], num_rows_read=0)
            ranking = Ranking(self._generation, search, queries, *words)
            depths = plan_attempts(search)
            found = self._try(ranking, query, document, depths[0])
            tried, repeated_because = depths[0], None
            for depth in depths[1:]:
                if found.shortage is None or found.incomplete_because:
                    break
                if not (depth.is_exact or depth.in_parts or found.reading.by_index & {"sparse", "text"}):
                    continue  # the statement would be the last one
                more, shortage = None, found.shortage
                with suppress(SearchTimeout), self.explaining(search):
                    more = self._try(ranking, query, document, depth)
                if more is None and not found.rows:
                    raise self._make_timeout()
                if more is None or (more.incomplete_because and len(more.rows) < len(found.rows)):
                    reason = f"{shortage}, and there was no time to read more"
                    found = replace(found, incomplete_because=reason)
                    break
                if found.reading.by_index and not depth.in_parts:
                    repeated_because = shortage
                found, tried = more, depth
            differ = None
            with suppress(SearchTimeout), self.explaining(search):
                differ = self._compare_pages(ranking, found, is_first=tried is depths[0])
            return self._tell(found, repeated_because, differ)

    def _try(self, ranking: Ranking, query: Query, document: str | None, depth: Depth) -> Found:
        """Return the page that the rankings of this depth give. Raise SearchTimeout if nothing is found in time."""
        search = ranking.search
        self._prepare(search)
        if isinstance(query, Representations) and MULTI_VECTOR in search.outputs:
            return self._score(ranking, query.vectors, document, depth)
        statement, reading = self._plans.choose(ranking.write_page, depth)
        rows = self._run(search, statement)
        return Found(search, depth.num_ranked, rows, reading, count_ranked(rows))

    def _score(
        self, ranking: Ranking, query: npt.NDArray[np.float16], document: str | None, depth: Depth
    ) -> Found:
        """Return the page of the candidates, or of all rows, by MaxSim, as far as there was time for it."""
        search, candidates, incomplete_because = ranking.search, None, None
        if search.num_rankings:
            candidates, reading = self._plans.choose(ranking.write_candidates, depth)
        else:
            num_rows = estimate_num_rows(self._connection, self._generation.table_name)
            reading = PlannedReading(frozenset(), num_rows, None)
        best = BestRows(search.num_wanted, by_document=search.by_document)
        try:
            # After a time-out only the savepoint is rolled back, so the page of the best rows can still be read.
            with self._connection.begin_nested(), self.explaining(search, self._page_seconds):
                for _ in score_rows(
                    self._connection, self._generation, search, query, candidates, document, best
                ):
                    self._prepare(search, self._page_seconds)
        except SearchTimeout:
            if not best.num_seen:
                raise
            self._is_aborted = False
            whole = f"about {reading.num_rows_read:,} rows" if reading.num_rows_read else "all rows"
            whole = "the candidates" if candidates is not None else whole
            incomplete_because = f"there was only time to compare {best.num_seen:,} of {whole}"
            reading = replace(reading, num_rows_read=best.num_seen)
        # The page has the time that was spared, and what was set in the savepoint is gone.
        self._num_candidates = None
        rows = self._run(search, write_given(self._generation, search, best.read_scores()))
        return Found(search, depth.num_ranked, rows, reading, best.counts, incomplete_because)

    def _run(self, search: Search, statement: Statement) -> Sequence[Row[Any]]:
        self._prepare(search)
        return self._connection.execute(read_statement(statement.sql), statement.values).all()

    def _prepare(self, search: Search, spare_seconds: float = 0.0) -> None:
        """Set the time-out to what is left, and the candidates of an index. Raise SearchTimeout at the deadline.

        Settings last until the transaction ends, so they are sent again only for other ones, or for less time.
        """
        seconds = self._deadline.seconds_left - spare_seconds
        if seconds <= 0 or self._is_aborted:
            raise self._make_timeout()
        num_candidates = search.num_candidates
        if search.ef_search is None:  # a larger ef_search in the server's settings stays
            num_candidates = max(num_candidates, find_own_candidates(self._connection))
        if num_candidates != self._num_candidates or self._prepared_seconds - seconds > self._slack_seconds:
            settings = {"num_candidates": num_candidates, "timeout": f"{math.ceil(1000 * seconds)}ms"}
            self._connection.execute(PREPARE_SEARCH, settings).all()
            self._num_candidates, self._prepared_seconds = num_candidates, seconds

    def _compare_pages(self, ranking: Ranking, found: Found, *, is_first: bool) -> str | None:
        """Return the reason why the page may have rows of the pages before it, or miss some; None for a first page."""
        search, by_index = ranking.search, found.reading.by_index - {"text"}
        if not (search.offset and search.num_rankings and found.rows) or found.incomplete_because:
            return None
        before = replace(search, offset=0)
        first, depth = replace(ranking, search=before), plan_attempts(before)[0]
        write = first.write_candidates if MULTI_VECTOR in search.outputs else first.write_page
        _, reading = self._plans.choose(write, depth)
        first_by_index = reading.by_index - {"text"}
        is_whole = (
            not by_index and depth.num_ranked is not None and max(found.counts.values()) < depth.num_ranked
        )
        is_alike = is_first and (before.tier == search.tier or search.is_sliced)
        is_alike &= not by_index or before.num_candidates == search.num_candidates
        if by_index == first_by_index and (is_alike or is_whole or not (by_index or search.needs_depth)):
            return None
        if by_index != first_by_index:
            return "an index found the rows of this page or those of the first one, and not both"
        return "this page was cut from longer rankings than the first one"

    def _tell(
        self, found: Found, repeated_because: str | None = None, pages_differ_because: str | None = None
    ) -> SearchAnswer:
        search = found.search
        matches = [make_match(row, search, self._generation) for row in found.rows]
        if search.min_score is not None:
            matches = [match for match in matches if match["score"] >= search.min_score]
        answer = SearchAnswer(data=matches, num_rows_read=found.reading.num_rows_read)
        if len(matches) == search.limit and search.num_wanted <= MAX_OFFSET:
            answer["next_offset"] = search.num_wanted
        if found.reading.num_rows_unindexed is not None:
            answer["num_rows_unindexed"] = found.reading.num_rows_unindexed
        if repeated_because is not None:
            answer["repeated_because"] = repeated_because
        if found.incomplete_because is not None:
            answer["incomplete_because"] = found.incomplete_because
        elif not matches and search.condition is not None:
            fields = {"fields": sorted(list_fields(search.condition))[:MOST_FIELDS_SOUGHT]}
            sought = FIND_MISSING_FIELDS.format(attributes=attributes_name(self._generation.id))
            with suppress(SearchTimeout), self.explaining(search):
                missing = list(self._connection.execute(read_statement(sought), fields).scalars())
                answer |= {"missing_fields": missing} if missing else {}
        if pages_differ_because is not None:
            answer["pages_differ_because"] = pages_differ_because
        return answer

    def _make_timeout(self) -> SearchTimeout:
        name = self._generation.collection
        return SearchTimeout(
            f"Searching {name!r} took more than {self._deadline.seconds:g} s and was stopped before anything was "
            f"found. `vectormill collections index {name}` shows the indexes; without one every row is read, and "
            "`--policy hnsw --wait` builds one."
        )

    @contextmanager
    def explaining(self, search: Search, spare_seconds: float = 0.0) -> Iterator[None]:
        """Prepare the search, and run the block.

        Raise SearchTimeout for a cancelled statement of the block, and Conflict for a table that no longer exists.
        """
        try:
            self._prepare(search, spare_seconds)
            yield
        except (DBAPIError, psycopg.Error) as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            if isinstance(cause, psycopg.errors.QueryCanceled):
                self._is_aborted = True
                raise self._make_timeout() from error
            if isinstance(cause, psycopg.errors.UndefinedTable):
                name = self._generation.collection
                raise Conflict(
                    f"The generation of {name!r} was removed during the search; search again."
                ) from error
            raise


def find_own_candidates(connection: Connection) -> int:
    """Return hnsw.ef_search of the server's settings, or 0; it is read once per connection, before it is set."""
    if "ef_search" not in connection.info:
        connection.info["ef_search"] = int(connection.execute(FIND_CANDIDATES).scalar_one() or 0)
    own: int = connection.info["ef_search"]
    return own


def plan_attempts(search: Search) -> list[Depth]:
    """Return how deep the rankings of each attempt are, from the first one on.

    A query of rare words matches fewer rows than the index is asked for: then its weights alone are compared exactly
    before everything is.
    """
    depth = DEPTH * search.tier if search.needs_depth or search.by_document else search.tier
    if search.is_sliced:
        depth = search.limit
    if search.by_document:
        many = PASSAGES_PER_DOCUMENT * search.tier
        return [
            Depth(depth),
            Depth(many),
            Depth(many, in_parts=False),
            Depth(None, is_exact=True, in_parts=False),
        ]
    return [Depth(depth), Depth(depth, in_parts=False), Depth(depth, is_exact=True, in_parts=False)]


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
        dense = query.dense if isinstance(query, Representations) else query
        own = [] if dense is None else [dense]
        near = make_query_vector(connection, generation, own, search.like if dense is None else None)
        if near is None:
            return None
        queries["vector"] = replace(near, document=near.document or document)
    if SPARSE in search.ranked_outputs:
        assert isinstance(query, Representations)
        queries["sparse"] = make_sparse_query(generation, query, document)
    return queries


def make_match(row: Row[Any], search: Search, generation: Generation) -> MatchBody:
    """Return a match with the parts that the search includes."""
    found = row._mapping
    match = MatchBody(key=row.key, score=float(row.score))
    if METADATA in search.include:
        match["metadata"] = found["metadata"]
    if TEXT in search.include:
        match["text"] = found["text"]
    if VECTOR in search.include:
        match["embedding"] = read_vector(found["embedding"], generation)
    if isinstance(row.passage, dict):
        match["document"], match["passage"] = find_passage({PASSAGE: row.passage})
    if search.is_fused and MULTI_VECTOR not in search.outputs:
        match["vector_rank"] = found["vector_rank"]
        if search.reads_words:
            match["text_rank"] = found["text_rank"]
        if SPARSE in search.outputs:
            match["sparse_rank"] = found["sparse_rank"]
    return match


def find_language(connection: Connection, generation: Generation, search: Search) -> tuple[str, str | None]:
    """Return the configuration of text search, and the index that ranks the words, if any. Raise TextsNotKept."""
    values = {"collection_id": generation.collection_id, "words": search.words}
    values["name"] = attributes_name(generation.id)
    row = connection.execute(FIND_LANGUAGE, values).one_or_none()
    if row is None or not row.keep_text:
        raise TextsNotKept(
            f"Collection {generation.collection!r} does not keep texts, so it cannot be searched by words. Run "
            f"`vectormill collections change {generation.collection} --keep-text` to keep new texts, and index the "
            "earlier ones again, or search by vector."
        )
    return row.language, row.bm25


@functools.lru_cache(maxsize=512)
def read_statement(sql: str) -> TextClause:
    """Return the SQL as a TextClause; the cache saves parsing it for parameters again."""
    return text(sql)
