"""Collections with thousands of vectors and no texts, for tests of indexes, and a run that builds them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from sqlalchemy import Connection, Engine, text

from indexer.context import RunContext
from tests.building import make_context, make_run
from tests.database import ask
from tests.protocol import SPEC
from vectormill.collections.collection import Generation
from vectormill.collections.collections import open_collection
from vectormill.collections.generation_tables import upsert_rows
from vectormill.collections.indexes import FoundIndex, find_indexes
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.runs.run import INDEX, INDEXING
from vectormill.search.matches import find_matches
from vectormill.search.operations import SearchAnswer
from vectormill.search.search import Search
from vectormill.vectors.vector_types import make_rows


def draw_vectors(num_rows: int, dimensions: int = SPEC.dimensions) -> npt.NDArray[np.float32]:
    """Return random unit vectors float32 [num_rows, dimensions], the hardest case for an index."""
    drawn = np.random.default_rng(7).standard_normal((num_rows, dimensions)).astype(np.float32)
    drawn /= np.linalg.norm(drawn, axis=1, keepdims=True)
    return drawn


def make_collection(
    engine: Engine,
    vectors: npt.NDArray[np.float32],
    describe: Callable[[int], bytes] = lambda _: b"",
    spec: EncodingSpec = SPEC,
    name: str = "docs",
) -> Generation:
    """Make a live generation with these vectors; `describe` returns the metadata of a row as JSON."""
    spec = replace(spec, dimensions=vectors.shape[1])
    kind = spec.kept_type
    items = [Item(str(number), b"text %d" % number, describe(number)) for number in range(len(vectors))]
    with engine.begin() as connection:
        generation = open_collection(connection, name, spec)
        rows = make_rows(vectors, kind, None)
        upsert_rows(connection, generation.id, 1, items, rows, spec)
    return generation


def search_collection(
    connection: Connection, generation: Generation, embedding: npt.NDArray[np.float32], limit: int
) -> SearchAnswer:
    """Return the `limit` rows that are nearest to `embedding`, finite float32 [dimensions]."""
    (found,) = find_matches(connection, generation, [(Search(limit=limit), embedding)])
    return found


def wish(engine: Engine, **columns: str) -> None:
    """Set columns of the collection `docs` to SQL expressions."""
    values = ", ".join(f"{name} = {value}" for name, value in columns.items())
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE vectormill.collections SET {values} WHERE name = 'docs'"))


def start_run(
    engine: Engine,
    *,
    options: Mapping[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
    kind: str = INDEX,
    **settings: Any,
) -> tuple[RunContext, dict[str, Any]]:
    """Return the context of a run in phase indexing, and a dict that receives the run's reports."""
    run = make_run(kind=kind, phase=INDEXING, options=options or {})
    report: dict[str, Any] = {}

    def tell(phase: str, found: Mapping[str, Any]) -> None:
        assert phase == INDEXING
        report.clear()
        report.update(found)

    return make_context(engine, run, check, tell, **{"index_rows": 100, **settings}), report


def indexes_of(engine: Engine, generation: Generation) -> list[FoundIndex]:
    """Return the indexes that depend on settings; that on the documents of passages is always there."""
    found = ask(engine, find_indexes, generation.id)
    return [index for index in found if index.name != f"{generation.table_name}_attributes_document"]


def names_of(engine: Engine, generation: Generation) -> list[str]:
    return [index.name for index in indexes_of(engine, generation)]


def execute(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))
