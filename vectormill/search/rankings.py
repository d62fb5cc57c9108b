"""Rankings: compose the SQL statements of searches from templates, and choose among them by the plans of Postgres.

A ranking is a subquery of rows (key, distance, score, …) by vector, by words, or by several fused; the
least distance comes first, and of equal ones the least key. PAGE selects one page of it, with the included columns of
each row. Keys are compared by bytes, as Python does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, Row, text

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, estimate_num_rows
from vectormill.collections.indexes import count_unindexed
from vectormill.db.session import walk_plan
from vectormill.search.filter_sql import Condition, compile_filter
from vectormill.search.query_vectors import QueryVector
from vectormill.search.search import FUSION_CONSTANT, METADATA, TEXT, VECTOR, Search

# A limit that leaves out no row; its node in a plan tells one ranking from another.
EVERY_ROW: Final = (1 << 63) - 1
BY_KEY: Final = 'key COLLATE "C"'
# Postgres takes the rows of an index for sorted by distance, which they nearly are. The sum is another expression, by
# which it sorts them.
SORTED: Final = f"distance + 0, {BY_KEY}"
# Rows by distance; an HNSW index returns them in nearly this order, which is always the same. A filter is applied to
# each row from the index, which continues until there are enough (hnsw.iterative_scan).
NEAREST: Final = """
    SELECT vectors.key, {distance} AS distance
      FROM vectormill.{table} AS vectors {join}
     WHERE {condition}
     ORDER BY {order} LIMIT CAST(:num_ranked AS bigint) OFFSET CAST(:num_skipped AS bigint)
"""
# The nearest of the rows that were found in parts, each as above.
NEAREST_OF_PARTS: Final = f"""
    SELECT key, distance FROM ({{parts}}) AS parts ORDER BY {SORTED} LIMIT CAST(:num_ranked AS bigint)
"""
# Rows that contain all words. The collection's language decides the stop words; "quotes", or and - work as in a web
# search engine.
WORDS: Final = "websearch_to_tsquery(CAST(:language AS regconfig), CAST(:words AS text))"
WORDED: Final = f"""
    SELECT attributes.key, {{distance}} AS distance
      FROM vectormill.{{attributes}} AS attributes
     WHERE attributes.search @@ {WORDS} AND {{condition}}
     ORDER BY distance, attributes.{BY_KEY} LIMIT CAST(:num_ranked AS bigint) OFFSET CAST(:num_skipped AS bigint)
"""
# Cover density, by which they are ranked, is how close together the words are; normalization 1 divides it by the
# logarithm of the text's length. BM25 is the order of an index, which ends after 100,000 rows.
COVER_DENSITY: Final = f"-CAST(ts_rank_cd(attributes.search, {WORDS}, 1) AS float8)"
BM25: Final = "(attributes.text <@> to_bm25query(CAST(:words AS text), CAST(:bm25 AS text)))"

# Postgres sorts NaN, the cosine distance of a vector without a direction, behind all numbers. Such rows, which only
# former releases stored, are left out of every ranking, as they are out of an index.
ALONE: Final = """
    SELECT key, distance, {score} AS score, count(*) OVER () AS num_{name}
      FROM ({ranking}) AS nearest WHERE distance < 'NaN'
"""
# Reciprocal rank fusion uses only positions in the rankings, since distances and ranks of words have no common scale.
FUSED: Final = """
    SELECT key, vector_rank, sparse_rank, text_rank, -score AS distance, score,
           count(vector_rank) OVER () AS num_vector, count(sparse_rank) OVER () AS num_sparse,
           count(text_rank) OVER () AS num_text
      FROM (SELECT key, min(rank) FILTER (WHERE ranking = 'vector') AS vector_rank,
                   min(rank) FILTER (WHERE ranking = 'sparse') AS sparse_rank,
                   min(rank) FILTER (WHERE ranking = 'text') AS text_rank,
                   sum(weight / (CAST(:constant AS float8) + rank)) AS score
              FROM ({rankings}) AS ranked GROUP BY key) AS fused
"""
RANKED: Final = f"""
    SELECT key, '{{name}}' AS ranking, CAST(:{{name}}_weight AS float8) AS weight,
           row_number() OVER (ORDER BY {SORTED}) AS rank
      FROM ({{ranking}}) AS {{name}}_ranking WHERE distance < 'NaN'
"""
# Rows whose scores were computed elsewhere.
GIVEN: Final = """
    SELECT key, -score AS distance, score
      FROM unnest(CAST(:keys AS text[]), CAST(:scores AS float8[])) AS given (key, score)
"""
BEST_ROWS: Final = f"""
    SELECT * FROM ({{ranking}}) AS ranking
     ORDER BY {SORTED} LIMIT CAST(:limit AS bigint) OFFSET CAST(:offset AS bigint)
"""
# The best row of each document. A row that is not a passage counts as its own document.
BEST_OF_DOCUMENTS: Final = f"""
    SELECT *
      FROM (SELECT ranking.*,
                   row_number() OVER (PARTITION BY coalesce(attributes.document, ranking.key)
                                          ORDER BY ranking.distance, ranking.{BY_KEY}) AS place_in_document
              FROM ({{ranking}}) AS ranking
              LEFT JOIN vectormill.{{attributes}} AS attributes ON attributes.key = ranking.key) AS passages
     WHERE place_in_document = 1
     ORDER BY {SORTED} LIMIT CAST(:limit AS bigint) OFFSET CAST(:offset AS bigint)
"""
# The included columns are read only for the rows of the page.
PAGE: Final = f"""
    SELECT best.*, attributes.metadata -> '_passage' AS passage {{columns}}
      FROM ({{best}}) AS best
      LEFT JOIN vectormill.{{attributes}} AS attributes ON attributes.key = best.key {{join}}
     ORDER BY best.distance + 0, best.{BY_KEY}
"""
# The page of each of many queries; the lateral join runs each like a separate search.
BATCH: Final = f"""
    SELECT asked.place, best.*, attributes.metadata -> '_passage' AS passage {{columns}}
      FROM unnest({{array}}) WITH ORDINALITY AS asked (query, place)
     CROSS JOIN LATERAL ({{best}}) AS best
      LEFT JOIN vectormill.{{attributes}} AS attributes ON attributes.key = best.key
     ORDER BY asked.place, best.distance + 0, best.{BY_KEY}
"""
JOIN_VECTORS: Final = "JOIN vectormill.{table} AS vectors ON vectors.key = best.key"
COLUMNS: Final = {
    METADATA: ", attributes.metadata",
    TEXT: ", attributes.text",
    VECTOR: ", CAST(vectors.embedding AS text) AS embedding",
}

# Up to this number, rows are found by an index on their metadata and compared exactly within a few milliseconds.
FEW_ROWS: Final = 2000
# Bound values that do not influence the plan of a search.
UNPLANNED: Final = ("query", "queries", "sparse", "words", "own")


@dataclass(frozen=True, slots=True)
class Statement:
    """The SQL statement of a search, with its bound values."""

    sql: str
    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class Depth:
    """How deep the rankings of a statement are, and how their rows are found.

    `num_ranked` is the number of rows of each ranking, None for all. With `is_exact` the distance is written so that no
    vector index matches it, and every row that passes the filter is compared. With `in_parts` the rows of a query in
    parts are found by an index on each part, and those with words by BM25's.
    """

    num_ranked: int | None
    is_exact: bool = False
    in_parts: bool = True


@dataclass(frozen=True, slots=True)
class Ranking:
    """The rows of a search in their order.

    `queries` has a query for each of the search's outputs that make a ranking; `language`, a regconfig, is needed for
    words, and `bm25` is their index, if they are ranked by it.
    """

    generation: Generation
    search: Search
    queries: Mapping[str, QueryVector]
    language: str | None
    bm25: str | None = None

    def write_page(self, depth: Depth) -> Statement:
        """Return the SQL statement of the page of the search."""
        return write_page(self.generation, self.search, self._write(depth))

    def write_candidates(self, depth: Depth) -> Statement:
        """Return the SQL statement of the best rows, as many as a ranking has."""
        ranking = self._write(depth)
        best = BEST_ROWS.format(ranking=ranking.sql)
        return Statement(best, ranking.values | {"limit": depth.num_ranked, "offset": 0})

    def _write(self, depth: Depth) -> Statement:
        """Return the SQL of the ranking, or of several that are fused."""
        names, search = name_tables(self.generation), self.search
        values = count_rows(search, depth)
        condition = compile_filter(search.condition, "attributes.metadata")
        values |= condition.values
        rankings: dict[str, tuple[str, str]] = {}
        for name, query in self.queries.items():
            own, own_values = leave_out_own(search, query.document)
            values |= query.values | own_values
            rankings[name] = write_nearest(self.generation, query, condition, own, depth), query.score
        if search.reads_words:
            values |= {"words": search.words, "language": self.language, "bm25": self.bm25}
            distance = COVER_DENSITY if not self.bm25 else BM25 if depth.in_parts else f"{BM25} + 0"
            worded = WORDED.format(**names, distance=distance, condition=condition.sql)
            rankings["text"] = worded, "-distance"
        if len(rankings) == 1:
            ((name, (ranking, score)),) = rankings.items()
            return Statement(ALONE.format(name=name, ranking=ranking, score=score), values)
        values |= {
            "vector_weight": search.vector_weight,
            "sparse_weight": search.sparse_weight,
            "text_weight": search.text_weight,
            "constant": FUSION_CONSTANT,
        }
        ranked = [RANKED.format(name=name, ranking=ranking) for name, (ranking, _) in rankings.items()]
        return Statement(FUSED.format(rankings=" UNION ALL ".join(ranked)), values)


def count_ranked(rows: Sequence[Row[Any]]) -> dict[str, int]:
    """Return how many rows each ranking has, by its name; empty if there is no row to tell it."""
    told = rows[0]._mapping if rows else {}
    return {name: told[f"num_{name}"] for name in ("vector", "sparse", "text") if f"num_{name}" in told}


def count_rows(search: Search, depth: Depth) -> dict[str, object]:
    """Return the bound numbers of rows of a ranking and of the page that is cut from it."""
    skips = search.is_sliced
    return {
        "num_ranked": EVERY_ROW if depth.num_ranked is None else depth.num_ranked,
        "num_skipped": search.offset if skips else 0,
        "limit": search.limit,
        "offset": 0 if skips else search.offset,
    }


def write_given(generation: Generation, search: Search, scores: Mapping[str, float]) -> Statement:
    """Return the SQL statement of the page of these rows, in the order of their scores."""
    values = {"keys": [*scores], "scores": [*scores.values()], "limit": search.limit, "offset": search.offset}
    return write_page(generation, search, Statement(GIVEN, values))


def write_page(generation: Generation, search: Search, found: Statement) -> Statement:
    """Return the SQL statement of the page of a ranking, with the included columns."""
    names = name_tables(generation)
    best = (BEST_OF_DOCUMENTS if search.by_document else BEST_ROWS).format(ranking=found.sql, **names)
    page = PAGE.format(
        best=best,
        attributes=names["attributes"],
        columns=" ".join(COLUMNS[part] for part in search.include),
        join=JOIN_VECTORS.format(table=names["table"]) if VECTOR in search.include else "",
    )
    return Statement(page, found.values)


def write_batch(generation: Generation, search: Search, queries: QueryVector, depth: Depth) -> Statement:
    """Return one SQL statement that runs `search`, by vector, for each of many queries.

    Its rows have a column `place`, the number of their query, from 1.
    """
    condition = compile_filter(search.condition, "attributes.metadata")
    nearest = write_nearest(generation, queries, condition, [], depth)
    statement = BATCH.format(
        array=queries.array,
        best=BEST_ROWS.format(ranking=ALONE.format(name="vector", ranking=nearest, score=queries.score)),
        columns=" ".join(COLUMNS[part] for part in search.include),
        **name_tables(generation),
    )
    return Statement(statement, count_rows(search, depth) | queries.values | condition.values)


def name_tables(generation: Generation) -> dict[str, str]:
    return {"table": generation.table_name, "attributes": attributes_name(generation.id)}


def write_nearest(
    generation: Generation, query: QueryVector, condition: Condition, own: Sequence[str], depth: Depth
) -> str:
    """Return the SQL of the ranking by vector; `own` are additional SQL conditions."""
    needs_attributes = condition.sql != "true" or query.document is not None
    join = "LEFT JOIN" if condition.fits_nothing else "JOIN"
    names = name_tables(generation)
    conditions = [condition.sql, *query.conditions, *own]

    def write(*more: str) -> str:
        return NEAREST.format(
            **names,
            distance=f"({query.distance}) + 0" if depth.is_exact else query.distance,
            join=f"{join} vectormill.{names['attributes']} AS attributes USING (key)"
            if needs_attributes
            else "",
            condition=" AND ".join([*conditions, *more]),
            order=f"distance, vectors.{BY_KEY}" if depth.is_exact else "distance",
        )

    if not (depth.in_parts and query.parts):
        return write()
    parts = " UNION ALL ".join(f"({write(part)})" for part in query.parts)
    return NEAREST_OF_PARTS.format(parts=parts)


def leave_out_own(search: Search, document: str | None) -> tuple[list[str], dict[str, object]]:
    """Return SQL conditions and their values that exclude the row `search.like`; by document, its whole `document`."""
    if search.like is None:
        return [], {}
    if search.by_document and document is not None:
        return ["attributes.document IS DISTINCT FROM CAST(:own AS text)"], {"own": document}
    return ["vectors.key <> CAST(:own AS text)"], {"own": search.like}


@dataclass(frozen=True, slots=True)
class PlannedReading:
    """The plan of Postgres for a search: the rankings by an index, and about how many rows are read without one.

    `num_filtered` is the estimated number of rows from an index on metadata or words; None if no such index is used.
    `num_rows_unindexed` is the number of rows that are read beside the index of sparse weights; None without it.
    """

    by_index: frozenset[str]
    num_rows_read: int | None
    num_filtered: int | None
    num_rows_unindexed: int | None = None


class Plans:
    """A cache of EXPLAIN results: statements that differ only in their vectors or words are explained once."""

    def __init__(self, connection: Connection, generation: Generation) -> None:
        self._connection = connection
        self._generation = generation
        self._readings: dict[tuple[str, str], PlannedReading] = {}

    def choose(self, write: Callable[[Depth], Statement], depth: Depth) -> tuple[Statement, PlannedReading]:
        """Return the statement to run, made by `write`, and its plan. It is exact if requested, or if no vector index
        serves it, or if a filter leaves few rows.

        Sparse weights in parts are searched among the rows that their index has and among the others. Without that
        index, or if it is not worth it, each part would read all rows, so they are searched as one.

        The planner underestimates the vector index if the filter removes most of its rows: 12 ms instead of 3 ms where
        200 of 20,000 rows satisfy the filter, and some of the nearest are missed.
        """
        statement = write(depth)
        reading = self.explain(statement)
        if depth.in_parts and "sparse" in statement.values and "sparse" not in reading.by_index:
            depth = replace(depth, in_parts=False)
            statement = write(depth)
            reading = self.explain(statement)
        exact = write(replace(depth, is_exact=True))
        # Without a vector index it is the same plan, in which equal distances are ordered by their keys.
        if not reading.by_index - {"text"}:
            return exact, reading
        if "filter_0" in statement.values:  # bound by compile_filter
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
        # The nodes of rankings by vectors, each below a limit of its own, are told apart from those by words.
        limits = [list(walk_plan(node)) for node in nodes if node["Node Type"] == "Limit"]
        ranked = [
            node
            for of_table in (each for each in nodes if each.get("Relation Name") == table)
            for node in min((below for below in limits if of_table in below), key=len, default=nodes)
        ] or nodes
        # The nodes that find rows of attributes by an index other than the primary key.
        served = [
            node
            for node in ranked
            if node.get("Relation Name") == attributes
            and {each.get("Index Name") for each in walk_plan(node)} - {None, f"{attributes}_pkey"}
        ]
        num_filtered = max((int(node["Plan Rows"]) for node in served), default=None)
        ordered = [node["Order By"].split(" <")[0] for node in nodes if "Order By" in node]
        by_index = frozenset(
            next((name for name in ("sparse", "text") if column.endswith(name)), "vector")
            for column in ordered
        )
        if by_index - {"text"}:
            num_unindexed = count_unindexed(self._connection, table) if "sparse" in by_index else None
            return PlannedReading(by_index, None, num_filtered, num_unindexed)
        scans = [node for node in ranked if node["Node Type"] == "Seq Scan"]
        whole = [node for node in scans if node["Relation Name"] == table]
        num_rows = None
        if whole and num_filtered is None:  # all parallel processes together
            num_processes = 1 + max(int(node.get("Workers Planned", 0)) for node in nodes)
            num_rows = max(int(node["Plan Rows"]) for node in whole) * num_processes
            if any("Filter" in node for node in whole):  # the estimate is of the rows that remain
                num_rows = max(num_rows, estimate_num_rows(self._connection, table) or 0)
        elif any(node["Relation Name"] == attributes and "Filter" in node for node in scans):
            num_rows = estimate_num_rows(self._connection, attributes) or 0
        return PlannedReading(by_index, num_rows, num_filtered)
