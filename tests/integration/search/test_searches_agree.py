"""Searches find what brute force finds: whatever they compare, filter, fuse and group, with indexes and without.

Hypothesis draws searches of small collections that are hard: full of rows that are equally near, with one document of
many passages, rows without a direction, weights, tokens, metadata or a text, and indexes that give up early.
tests/brute_force.py says what is right. Where an index was used, other rows may be found, but what is said of each is
right, and so is their number.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, text

from tests.brute_force import Corpus, Ranked, Row, find, list_depths, needs_query
from tests.database import ask
from tests.kinds import MANY, VECTORS
from tests.services import connected_engine, migrated_database
from vectormill.collections.codebooks import keep_codebook
from vectormill.collections.collection import CollectionOptions, Generation
from vectormill.collections.collections import create_collection
from vectormill.collections.generation_tables import attributes_name, keep_ranges, upsert_rows
from vectormill.collections.index_plan import (
    IS_INDEXED,
    IS_TOO_LONG,
    MOST_INDEXED_WEIGHTS,
    WEIGHTS_BYTES,
    find_operator_class,
)
from vectormill.collections.indexes import name_weights_index
from vectormill.db.session import driver_of
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import SearchTimeout
from vectormill.domain.task import DENSE, MULTI_VECTOR, OUTPUTS, SPARSE
from vectormill.domain.vector_type import DOT, VECTOR_TYPES
from vectormill.jobs.item import Item
from vectormill.results.kind import take_objects
from vectormill.search.filter import parse_filter
from vectormill.search.filter_sql import TEXT_INDEX, define_filter_indexes, name_text_index
from vectormill.search.matches import find_matches
from vectormill.search.operations import MatchBody, SearchAnswer
from vectormill.search.search import BY_TEXT, BY_VECTOR, HYBRID, METADATA, TEXT, VECTOR, Deadline, Search
from vectormill.vectors.quantization import Ranges, quantize
from vectormill.vectors.representations import Representations
from vectormill.vectors.residual_codes import Codebook, find_digest, restore
from vectormill.vectors.vector_types import make_rows

NUM_ROWS: Final = 700
# The passages of one document: more than 4 times the least depth of a ranking.
LONG_DOCUMENT: Final = 450
DIMENSIONS: Final = 8
NUM_WORDS: Final = 1500  # of the vocabulary of sparse weights
COMMON_WORDS: Final = 30
RARE, LONG_ONLY, NOWHERE = 40, 1200, 1499
WORDS: Final = ("harbour", "meadow", "lantern", "orchard", "granite", "whistle")
QUESTIONS: Final = (
    "harbour",
    "meadow lantern",
    "harbour or orchard",
    "-meadow",
    '"granite whistle"',
    "nosuchword",
)
# Ranges whose steps are 1/64, so that codes are restored to just what was quantized, zero included.
RANGES: Final = Ranges(
    np.full(DIMENSIONS, -127.5 / 64, np.float32), np.full(DIMENSIONS, 127.5 / 64, np.float32)
)
FORCE_INDEX: Final = ("enable_seqscan = off", "enable_sort = off", "enable_bitmapscan = off")
PLANS: Final[Sequence[tuple[str, ...]]] = (
    (),
    FORCE_INDEX,
    (*FORCE_INDEX, "hnsw.max_scan_tuples = 20"),
    (*FORCE_INDEX, "hnsw.max_scan_tuples = 150"),
    (*FORCE_INDEX[:2], "hnsw.max_scan_tuples = 50"),
)
DENSE_ALONE: Final = replace(VECTORS, dimensions=DIMENSIONS, normalize=False)
SEVERAL: Final = replace(MANY, dimensions=DIMENSIONS, normalize=False, sparse_dimensions=NUM_WORDS)


@dataclass(frozen=True)
class Kind:
    """A kind of collection: its spec, number of rows, and whether it has residual codes and indexes.

    `has_indexes` are those of vectors, and `has_more_indexes` those of metadata and words beside them.
    """

    spec: EncodingSpec
    num_rows: int = 250
    has_indexes: bool = False
    has_more_indexes: bool = False
    has_codes: bool = False


KINDS: Final = {
    "halves": Kind(replace(DENSE_ALONE, model="halves")),
    "halves indexed": Kind(
        replace(DENSE_ALONE, model="halves"), NUM_ROWS, has_indexes=True, has_more_indexes=True
    ),
    "floats by product": Kind(replace(DENSE_ALONE, vector_type="float32", similarity=DOT)),
    "floats by product indexed": Kind(
        replace(DENSE_ALONE, vector_type="float32", similarity=DOT), has_indexes=True
    ),
    "codes of int8": Kind(replace(DENSE_ALONE, vector_type="int8")),
    "signs indexed": Kind(
        replace(DENSE_ALONE, vector_type="binary"), has_indexes=True, has_more_indexes=True
    ),
    "several": Kind(replace(SEVERAL, model="several"), NUM_ROWS),
    "several indexed": Kind(replace(SEVERAL, model="several"), NUM_ROWS, has_indexes=True),
    "several floats indexed": Kind(
        replace(SEVERAL, vector_type="float32", similarity=DOT), 120, has_indexes=True
    ),
    "weights and codes indexed": Kind(
        replace(SEVERAL, outputs="sparse,multi_vector", dimensions=0),
        has_indexes=True,
        has_more_indexes=True,
        has_codes=True,
    ),
}


@dataclass(frozen=True)
class Searched:
    """A collection, all that is in it, and queries of which some are near to many of its rows."""

    engine: Engine
    kind: Kind
    generation: Generation
    corpus: Corpus
    stored: dict[str, list[Any]]  # by key, the dense vector as an export shows it
    queries: Sequence[Representations]
    models: Sequence[str]  # keys of rows of each sort, for searches of what is like them

    @property
    def outputs(self) -> list[str]:
        return [name for name in OUTPUTS if self.kind.spec.has_output(name)]

    def search(
        self, connection: Connection, drawn: "Sequence[Drawn]", timeout_seconds: float = 30.0
    ) -> list[SearchAnswer]:
        asked = [(each.search, self.give(each)) for each in drawn]
        return find_matches(connection, self.generation, asked, Deadline(timeout_seconds))

    def give(self, drawn: "Drawn") -> Any:
        """Return what comes beside the search: dense vectors alone as an array."""
        if not needs_query(drawn.search):
            return None
        query = self.queries[drawn.query]
        return query.dense if drawn.search.outputs == (DENSE,) else query

    def query_of(self, drawn: "Drawn") -> Representations:
        like = drawn.search.like
        return self.queries[drawn.query] if like is None else self.corpus.rows[like].vectors


@dataclass(frozen=True)
class Drawn:
    """A search, and the number of its query."""

    search: Search
    query: int


# ---- collections


def draw_dense(random: np.random.Generator, num_rows: int) -> npt.NDArray[np.float32]:
    """Return vectors [num_rows, 8] of eighths and halves: most of them are a few, again and again; some are zero."""
    few = random.integers(-1, 2, (12, DIMENSIONS)) * random.choice([0.5, 1.0], (12, 1))
    few[0] = 1
    fine = random.integers(-64, 65, (num_rows, DIMENSIONS)) / 64
    chosen = few[random.integers(0, len(few), num_rows)]
    vectors = np.where(random.random((num_rows, 1)) < 0.6, chosen, fine)
    long = np.arange(num_rows) < count_long(num_rows)
    near = np.ones((num_rows, DIMENSIONS))
    near[:, 0] -= random.integers(0, 4, num_rows) / 64
    vectors[long] = near[long]
    vectors[[num_rows - 1, num_rows - 30, 5]] = 0
    return vectors.astype(np.float32)


def count_long(num_rows: int) -> int:
    return num_rows * LONG_DOCUMENT // NUM_ROWS


def draw_weights(random: np.random.Generator, number: int, num_long: int) -> dict[int, float]:
    """Return the weights of one row: those of the long document are alike, six rows have too many for an index."""
    if number % 50 == 49:
        return {}
    words = random.choice(COMMON_WORDS, random.integers(1, 8), replace=False)
    weights = {int(word): float(random.integers(1, 9)) / 4 for word in words}
    if number < num_long:
        weights[0] = 4.0
    if number % 40 == 17:
        weights |= {int(word): 0.25 for word in random.choice(np.arange(50, 1300), 1100, replace=False)}
        weights[LONG_ONLY] = 1.0
    if number % 100 == 3:
        weights[RARE] = float(random.integers(1, 3))
    return dict(sorted(weights.items()))


def draw_tokens(random: np.random.Generator, number: int, num_long: int) -> npt.NDArray[np.float16]:
    if number < num_long:
        return np.full((1, 4), 4, np.float16) - random.integers(0, 2, (1, 4)).astype(np.float16)
    return random.integers(-3, 4, (random.integers(0, 4), 4)).astype(np.float16)


def make_sparse(weights: dict[int, float]) -> dict[str, Any]:
    return {
        "indices": np.array(list(weights), np.uint32),
        "weights": np.array(list(weights.values()), np.float32),
    }


def describe(number: int, num_long: int) -> dict[str, Any] | None:
    if number >= num_long and number % 10 == 9:
        return None
    metadata: dict[str, Any] = {
        "part": number % 7,
        "lang": ("de", "en")[number % 2],
        "tags": [WORDS[number % 6]],
    }
    if number % 25 == 4:
        metadata["rare"] = None
    if number < num_long or number % 3 == 0:
        document = "long" if number < num_long else f"d{number // 12}"
        metadata["_passage"] = {"document": document, "index": number, "start": 0, "end": 9}
    return metadata


def draw_rows(kind: Kind, seed: int) -> list[Row]:
    """Return the rows of a collection; their keys are in another order than the rows."""
    random = np.random.default_rng(seed)
    num_long = count_long(kind.num_rows)
    keys = random.permutation(kind.num_rows)
    dense = draw_dense(random, kind.num_rows)
    rows = []
    for number in range(kind.num_rows):
        sparse = make_sparse(draw_weights(random, number, num_long))
        vectors = Representations(dense[number], vectors=draw_tokens(random, number, num_long), **sparse)
        words = random.choice(WORDS, random.integers(1, 5))
        metadata = describe(number, num_long)
        kept = None if metadata is None else " ".join(words.tolist())
        rows.append(Row(f"k{keys[number]:03d}", narrow(vectors, kind.spec), metadata, kept))
    return rows


def narrow(vectors: Representations, spec: EncodingSpec) -> Representations:
    empty = Representations()
    has = spec.has_output
    return Representations(
        vectors.dense if has(DENSE) else empty.dense,
        vectors.indices if has(SPARSE) else empty.indices,
        vectors.weights if has(SPARSE) else empty.weights,
        vectors.vectors if has(MULTI_VECTOR) else empty.vectors,
    )


def draw_queries(seed: int) -> list[Representations]:
    random = np.random.default_rng(seed)

    def draw(dense: Any, weights: dict[int, float], tokens: Any) -> Representations:
        return Representations(
            np.asarray(dense, np.float32), vectors=np.asarray(tokens, np.float16), **make_sparse(weights)
        )

    return [
        draw(np.ones(DIMENSIONS), {0: 1.0}, [[1, 1, 1, 1]]),
        draw(
            random.integers(-64, 65, DIMENSIONS) / 64,
            dict.fromkeys(range(1, 12, 2), 0.5),
            random.integers(-3, 4, (3, 4)),
        ),
        draw(random.integers(-1, 2, DIMENSIONS) + 0.5, {RARE: 2.0}, [[-1, 0, 0, 1], [0, 2, 0, 0]]),
        draw(-np.ones(DIMENSIONS), {LONG_ONLY: 1.0, 3: 0.25}, [[-1, -1, -1, -1]]),
        draw(np.eye(DIMENSIONS)[0], {NOWHERE: 1.0}, [[0, 0, 0, 0]]),
    ]


def make_codebook(seed: int) -> Codebook:
    """Return a codebook of eighths and whole numbers, so that what is restored by it is as coarse."""
    centroids = np.random.default_rng(seed).integers(-4, 5, (16, 4)).astype(np.float32)
    bounds, values = np.array([-0.5, 0, 0.5], np.float32), np.array([-0.75, -0.25, 0.25, 0.75], np.float32)
    codebook = Codebook(centroids, bounds, values, False, b"")
    return replace(codebook, digest=find_digest(codebook.to_bytes()))


def write_rows(connection: Connection, generation: Generation, rows: Sequence[Row]) -> None:
    """Write the rows; those without metadata have no text either."""
    spec = generation.spec
    if spec.outputs == DENSE:
        dense = np.array([row.vectors.dense for row in rows])
        results: Any = make_rows(dense, spec.kept_type, RANGES)
    else:
        results = take_objects([row.vectors.pack() for row in rows])
    is_kept = np.array([row.text is not None for row in rows])
    for keep_text, chosen in ((True, np.flatnonzero(is_kept)), (False, np.flatnonzero(~is_kept))):
        items = [
            Item(
                rows[place].key,
                (rows[place].text or "left out").encode(),
                b"" if rows[place].metadata is None else json.dumps(rows[place].metadata).encode(),
            )
            for place in chosen.tolist()
        ]
        upsert_rows(connection, generation.id, 1, items, results[chosen], spec, keep_text=keep_text)


def index_vectors(connection: Connection, generation: Generation) -> None:
    table, spec = f"vectormill.{generation.table_name}", generation.spec
    if spec.has_output(DENSE):
        operators, _ = find_operator_class(spec.kept_type, spec.dimensions, spec.similarity)
        connection.execute(text(f"CREATE INDEX ON {table} USING hnsw (embedding {operators})"))
    if spec.has_output(SPARSE):
        few = name_weights_index(generation.id)
        connection.execute(
            text(f"CREATE INDEX ON {table} USING hnsw (sparse sparsevec_ip_ops) WHERE {IS_INDEXED}")
        )
        connection.execute(text(f"CREATE INDEX {few} ON {table} (({WEIGHTS_BYTES})) WHERE {IS_TOO_LONG}"))


def index_more(connection: Connection, generation: Generation) -> None:
    table, driver = f"vectormill.{generation.table_name}", driver_of(connection)
    definitions = define_filter_indexes(generation.id, ("part", "*"))
    definitions[name_text_index(generation.id)] = TEXT_INDEX
    for name, definition in definitions.items():
        driver.execute(f"CREATE INDEX {name} ON {table}_attributes {definition.as_string(driver)}")


FIND_WORDS: Final = """
    SELECT key, CAST(ts_rank_cd(search, websearch_to_tsquery('pg_catalog.simple', :words), 1) AS float8) AS score
      FROM vectormill.{attributes} WHERE search @@ websearch_to_tsquery('pg_catalog.simple', :words)
"""


def fill(connection: Connection, name: str, seed: int) -> Any:
    """Make a collection, and return its generation and its rows as they are compared."""
    kind, rows = KINDS[name], draw_rows(KINDS[name], seed)
    wanted = {"multi_vector_codes": 2} if kind.has_codes else {}
    generation = create_collection(
        connection,
        name.replace(" ", "_"),
        kind.spec,
        CollectionOptions(keep_text=True, index_options=wanted),
        100,
    )
    num_before = kind.num_rows // 3
    write_rows(connection, generation, rows[:num_before])
    if kind.has_codes:  # from now on: earlier rows keep halves
        codebook = make_codebook(seed)
        keep_codebook(connection, kind.spec, codebook)
        rows[num_before:] = [code(row, codebook) for row in rows[num_before:]]
    write_rows(connection, generation, rows[num_before:])
    if kind.has_indexes:
        index_vectors(connection, generation)
    if kind.has_more_indexes:
        index_more(connection, generation)
    statement = text(FIND_WORDS.format(attributes=attributes_name(generation.id)))
    worded = {
        words: {row.key: row.score for row in connection.execute(statement, {"words": words})}
        for words in QUESTIONS
    }
    return generation, rows, worded


def code(row: Row, codebook: Codebook) -> Row:
    (codes,) = codebook.encode([row.vectors.vectors])
    restored = restore(codes, codebook).astype(np.float16)
    return replace(row, vectors=replace(row.vectors, vectors=restored))


def show_dense(row: Row, spec: EncodingSpec) -> list[Any]:
    dense = row.vectors.dense[np.newaxis]
    if spec.vector_type == "int8":
        return list(quantize(dense, RANGES)[0].tolist())
    kind = VECTOR_TYPES["binary" if spec.vector_type == "binary" else "float32"]
    return list(make_rows(dense, kind, None)[0].tolist())


def make_searched(engine: Engine, name: str, seed: int) -> Searched:
    kind = KINDS[name]
    if kind.spec.vector_type == "int8":
        ask(engine, keep_ranges, kind.spec, RANGES)
    generation, rows, worded = ask(engine, fill, name, seed)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in (generation.table_name, attributes_name(generation.id)):
            connection.execute(text(f"VACUUM ANALYZE vectormill.{table}"))
    corpus = Corpus(
        {row.key: row for row in rows},
        kind.spec.similarity == DOT,
        kind.spec.vector_type == "binary",
        worded.__getitem__,
    )
    sorts = {
        (row.group[0], row.group[1] == "long", row.metadata is None, not row.vectors.dense.any()): row.key
        for row in rows
    }
    stored = {row.key: show_dense(row, kind.spec) for row in rows}
    return Searched(engine, kind, generation, corpus, stored, draw_queries(seed), sorted(sorts.values()))


class Collections:
    """Collections of each kind in one database, made when they are first asked for."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.find = cache(lambda name: make_searched(engine, name, seed))


@pytest.fixture(scope="module")
def collections(postgres_url: str) -> Iterator[Collections]:
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        yield Collections(engine, 1)


# ---- searches

FILTERS: Final = st.none() | st.sampled_from(
    [
        {"part": 3},
        {"part": {"in": [0, 5]}, "lang": "de"},
        {"part": {"gte": 2, "lt": 4}},
        {"tags": {"contains": "harbour"}},
        {"rare": {"exists": True}},
        {"not": {"lang": "de"}},
        {"or": [{"part": 1}, {"rare": None}]},
        {"_passage.document": "long"},
        {"not": {"_passage.document": "long"}},
        {"_passage.index": 690},
        {"nosuch": 1},
    ]
)
LIMITS: Final = st.integers(1, 12) | st.sampled_from([25, 26, 40, 60, 150, 1000])
OFFSETS: Final = st.just(0) | st.just(0) | st.integers(0, 20) | st.sampled_from([25, 60, 130, 300, 1000])
WEIGHTS: Final = st.sampled_from([1.0, 0.5, 2.0, 0.0])
QUERIES: Final = st.sampled_from(
    [0, 0, 1, 2, 3, 4]
)  # numbers of draw_queries; 0 is near to the long document


def list_modes(outputs: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return what searches may compare in a collection with these outputs: the simplest first."""
    parts: list[tuple[str, ...]] = [()]
    for name in outputs:
        parts += [(*part, name) for part in parts]
    modes = [(BY_VECTOR, part) for part in parts if part]
    modes += [(HYBRID, part) for part in parts if part]
    return [*modes, (BY_TEXT, ()), *([(BY_TEXT, (MULTI_VECTOR,))] if MULTI_VECTOR in outputs else [])]


@st.composite
def searches(
    draw: st.DrawFn,
    searched: Searched,
    limits: st.SearchStrategy[int] = LIMITS,
    offsets: st.SearchStrategy[int] = OFFSETS,
) -> Drawn:
    mode, outputs = draw(st.sampled_from(list_modes(searched.outputs)))
    written = draw(FILTERS)
    is_by_vector = mode == BY_VECTOR
    shown = [METADATA, TEXT, VECTOR] if DENSE in searched.outputs else [METADATA, TEXT]
    vector_weight, text_weight, sparse_weight = draw(
        st.just((1.0, 1.0, 1.0))
        | st.tuples(WEIGHTS, WEIGHTS, WEIGHTS).filter(
            lambda weights: weights[0] + weights[1] + weights[2] * (SPARSE in outputs) > 0
        )
    )
    search = Search(
        limit=draw(limits),
        offset=draw(offsets),
        mode=mode,
        words=None if is_by_vector else draw(st.sampled_from(QUESTIONS)),
        like=draw(st.none() | st.none() | st.sampled_from(searched.models)) if is_by_vector else None,
        condition=None if written is None else parse_filter(written),
        by_document=draw(st.booleans()),
        include=tuple(draw(st.sampled_from([(METADATA,), (), tuple(shown)]))),
        min_score=draw(st.sampled_from([None, None, -1.0, 0.25, 0.5, 0.9, 3.0]))
        if is_by_vector and outputs == (DENSE,)
        else None,
        ef_search=None if mode == BY_TEXT else draw(st.sampled_from([None, None, 10, 400])),
        vector_weight=vector_weight,
        text_weight=text_weight,
        outputs=outputs,
        sparse_weight=sparse_weight,
    )
    return Drawn(search, draw(QUERIES))


@st.composite
def rounds(draw: st.DrawFn, searched: Searched) -> list[Drawn]:
    """Draw the searches of one call: different ones, and some that differ in their queries and pages alone."""
    drawn: list[Drawn] = []
    for first in draw(st.lists(searches(searched), min_size=1, max_size=2)):
        drawn.append(first)
        for number in draw(st.lists(QUERIES, max_size=2)):
            offset = draw(st.integers(0, first.search.num_wanted - 1))
            page = replace(first.search, offset=offset, limit=first.search.num_wanted - offset)
            drawn.append(Drawn(page, number))
    return drawn


# ---- what must hold


def check_all(found: Sequence[SearchAnswer], drawn: Sequence[Drawn], searched: Searched) -> None:
    assert len(found) == len(drawn)
    for nearest, each in zip(found, drawn, strict=True):
        try:
            check(nearest, each, searched)
        except AssertionError as error:
            keys, rest = list_keys(nearest), {**nearest, "data": "…"}
            error.add_note(f"{each}\n{len(keys)} rows: {keys[:10]}, {rest}")
            raise


def check(nearest: SearchAnswer, drawn: Drawn, searched: Searched) -> None:
    """Check one answer: what it says of each row, how many rows it has, and if no index was used, which."""
    search, query = drawn.search, searched.query_of(drawn)
    whole = find(searched.corpus, search, query, None)
    keys = list_keys(nearest)
    by_index = searched.kind.has_indexes and nearest["num_rows_read"] is None
    assert len(keys) <= search.limit
    assert len(set(keys)) == len(keys), "a row is there twice"
    in_order = sorted(nearest["data"], key=lambda match: (-match["score"], match["key"]))
    assert keys == [match["key"] for match in in_order], "rows are not in their order"
    for match in nearest["data"]:
        check_match(match, drawn, searched)
        assert match["key"] in whole.scores, "a row is there that the search leaves out"
        if search.is_fused and MULTI_VECTOR not in search.outputs:
            check_fused(match, whole.ranks, search)
        else:
            assert match["score"] == pytest.approx(whole.scores[match["key"]], rel=1e-6, abs=1e-9)
    if search.by_document:
        groups = [searched.corpus.rows[key].group for key in keys]
        assert len(set(groups)) == len(groups), "a document is there twice"
    if "incomplete_because" in nearest:
        return
    num_expected = max(0, min(search.limit, len(whole.best) - search.offset))
    if not (by_index and search.min_score is not None):
        assert len(keys) == num_expected, "fewer rows than exist and were asked for"
    if by_index:
        if search.outputs == (SPARSE,) and search.mode == BY_VECTOR and not search.offset:
            long = {
                key
                for key in whole.page
                if len(searched.corpus.rows[key].vectors.indices) > MOST_INDEXED_WEIGHTS
            }
            assert long <= set(keys), "rows are missing that no index has"
        return
    attempts = [find(searched.corpus, search, query, depth) for depth in list_depths(search)]
    right = [attempt for attempt in attempts if attempt.is_complete]
    near = [attempt for attempt in right if has_scores(attempt, keys)]
    assert near, f"other rows are better: {[attempt.page for attempt in right]}"
    assert any(attempt.is_rounded or list(attempt.page) == keys for attempt in near), (
        f"rows of equal score are not in the order of their keys: {[attempt.page for attempt in near]}"
    )


def has_scores(attempt: Ranked, keys: Sequence[str]) -> bool:
    """Return whether these rows have the scores of the page, in its order."""
    if len(keys) != len(attempt.page) or not set(keys) <= set(attempt.scores):
        return False
    found, expected = ([attempt.scores[key] for key in each] for each in (keys, attempt.page))
    return bool(found == pytest.approx(expected, rel=1e-9, abs=1e-9))


def list_keys(nearest: SearchAnswer) -> list[str]:
    return [match["key"] for match in nearest["data"]]


def check_match(match: MatchBody, drawn: Drawn, searched: Searched) -> None:
    """Check that a match has the parts of its row that the search includes, and no others."""
    row, shown = searched.corpus.rows[match["key"]], drawn.search.include
    parts = {METADATA: row.metadata, TEXT: row.text, "embedding": searched.stored[row.key]}
    wanted = {name for name in (METADATA, TEXT) if name in shown} | (
        {"embedding"} if VECTOR in shown else set()
    )
    assert {name: part for name, part in match.items() if name in parts} == {
        name: parts[name] for name in wanted
    }
    assert match.get("document") == (row.passage or {}).get("document")


def check_fused(match: MatchBody, exact: Mapping[str, Mapping[str, int]], search: Search) -> None:
    """Check that a fused score is that of the ranks, and that no row stands farther back than among all rows.

    It may stand farther ahead, since an index misses rows before it.
    """
    weights = {
        "vector": search.vector_weight,
        "sparse": search.sparse_weight,
        "text": search.text_weight,
    }
    said = {
        "vector": match.get("vector_rank"),
        "sparse": match.get("sparse_rank"),
        "text": match.get("text_rank"),
    }
    ranks = {name: rank for name, rank in said.items() if rank is not None}
    assert ranks, "a row is in no ranking"
    total = sum(weights[name] / (60 + rank) for name, rank in ranks.items())
    assert match["score"] == pytest.approx(total, rel=1e-9)
    for name, rank in ranks.items():
        assert 1 <= rank <= exact[name][match["key"]], "a row has a wrong rank"


def check_searches(
    searched: Searched, drawn: Sequence[Drawn], plan: Sequence[str], seconds: float = 30.0
) -> None:
    with planning(searched, plan) as connection:
        found = searched.search(connection, drawn, seconds)
    check_all(found, drawn, searched)


def check_pages(
    searched: Searched, first: Drawn, num_pages: int, plan: Sequence[str], *, are_together: bool = False
) -> None:
    """Read pages one after the other, and all of their rows at once; each by a call, or all by one."""
    limit = first.search.limit
    wanted = [(limit, page * limit) for page in range(num_pages)] + [(num_pages * limit, 0)]
    drawn = [replace(first, search=replace(first.search, limit=end, offset=start)) for end, start in wanted]
    calls = [drawn] if are_together else [[each] for each in drawn]
    with planning(searched, plan) as connection:
        found = [nearest for call in calls for nearest in searched.search(connection, call)]
    check_all(found, drawn, searched)
    *pages, whole = found
    if any("pages_differ_because" in page for page in pages[1:]):
        return
    keys = [key for page in pages for key in list_keys(page)]
    assert len(keys) == len(set(keys)), "pages repeat rows"
    assert set(keys) == set(list_keys(whole)), "pages miss rows"
    if (
        whole["num_rows_read"] is not None or not searched.kind.has_indexes
    ):  # an index gives rows in nearly their order
        assert keys == list_keys(whole), "pages are not those of one list"


@contextmanager
def planning(searched: Searched, plan: Sequence[str]) -> Iterator[Connection]:
    """Yield a connection on which Postgres plans with these settings."""
    with searched.engine.connect() as connection:
        for setting in plan:
            connection.execute(text(f"SET LOCAL {setting}"))
        yield connection


def draw_plan(searched: Searched, data: st.DataObject) -> Sequence[str]:
    return data.draw(st.sampled_from(PLANS if searched.kind.has_indexes else PLANS[:1]))


def play_round(searched: Searched, data: st.DataObject) -> None:
    check_searches(searched, data.draw(rounds(searched)), draw_plan(searched, data))


def play_pages(searched: Searched, data: st.DataObject) -> None:
    drawn = data.draw(searches(searched, st.integers(1, 40), st.just(0)))
    num_pages, are_together = data.draw(st.integers(2, 4)), data.draw(st.booleans())
    check_pages(searched, drawn, num_pages, draw_plan(searched, data), are_together=are_together)


def play_haste(searched: Searched, data: st.DataObject) -> None:
    """Search in too little time: it ends with an error, or all that is found is right."""
    drawn, seconds = data.draw(rounds(searched)), data.draw(st.sampled_from([0.0, 0.001, 0.004, 0.02]))
    with suppress(SearchTimeout):
        check_searches(searched, drawn, draw_plan(searched, data), seconds)


Play = Callable[[Searched, st.DataObject], None]
SETTINGS: Final = settings(
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def play(act: Play, searched: Searched, max_examples: int) -> None:
    @settings(SETTINGS, max_examples=max_examples)
    @given(data=st.data())
    def play_example(data: st.DataObject) -> None:
        act(searched, data)

    play_example()


BOTH: Final = (DENSE, MULTI_VECTOR)
ELSEWHERE: Final = parse_filter({"not": {"_passage.document": "long"}})
Cases = Sequence[tuple[str, str, Search, Sequence[str]]]
# Searches that found too little in earlier releases, or in a wrong order: what is hard, collection, search, plan.
FORMER: Final[Cases] = [
    ("equal scores at the end of a page", "halves", Search(limit=3), ()),
    ("equal scores at the end of a ranking", "halves", Search(limit=26, mode=HYBRID, words="harbour"), ()),
    (
        "ranks by an index, which gives rows in nearly their order",
        "halves indexed",
        Search(limit=40, mode=HYBRID, words="harbour or orchard"),
        FORCE_INDEX,
    ),
    (
        "candidates of MaxSim, of which an index that gives up finds none",
        "several indexed",
        Search(condition=ELSEWHERE, ef_search=10, outputs=BOTH),
        PLANS[2],
    ),
    (
        "more candidates of MaxSim than an index gives",
        "several indexed",
        Search(limit=1000, outputs=BOTH),
        FORCE_INDEX,
    ),
    (
        "documents among candidates of MaxSim",
        "several",
        Search(limit=3, by_document=True, outputs=(SPARSE, MULTI_VECTOR)),
        (),
    ),
    (
        "documents by MaxSim alone",
        "several",
        Search(limit=2, by_document=True, outputs=(MULTI_VECTOR,)),
        (),
    ),
]
FORMER_PAGES: Final[Cases] = [
    ("of equal scores", "halves", Search(limit=3), ()),
    ("fused", "halves", Search(limit=25, mode=HYBRID, words="harbour"), ()),
    ("ordered by MaxSim", "several", Search(limit=25, outputs=BOTH), ()),
    ("by an index", "halves indexed", Search(limit=3), PLANS[2]),
]


@pytest.mark.parametrize(
    ("name", "search", "plan"), [case[1:] for case in FORMER], ids=[case[0] for case in FORMER]
)
def test_searches_that_were_wrong_are_right(
    name: str, search: Search, plan: Sequence[str], collections: Collections
) -> None:
    check_searches(collections.find(name), [Drawn(search, 0)], plan)


@pytest.mark.parametrize(
    ("name", "search", "plan"), [case[1:] for case in FORMER_PAGES], ids=[case[0] for case in FORMER_PAGES]
)
def test_pages_that_were_wrong_are_right(
    name: str, search: Search, plan: Sequence[str], collections: Collections
) -> None:
    check_pages(collections.find(name), Drawn(search, 0), 3, plan)


@pytest.mark.parametrize("name", KINDS)
def test_searches_find_what_brute_force_finds(name: str, collections: Collections) -> None:
    play(play_round, collections.find(name), 40)


@pytest.mark.parametrize("name", KINDS)
def test_pages_neither_repeat_nor_miss_rows(name: str, collections: Collections) -> None:
    play(play_pages, collections.find(name), 15)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_found_in_too_little_time_is_right(name: str, collections: Collections) -> None:
    play(play_haste, collections.find(name), 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", KINDS)
def test_searches_of_other_collections_agree(name: str, seed: int, postgres_url: str) -> None:
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        searched = make_searched(engine, name, seed)
        for act in (play_round, play_pages, play_haste):
            play(act, searched, 200)


def test_maxsim_of_all_rows_ends_with_its_time(
    collections: Collections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of the rows is read in less time than the search has for all of them."""
    monkeypatch.setattr("vectormill.vectors.representations._DIMENSIONS_AT_ONCE", 4)  # one row
    searched = collections.find("several")
    drawn = Drawn(Search(outputs=(MULTI_VECTOR,)), 0)
    with searched.engine.connect() as connection:
        try:
            (found,) = searched.search(connection, [drawn], 0.01)
        except SearchTimeout:
            return
    assert "incomplete_because" in found, "the search took longer, and does not say so"
    check_all([found], [drawn], searched)


@pytest.mark.parametrize(
    ("table", "name", "search"),
    [
        ("codebooks", "several", Search(outputs=(MULTI_VECTOR,))),
        ("calibrations", "codes of int8", Search()),
        ("collections", "halves", Search(mode=HYBRID, words="harbour")),
    ],
)
def test_a_search_that_waits_for_a_table_ends_with_its_time(
    table: str, name: str, search: Search, collections: Collections
) -> None:
    searched = collections.find(name)
    with searched.engine.begin() as other, searched.engine.connect() as connection:
        other.execute(text(f"LOCK TABLE vectormill.{table}"))
        with pytest.raises(SearchTimeout):
            searched.search(connection, [Drawn(search, 0)], 0.1)
