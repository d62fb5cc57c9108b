"""Plans of searches: read from EXPLAIN how Postgres will find the rows, and choose the statement by it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from sqlalchemy import Connection, text

from vectormill.collections.collection import Generation
from vectormill.collections.generation_tables import attributes_name, estimate_num_rows
from vectormill.collections.indexes import count_unindexed
from vectormill.db.session import walk_plan
from vectormill.search.rankings import Depth, Statement

# Up to this number, rows are found by an index on their metadata and compared exactly within a few milliseconds.
FEW_ROWS: Final = 2000
# Bound values that do not influence the plan of a search.
UNPLANNED: Final = ("query", "queries", "sparse", "words", "own")


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
