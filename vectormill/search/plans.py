"""Plans of searches: what Postgres means to do before it does it, and what of it a client should know."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.rows.attributes import attributes_name
from vectormill.collections.rows.generation_tables import estimate_num_rows
from vectormill.search.rankings import Statement

# As the last ANALYZE or VACUUM counted.
# So many rows are found by an index on their metadata and compared in a few milliseconds.
FEW_ROWS: Final = 2000
# Fields in which the searches of one request differ, and their plans do not.
UNPLANNED: Final = ("query", "queries", "words", "own")


@dataclass(frozen=True, slots=True)
class PlannedReading:
    """The way Postgres will run a search: by the vectors' index, or by reading about so many rows for want of one.

    `num_filtered` is how many rows it expects from an index on their metadata or words; None without such an index.
    """

    is_by_index: bool
    num_rows_read: int | None
    num_filtered: int | None


class Plans:
    """The plans of statements, asked once of those that differ in their vectors alone. Reads no row."""

    def __init__(self, connection: Connection, generation: Generation) -> None:
        self._connection = connection
        self._generation = generation
        self._readings: dict[tuple[str, str], PlannedReading] = {}

    def choose(
        self, write: Callable[..., Statement], *, is_exact: bool, is_filtered: bool
    ) -> tuple[Statement, PlannedReading]:
        """The statement to run: `write(is_exact=…)`, exact when that is asked for or a filter leaves few rows.

        The planner takes the vectors' index for cheaper than it is when most of what it gives is filtered out: 12 ms
        instead of 3 ms where 200 of 20,000 rows fit, and not all of the nearest.
        """
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
        if any("Order By" in node for node in nodes):
            return PlannedReading(True, None, num_filtered)
        whole = [node for node in nodes if is_scan(node) and node["Relation Name"] == table]
        if whole and num_filtered is None:  # by all processes that read it together
            num_rows = max(int(node["Plan Rows"]) for node in whole) * num_readers(plan["Plan"])
            return PlannedReading(False, num_rows, None)
        if any(is_scan(node) and "Filter" in node for node in of_attributes):
            return PlannedReading(False, self._count_attributes(attributes), num_filtered)
        return PlannedReading(False, None, num_filtered)

    def _count_attributes(self, attributes: str) -> int:
        return estimate_num_rows(self._connection, attributes) or 0


def is_scan(node: Mapping[str, Any]) -> bool:
    """Return whether the node reads a table from its beginning to its end."""
    return bool(node["Node Type"] == "Seq Scan")


def is_by_own_index(node: Mapping[str, Any], primary_key: str) -> bool:
    """Return whether the node finds rows by another index than that of their keys."""
    below = [inner for inner in walk_plan(node) if "Index Name" in inner]
    return any(inner["Index Name"] != primary_key for inner in below)


def num_readers(plan: Mapping[str, Any]) -> int:
    """Return how many processes run the plan's parallel part, or 1."""
    planned = max((int(node.get("Workers Planned", 0)) for node in walk_plan(plan)), default=0)
    return planned + 1


def walk_plan(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The node and all below it."""
    yield node
    for below in node.get("Plans", ()):
        yield from walk_plan(below)
