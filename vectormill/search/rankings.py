"""Rankings: compose the SQL statements of searches from templates, without running them.

A ranking is a subquery of rows (key, score, num_nearest, …) by vector, by words, or by both fused. PAGE selects one
page of it, with the included columns of each row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name
from vectormill.search.filters import Condition, compile_filter
from vectormill.search.query_vectors import QueryVector
from vectormill.search.search import FUSION_CONSTANT, METADATA, TEXT, VECTOR, Search

# Rows by distance; an HNSW index returns them in nearly this order. A filter is applied to each row from the index,
# which continues until there are enough (hnsw.iterative_scan).
NEAREST: Final = """
    SELECT vectors.key, {distance} AS distance
      FROM vectormill.{table} AS vectors {join}
     WHERE {condition}
     ORDER BY distance LIMIT CAST(:num_ranked AS bigint)
"""
# Postgres sorts NaN, the cosine distance of a vector without a direction, behind all numbers, and so before all scores.
# Such rows, which only former releases stored, are left out of every ranking, as they are out of an index.
WITH_DISTANCE: Final = "SELECT key, distance FROM ({nearest}) AS compared WHERE distance < 'NaN'"
# The nearest of the rows that were found in parts, each as above.
NEAREST_OF_PARTS: Final = """
    SELECT key, distance FROM ({parts}) AS parts ORDER BY distance LIMIT CAST(:num_ranked AS bigint)
"""
# Rows that contain all words, ranked by cover density: how close together the words are. Normalization 1 divides it by
# the logarithm of the text's length. The collection's language decides the stop words; "quotes", or and - work as in a
# web search engine.
WORDED: Final = """
    SELECT attributes.key, ts_rank_cd(attributes.search, {words}, 1) AS rank
      FROM vectormill.{attributes} AS attributes
     WHERE attributes.search @@ {words} AND {condition}
     ORDER BY rank DESC, key LIMIT CAST(:num_ranked AS bigint)
"""
WORDS: Final = "websearch_to_tsquery(CAST(:language AS regconfig), CAST(:words AS text))"

BY_DISTANCE: Final = """
    SELECT key, {score} AS score, count(*) OVER () AS num_nearest
      FROM ({nearest}) AS nearest
"""
BY_WORDS: Final = """
    SELECT key, CAST(rank AS float8) AS score, count(*) OVER () AS num_nearest
      FROM ({worded}) AS worded
"""
# Reciprocal rank fusion uses only positions in the rankings, since distances and ranks of words have no common scale.
FUSED: Final = """
    SELECT key, vector_rank, sparse_rank, text_rank, score,
           count(vector_rank) OVER () AS num_nearest, count(sparse_rank) OVER () AS num_weighed
      FROM (SELECT key, min(rank) FILTER (WHERE ranking = 'vector') AS vector_rank,
                   min(rank) FILTER (WHERE ranking = 'sparse') AS sparse_rank,
                   min(rank) FILTER (WHERE ranking = 'text') AS text_rank,
                   sum(weight / (CAST(:constant AS float8) + rank)) AS score
              FROM ({rankings}) AS ranked GROUP BY key) AS fused
"""
RANKED: Final = """
    SELECT key, '{name}' AS ranking, CAST(:{name}_weight AS float8) AS weight,
           row_number() OVER (ORDER BY {order}, key) AS rank
      FROM ({ranking}) AS {name}_ranking
"""
# Rows whose scores were computed elsewhere.
GIVEN: Final = """
    SELECT key, score, count(*) OVER () AS num_nearest
      FROM unnest(CAST(:keys AS text[]), CAST(:scores AS float8[])) AS given (key, score)
"""
BEST_KEYS: Final = "SELECT key FROM ({ranking}) AS ranking ORDER BY score DESC, key LIMIT :num_candidates"
# Rows are sorted again, since an iterative index scan returns them only nearly in order, which Postgres does not know.
BEST_ROWS: Final = """
    SELECT * FROM ({ranking}) AS ranking
     ORDER BY score DESC, key LIMIT :limit OFFSET :offset
"""
# The best row of each document. A row that is not a passage counts as its own document.
BEST_OF_DOCUMENTS: Final = """
    SELECT *
      FROM (SELECT ranking.*, row_number() OVER (PARTITION BY coalesce(attributes.document, ranking.key)
                                                     ORDER BY ranking.score DESC, ranking.key) AS place_in_document
              FROM ({ranking}) AS ranking
              LEFT JOIN vectormill.{attributes} AS attributes ON attributes.key = ranking.key) AS passages
     WHERE place_in_document = 1
     ORDER BY score DESC, key LIMIT :limit OFFSET :offset
"""
# The included columns are read only for the rows of the page.
PAGE: Final = """
    SELECT best.*, attributes.metadata -> '_passage' AS passage {columns}
      FROM ({best}) AS best
      LEFT JOIN vectormill.{attributes} AS attributes ON attributes.key = best.key {join}
     ORDER BY best.score DESC, best.key
"""
# The best rows for each of many queries; the lateral join runs each like a separate search.
ROUND: Final = """
    SELECT asked.place, best.*, attributes.metadata -> '_passage' AS passage {columns}
      FROM unnest({array}) WITH ORDINALITY AS asked (query, place)
     CROSS JOIN LATERAL ({best}) AS best
      LEFT JOIN vectormill.{attributes} AS attributes ON attributes.key = best.key
     ORDER BY asked.place, best.score DESC, best.key
"""
COLUMNS: Final = {
    METADATA: ", attributes.metadata",
    TEXT: ", attributes.text",
    VECTOR: ", CAST(vectors.embedding AS text) AS embedding",
}


@dataclass(frozen=True, slots=True)
class Statement:
    """The SQL statement of a search, with its bound values."""

    sql: str
    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The rows of a search in their order, each ranking with `num_ranked` rows, None for all.

    `queries` has a query for each of the search's outputs that make a ranking; `language`, a regconfig, is needed for
    words. With `is_exact` the distance is written so that no vector index matches it, and every row that passes the
    filter is compared. With `in_parts` the rows of a query in parts are found by an index on each part.
    """

    generation: Generation
    search: Search
    queries: Mapping[str, QueryVector]
    num_ranked: int | None
    language: str | None

    def write_page(self, *, is_exact: bool, in_parts: bool = False) -> Statement:
        """Return the SQL statement of the page of the search."""
        return write_page(self.generation, self.search, self._write(is_exact=is_exact, in_parts=in_parts))

    def write_keys(self, *, is_exact: bool, in_parts: bool = False) -> Statement:
        """Return the SQL statement of the keys of the `num_ranked` best rows."""
        ranking = self._write(is_exact=is_exact, in_parts=in_parts)
        values = {**ranking.values, "num_candidates": self.num_ranked}
        return Statement(BEST_KEYS.format(ranking=ranking.sql), values)

    def _write(self, *, is_exact: bool, in_parts: bool) -> Statement:
        """Return the SQL of the ranking, or of several that are fused."""
        names, search = name_tables(self.generation), self.search
        values: dict[str, object] = {"num_ranked": self.num_ranked}
        condition = compile_filter(search.condition, "attributes.metadata")
        values |= condition.values
        alone, ranked = "", []
        for name, query in self.queries.items():
            own, own_values = leave_out_own(search, query.document)
            values |= query.values | own_values
            nearest = write_nearest(
                self.generation, query, condition, own, is_exact=is_exact, in_parts=in_parts
            )
            alone = BY_DISTANCE.format(nearest=nearest, score=query.score)
            ranked.append(RANKED.format(name=name, order="distance", ranking=nearest))
        if search.reads_words:
            values |= {"words": search.words, "language": self.language}
            worded = WORDED.format(**names, words=WORDS, condition=condition.sql)
            alone = BY_WORDS.format(worded=worded)
            ranked.append(RANKED.format(name="text", order="rank DESC", ranking=worded))
        if len(ranked) == 1:
            return Statement(alone, values)
        values |= {
            "vector_weight": search.vector_weight,
            "sparse_weight": search.sparse_weight,
            "text_weight": search.text_weight,
            "constant": FUSION_CONSTANT,
        }
        return Statement(FUSED.format(rankings=" UNION ALL ".join(ranked)), values)


def write_given(generation: Generation, search: Search, scores: Mapping[str, float]) -> Statement:
    """Return the SQL statement of the page of these rows, in the order of their scores."""
    return write_page(generation, search, Statement(GIVEN, {"keys": [*scores], "scores": [*scores.values()]}))


def write_page(generation: Generation, search: Search, found: Statement) -> Statement:
    """Return the SQL statement of the page of a ranking, with the included columns."""
    names, ranking = name_tables(generation), found.sql
    values = {**found.values, "limit": search.limit, "offset": search.offset}
    best = (BEST_OF_DOCUMENTS if search.by_document else BEST_ROWS).format(ranking=ranking, **names)
    has_vectors = VECTOR in search.include
    page = PAGE.format(
        best=best,
        attributes=names["attributes"],
        columns=" ".join(COLUMNS[part] for part in search.include),
        join=f"JOIN vectormill.{names['table']} AS vectors ON vectors.key = best.key" if has_vectors else "",
    )
    return Statement(page, values)


def write_round(
    generation: Generation, search: Search, queries: QueryVector, *, is_exact: bool, in_parts: bool = False
) -> Statement:
    """Return one SQL statement that runs `search`, by vector, for each of many queries.

    Its rows have a column `place`, the number of their query, from 1.
    """
    values: dict[str, object] = {
        "limit": search.limit,
        "offset": search.offset,
        "num_ranked": search.num_wanted,
        **queries.values,
    }
    condition = compile_filter(search.condition, "attributes.metadata")
    values |= condition.values
    nearest = write_nearest(generation, queries, condition, [], is_exact=is_exact, in_parts=in_parts)
    statement = ROUND.format(
        array=queries.array,
        best=BEST_ROWS.format(ranking=BY_DISTANCE.format(nearest=nearest, score=queries.score)),
        columns=" ".join(COLUMNS[part] for part in search.include),
        **name_tables(generation),
    )
    return Statement(statement, values)


def name_tables(generation: Generation) -> dict[str, str]:
    return {"table": generation.table_name, "attributes": attributes_name(generation.id)}


def write_nearest(
    generation: Generation,
    query: QueryVector,
    condition: Condition,
    own: Sequence[str],
    *,
    is_exact: bool,
    in_parts: bool = False,
) -> str:
    """Return the SQL of the ranking by vector; `own` are additional SQL conditions."""
    needs_attributes = condition.sql != "true" or query.document is not None
    join = "LEFT JOIN" if condition.fits_nothing else "JOIN"
    names = name_tables(generation)
    conditions = [condition.sql, *query.conditions, *own]

    def write(*more: str) -> str:
        return NEAREST.format(
            **names,
            distance=f"({query.distance}) + 0" if is_exact else query.distance,
            join=f"{join} vectormill.{names['attributes']} AS attributes USING (key)"
            if needs_attributes
            else "",
            condition=" AND ".join([*conditions, *more]),
        )

    nearest = write()
    if in_parts and query.parts:
        parts = " UNION ALL ".join(f"({write(part)})" for part in query.parts)
        nearest = NEAREST_OF_PARTS.format(parts=parts)
    return WITH_DISTANCE.format(nearest=nearest)


def leave_out_own(search: Search, document: str | None) -> tuple[list[str], dict[str, object]]:
    """Return SQL conditions and their values that exclude the row `search.like`; by document, its whole `document`."""
    if search.like is None:
        return [], {}
    if search.by_document and document is not None:
        return ["attributes.document IS DISTINCT FROM CAST(:own AS text)"], {"own": document}
    return ["vectors.key <> CAST(:own AS text)"], {"own": search.like}
