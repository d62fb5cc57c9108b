"""collection: an index's recall and build, searches while a collection is built anew, filters, and single puts."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import psycopg
from numpy.typing import NDArray

from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.alongside import Alongside
from benchmarks.results.report import Report
from benchmarks.results.spread import find_percentile
from benchmarks.results.table import Measure, tabulate
from benchmarks.results.writing import write_number, write_ratio, write_seconds, write_share
from benchmarks.systems.own.articles import Articles
from benchmarks.systems.own.own_indexer import COLLECTION
from benchmarks.systems.own.updates import OwnUpdates
from vectormill.cli.stack import workplace
from vectormill.client import Client
from vectormill.problems import ApiError, ApiUnreachable

NUM_ROWS: Final = 20_000
NUM_QUERIES: Final = 200
NEAREST: Final = 10
SEARCH_PAUSE_SECONDS: Final = 0.005
# More are offered than are wanted: at the wanted rate itself none could be above it.
OFFERED_RATE, PUT_SECONDS, PUT_THREADS = 220, 10.0, 32
# Of 25 years and four languages, each row has one: a hundredth.
RARE: Final = {"lang": "de", "year": 2001}
OTHER_SPACE: Final = {"dimensions": 256}

RECALL_TARGET, FILTERED_RECALL_TARGET = 0.98, 0.95
BUILD_RATIO_TARGET: Final = 1.2
WAIT_RATIO_TARGET: Final = 2.0
PUT_RATE_TARGET, PUT_SECONDS_TARGET = 200, 1.0

# The settings that somebody who knows pgvector would try.
BY_HAND: Final = tuple(itertools.product((0, 1), ("256MB", "1GB")))
CREATE_INDEX: Final = "CREATE INDEX by_hand ON {table} USING hnsw (embedding halfvec_cosine_ops)"

Embeddings = NDArray[np.float32]
T = TypeVar("T")


def measure(order: Order) -> Report:
    num_rows = order.items or NUM_ROWS
    order.steps.begin("collection", 8)
    with workplace(None) as directory, ExitStack() as exits:
        order.steps.step("starting the stack")
        own = exits.enter_context(OwnUpdates(directory))
        client = own.client
        Articles(own.database_url).fill(num_rows)
        own.follow(index_policy="none")
        order.steps.step(f"encoding {num_rows:,} rows")
        own.update()
        connection = exits.enter_context(psycopg.connect(own.dsn, autocommit=True))
        measures = [*measure_index(order, client, connection), *measure_searches(order, own)]
        measures += measure_puts(order, client)
    return Report(
        "collection",
        f"{num_rows:,} short lines with all-MiniLM-L6-v2, halfvec of 384 dimensions, {NUM_QUERIES} queries.",
        (tabulate(measures),),
        (
            "Recall is the share of the exact ten nearest that a search with the index finds, at the defaults, for "
            "vectors of rows that are moved a little.",
            "By hand: the fastest of CREATE INDEX with zero or one parallel worker, and 256 MB or 1 GB of memory.",
            "A search every 5 ms, by its vector, while the table is encoded anew for 256 dimensions, indexed, checked "
            "and swapped: the encoding takes both cores meanwhile.",
        ),
    )


def measure_index(order: Order, client: Client, connection: "psycopg.Connection[Any]") -> list[Measure]:
    order.steps.step("building indexes by hand")
    table = find_table(connection)
    by_hand = min(build_by_hand(connection, table, *settings) for settings in BY_HAND)
    order.steps.step("building ours")
    queries = make_queries(connection, table)
    exact = [find_keys(client, query) for query in queries]
    filtered_exact = [find_keys(client, query, RARE) for query in queries]
    run = client.wait_run(client.set_index(COLLECTION, policy="hnsw")["id"], poll_seconds=0.05)
    seconds = seconds_of(run)
    order.steps.step("measuring recall")
    found = [find_keys(client, query) for query in queries]
    filtered, waits = zip(*(timed(partial(find_keys, client, query, RARE)) for query in queries), strict=True)
    recall, filtered_recall = find_recall(found, exact), find_recall(filtered, filtered_exact)
    return [
        Measure("recall@10 of the index", write_share(recall), f"≥ {RECALL_TARGET:.0%}", recall >= RECALL_TARGET),
        Measure(
            "build, to the best CREATE INDEX by hand",
            f"{write_ratio(seconds / by_hand)} ({write_seconds(seconds)})",
            f"≤ {BUILD_RATIO_TARGET:g}×",
            seconds / by_hand <= BUILD_RATIO_TARGET,
        ),
        Measure(
            "recall@10 where a hundredth matches",
            write_share(filtered_recall),
            f"≥ {FILTERED_RECALL_TARGET:.0%}",
            filtered_recall >= FILTERED_RECALL_TARGET,
        ),
        Measure("p99 of these filtered searches", write_seconds(find_percentile(waits, 99))),
    ]  # fmt: skip


def measure_searches(order: Order, own: OwnUpdates) -> list[Measure]:
    order.steps.step("searching a quiet collection")
    with psycopg.connect(own.dsn, autocommit=True) as connection:
        query = make_queries(connection, find_table(connection))[0]
    with Searcher(own.url, query) as quiet:
        time.sleep(5)
    order.steps.step("searching while it is built anew")
    with Searcher(own.url, query) as busy:
        own.update(**OTHER_SPACE)
    p99 = [find_percentile(searcher.seconds, 99) for searcher in (quiet, busy)]
    return [
        Measure("p99 of a search, quiet", write_seconds(p99[0])),
        Measure(
            "p99 of a search during load, build and swap, to quiet",
            f"{write_ratio(p99[1] / p99[0])} ({write_seconds(p99[1])})",
            f"≤ {WAIT_RATIO_TARGET:g}×",
            p99[1] / p99[0] <= WAIT_RATIO_TARGET,
        ),
        Measure(
            f"of {len(busy.seconds):,} searches meanwhile, failed",
            f"{busy.num_failed}",
            "0",
            busy.num_failed == 0,
        ),
    ]


def measure_puts(order: Order, client: Client) -> list[Measure]:
    order.steps.step("putting single items")
    client.put_item(COLLECTION, "warm-up", "A first text.")
    count = int(OFFERED_RATE * PUT_SECONDS)
    began = time.monotonic()

    def put(number: int) -> float:
        time.sleep(max(0.0, began + number / OFFERED_RATE - time.monotonic()))
        start = time.monotonic()
        answer = client.put_item(COLLECTION, f"put-{number}", f"Text number {number} of those that are put.")
        if not answer["is_searchable"]:
            raise BenchmarkFailed(f"Item put-{number} was not searchable in time.")
        return time.monotonic() - start

    with ThreadPoolExecutor(PUT_THREADS) as pool:
        waits = list(pool.map(put, range(count)))
    rate = count / (time.monotonic() - began)
    p99 = find_percentile(waits, 99)
    return [
        Measure("single puts a second", write_number(rate), f"≥ {PUT_RATE_TARGET}", rate >= PUT_RATE_TARGET),
        Measure(
            "p99 until a put is searchable",
            write_seconds(p99),
            f"≤ {PUT_SECONDS_TARGET:g} s",
            p99 <= PUT_SECONDS_TARGET,
        ),
    ]


class Searcher(Alongside):
    """Searches again and again on a thread of its own, and counts what failed."""

    def __init__(self, url: str, query: Embeddings) -> None:
        super().__init__("searcher")
        self.seconds: list[float] = []
        self.num_failed = 0
        self._client = Client(url)
        self._query = query

    def run(self) -> None:
        query = self._query
        while not self.is_over.wait(SEARCH_PAUSE_SECONDS):
            try:
                _, seconds = timed(partial(find_keys, self._client, query))
                self.seconds.append(seconds)
            except ApiError as error:
                # After the swap the collection has other dimensions, and says so; the query is cut as its model is.
                if len(query) == OTHER_SPACE["dimensions"]:
                    self.num_failed += 1
                query = query[: OTHER_SPACE["dimensions"]]
                if "dimensions" not in str(error):
                    self.num_failed += 1
            except ApiUnreachable:
                self.num_failed += 1


def timed(act: Callable[[], T]) -> tuple[T, float]:
    start = time.monotonic()
    result = act()
    return result, time.monotonic() - start


def find_keys(client: Client, query: Embeddings, where: dict[str, Any] | None = None) -> list[str]:
    matches = client.search(COLLECTION, embedding=query.tolist(), limit=NEAREST, filter=where)
    return [match["key"] for match in matches]


def find_recall(found: Sequence[Sequence[str]], exact: Sequence[Sequence[str]]) -> float:
    pairs = zip(found, exact, strict=True)
    return float(np.mean([len(set(some) & set(all_)) / max(len(all_), 1) for some, all_ in pairs]))


def find_table(connection: "psycopg.Connection[Any]") -> str:
    row = connection.execute("SELECT id FROM vectormill.generations WHERE state = 'live'").fetchone()
    assert row is not None
    return f"vectormill.generation_{row[0]}"


def make_queries(connection: "psycopg.Connection[Any]", table: str) -> list[Embeddings]:
    """Vectors [dimensions] of rows spread over the table, each moved a little."""
    statement = f"SELECT embedding::vector::real[] FROM {table} ORDER BY hashtext(key) LIMIT {NUM_QUERIES}"
    rows = np.array([row[0] for row in connection.execute(statement).fetchall()], dtype=np.float32)
    noise = np.random.default_rng(0).standard_normal(rows.shape, dtype=np.float32)
    return list(rows + 0.02 * noise)


def build_by_hand(connection: "psycopg.Connection[Any]", table: str, num_workers: int, memory: str) -> float:
    connection.execute(f"SET maintenance_work_mem = '{memory}'")
    connection.execute(f"SET max_parallel_maintenance_workers = {num_workers}")
    _, seconds = timed(lambda: connection.execute(CREATE_INDEX.format(table=table)))
    connection.execute("DROP INDEX vectormill.by_hand")
    return seconds


def seconds_of(run: Mapping[str, Any]) -> float:
    finished, started = (datetime.fromisoformat(run[name]) for name in ("finished_at", "started_at"))
    return (finished - started).total_seconds()
