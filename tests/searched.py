"""A collection of 20,000 rows with metadata, texts and passages for tests of searches, and search plans."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from api.searches import SearchPool
from tests.database import ask
from tests.protocol import SPEC
from tests.services import connected_engine, migrated_database
from vectormill.collections.collection import Generation
from vectormill.collections.collections import find_generation, open_collection
from vectormill.collections.generation_tables import upsert_rows
from vectormill.db.session import walk_plan
from vectormill.jobs.item import Item
from vectormill.search.filter_sql import TEXT_INDEX, define_filter_indexes, name_text_index
from vectormill.search.matches import Finder, find_matches, make_queries
from vectormill.search.rankings import Depth, Plans, Ranking
from vectormill.search.search import Deadline, Search
from vectormill.settings import Settings
from vectormill.vectors.vector_types import make_rows

LANGUAGE: Final = "pg_catalog.simple"
NUM_ROWS: Final = 20_000
# Every fifth row is a passage; the first document has so many that they fill every page alone.
PASSAGE_STRIDE: Final = 5
LONG_DOCUMENT: Final = 1200
FILTERED: Final = ("part", "year", "*")
WIDE: Final = replace(SPEC, dimensions=16)
WORDS: Final = ("harbour", "meadow", "lantern", "orchard", "granite", "whistle", "compass", "thistle")


@dataclass(frozen=True)
class Searched:
    """A collection `docs` whose row k<n> has vector n of `vectors`, float32 [NUM_ROWS, 16] of length 1."""

    engine: Engine
    vectors: npt.NDArray[np.float32]

    def generation(self) -> Generation:
        return ask(self.engine, find_generation, "docs")

    def search(self, query: npt.NDArray[np.float32] | None = None, **options: Any) -> Any:
        generation = ask(self.engine, find_generation, "docs")
        (found,) = ask(self.engine, find_matches, generation, [(Search(**options), query)])
        return found

    def nearest(
        self, query: npt.NDArray[np.float32], numbers: npt.NDArray[np.int64], limit: int
    ) -> list[str]:
        """Return the keys of the `limit` rows among `numbers` that are exactly nearest."""
        order = np.argsort(-(self.vectors[numbers] @ query))[:limit]
        return [f"k{number}" for number in numbers[order]]

    def explain(self, query: npt.NDArray[np.float32] | None = None, **options: Any) -> list[dict[str, Any]]:
        """Return the nodes of the plan with which Postgres would run the search."""
        search = Search(**options)
        with self.engine.connect() as connection:
            queries = make_queries(connection, self.generation(), search, query, None)
            assert queries is not None
            Finder(connection, self.generation(), Deadline(30))._prepare(search)
            ranking = Ranking(self.generation(), search, queries, LANGUAGE)
            statement, _ = Plans(connection, self.generation()).choose(
                ranking.write_page, Depth(search.num_wanted)
            )
            explained = text(f"EXPLAIN (FORMAT JSON) {statement.sql}")
            (plan,) = connection.execute(explained, statement.values).scalar_one()
        return [dict(node) for node in walk_plan(plan["Plan"])]


def describe_row(number: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "lang": ("de", "en")[number % 2],
        "year": 2000 + number % 25,
        "part": number % 100,
        "shelf": number % 100,  # the values of part, without an index
        "tags": [WORDS[number % 8], f"tag {number % 500}"],
    }
    if number % 100 == 9:
        metadata["rare"] = None
    if number % PASSAGE_STRIDE == 0:
        place = number // PASSAGE_STRIDE
        document = 0 if place < LONG_DOCUMENT else place // 4
        metadata["_passage"] = {"document": f"d{document}", "index": place, "start": 0, "end": 9}
    return metadata


def make_vectors() -> npt.NDArray[np.float32]:
    """Return clustered unit vectors, as those of texts are; the long document's passages form one cluster."""
    random = np.random.default_rng(7)
    centres = random.standard_normal((200, WIDE.dimensions))
    vectors = centres[random.integers(0, 200, NUM_ROWS)] + 0.5 * random.standard_normal(
        (NUM_ROWS, WIDE.dimensions)
    )
    long = np.arange(LONG_DOCUMENT) * PASSAGE_STRIDE
    vectors[long] = centres[0] + 0.05 * random.standard_normal((LONG_DOCUMENT, WIDE.dimensions))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def fill(connection: Connection, vectors: npt.NDArray[np.float32]) -> None:
    generation = open_collection(connection, "docs", WIDE)
    connection.execute(text("UPDATE vectormill.collections SET keep_text = true"))
    kind = WIDE.kept_type
    items = [
        Item(
            f"k{number}",
            f"number {number} {WORDS[number % 8]} {WORDS[number // 8 % 8]}".encode(),
            json.dumps(describe_row(number)).encode(),
        )
        for number in range(NUM_ROWS)
    ]
    rows = make_rows(vectors, kind, None)
    upsert_rows(connection, generation.id, 1, items, rows, WIDE, keep_text=True)
    table = f"vectormill.{generation.table_name}"
    connection.execute(text("SET LOCAL maintenance_work_mem = '256MB'"))
    connection.execute(text(f"CREATE INDEX ON {table} USING hnsw (embedding halfvec_cosine_ops)"))
    driver = connection.connection.driver_connection
    assert driver is not None
    indexes = define_filter_indexes(generation.id, FILTERED)
    indexes[name_text_index(generation.id)] = TEXT_INDEX
    for name, definition in indexes.items():
        driver.execute(f"CREATE INDEX {name} ON {table}_attributes {definition.as_string(driver)}")


@contextmanager
def searched_collection(postgres_url: str) -> Iterator[Searched]:
    vectors = make_vectors()
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        ask(engine, fill, vectors)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
        yield Searched(engine, vectors)


def make_search_pool(engine: Engine) -> SearchPool:
    """Return a pool for searches that bring their vectors, so that it needs neither models nor workers."""
    nothing: Any = None
    return SearchPool(engine, Settings(max_requests=100), registry=nothing, queries=nothing)
