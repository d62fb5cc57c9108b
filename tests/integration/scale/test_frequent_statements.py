"""Statements that run often read little, however many jobs are open: each of them is explained at scale.

The duties run as they are, and each of their statements is explained with its values before it is sent. So a new
statement is measured without being listed here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
from sqlalchemy import Engine, event, text

from indexer.follower import Follower
from indexer.loops import keep_next
from scheduler.index_maintainer import IndexMaintainer
from scheduler.main import fire_due_schedules
from scheduler.pruner import Pruner
from scheduler.reaper import Reaper
from tests.api_server import api_client
from tests.database import ask
from tests.full_database import NUM_IN_FLIGHT, NUM_MODELS, fill_database
from tests.protocol import claim, complete, make_items, register_worker, submit
from tests.services import connected_engine, migrated_database, of_database
from tests.statements import name_statement
from vectormill.db.session import walk_plan
from vectormill.jobs.backlog import add_up_counts
from vectormill.jobs.chunks import renew_leases
from vectormill.jobs.dispatch import list_aged_jobs, list_demands, list_queued, list_rooms, mark_queued
from vectormill.jobs.transitions import add_up_jobs, rescue_expired_chunks
from vectormill.models.registry import Registry
from vectormill.objects.input import claim_input
from vectormill.objects.output import claim_output
from vectormill.runs.runs import claim_run
from vectormill.settings import Settings
from vectormill.webhooks.webhooks import claim_deliveries

SETTINGS: Final = Settings()
MODELS: Final = [f"model-{number}" for number in range(NUM_MODELS)]
LARGE_TABLES: Final = {"jobs", "chunks", "chunk_payloads", "item_errors", "runs"}
# Pages of 8 KiB that a statement may touch: some look-ups in an index, or a table with a row for each worker or
# collection.
FEW_BUFFERS: Final = 2_500


@dataclass(frozen=True, slots=True)
class Exempt:
    """A statement that may read more. `grows_with` says why that is bounded, or how rarely it runs."""

    name: str
    most_buffers: int
    grows_with: str


IN_FLIGHT: Final = 3 * NUM_IN_FLIGHT
EXEMPT: Final = {
    each.name: each
    for each in (
        Exempt("LIST_ROOMS", IN_FLIGHT, "chunks in flight, which the workers' slots bound"),
        Exempt("LIST_WAITING", IN_FLIGHT, "chunks in flight, at a scrape"),
        Exempt("COUNT_BACKLOG", IN_FLIGHT, "chunks in flight, at a scrape"),
        Exempt("LIST_IN_HAND", IN_FLIGHT, "chunks in flight, when a client asks for a job that waits"),
        Exempt("RESCUE_EXPIRED", IN_FLIGHT, "chunks in flight, every 5 s"),
        Exempt("LIST_DEMANDS", 8 * 500 * NUM_MODELS, "the first 500 jobs of each model"),
        Exempt("LIST_AGED_JOBS", 2 * 10 * 100 * NUM_MODELS, "the first 100 jobs of each model and priority"),
        Exempt("START_JOBS", 40 * 100, "the jobs that it starts"),
        Exempt("MARK_QUEUED", 40 * 100, "the chunks that it marks"),
        Exempt("LIST_UNENDED", 100_000, "all open jobs, every 10 minutes"),
    )
}


@dataclass(frozen=True, slots=True)
class Explained:
    """The cost of one statement: the pages of 8 KiB that it touched, and the large tables that it read as a whole."""

    name: str
    num_buffers: int
    read_whole: list[str]


@contextmanager
def explaining(engine: Engine) -> Iterator[list[Explained]]:
    """Explain each statement that is executed on the engine while the block runs, and undo that at once."""
    explained: list[Explained] = []

    def explain(
        connection: Any, cursor: Any, statement: str, values: Any, context: Any, is_many: bool
    ) -> None:
        if not statement.lstrip().startswith(("SELECT", "WITH", "INSERT", "UPDATE", "DELETE")):
            return
        driver = cursor.connection
        with driver.transaction(force_rollback=True):
            query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}"
            (plan,) = driver.execute(query, values[0] if is_many else values).fetchone()[0]
        top = plan["Plan"]
        whole = [node["Relation Name"] for node in walk_plan(top) if node["Node Type"] == "Seq Scan"]
        explained.append(
            Explained(
                name_statement(statement),
                top["Shared Hit Blocks"] + top["Shared Read Blocks"],
                [table for table in whole if table in LARGE_TABLES],
            )
        )

    event.listen(engine, "before_cursor_execute", explain)
    try:
        yield explained
    finally:
        event.remove(engine, "before_cursor_execute", explain)


@pytest.fixture(scope="module")
def full(postgres_url: str) -> Iterator[Engine]:
    with migrated_database(postgres_url) as url, connected_engine(url) as engine:
        with connected_engine(of_database(postgres_url, engine.url.database or "")) as admin:
            fill_database(admin)
        yield engine


def dispatch(engine: Engine) -> None:
    with engine.begin() as connection:
        list_rooms(connection)
        aged = list_aged_jobs(connection, MODELS, 600.0, 100)
        demands = list_demands(connection, MODELS, 500, aged)
        assert demands
        mark_queued(connection, [(demand.job_id, 1) for demand in demands[:100]])
        list_queued(connection)


def repair(engine: Engine) -> None:
    Reaper(engine, SETTINGS).reap()
    ask(engine, rescue_expired_chunks)


def prune(engine: Engine) -> None:
    Pruner(engine, 30 * 86400.0, 86400.0).step()


def keep_house(engine: Engine) -> None:
    IndexMaintainer(engine, SETTINGS).tend()
    fire_due_schedules(engine)
    add_up_counts(engine)
    add_up_jobs(engine)


def index(engine: Engine) -> None:
    with engine.begin() as connection:
        claim_run(connection, "owner", 30.0)
        claim_output(connection, "owner", 30.0)
        claim_input(connection, "owner", 30.0)
        claim_deliveries(connection, {}, owner="owner", most=4, room=64, lease_seconds=30.0)
        connection.execute(text("INSERT INTO vectormill.source_changes (collection_id, key) VALUES (7, 'k')"))
    keep_next(engine, SETTINGS, Registry(SETTINGS.models), "owner", threading.Event())
    follower = Follower(engine.url.render_as_string(hide_password=False), SETTINGS, Registry(SETTINGS.models))
    follower._engine = engine
    follower.step()


def work(engine: Engine) -> None:
    owner = register_worker(engine)
    submit(engine, make_items(4), priority=0)
    (demand,) = ask(engine, list_demands, ["fake"], 1)
    (chunk,) = ask(engine, mark_queued, [(demand.job_id, 1)])
    claimed = claim(engine, chunk.chunk_id, owner)
    assert claimed is not None
    ask(engine, renew_leases, [claimed], 30.0)
    assert complete(engine, claimed)


def serve(engine: Engine) -> None:
    with api_client(engine, max_pending_items=10**10) as client:
        submitted = client.post("/v1/jobs", json={"items": [{"key": "k", "text": "text"}]})
        waiting = f"/v1/jobs/{submitted.raise_for_status().json()['id']}"
        for path in (waiting, "/v1/jobs", "/v1/jobs?state=queued", "/metrics", "/readyz", "/v1/workers"):
            client.get(path).raise_for_status()


@pytest.mark.parametrize("duty", [dispatch, repair, prune, keep_house, index, work, serve])
def test_what_runs_often_reads_little_among_a_hundred_thousand_open_jobs(
    full: Engine, duty: Callable[[Engine], None]
) -> None:
    with explaining(full) as explained:
        duty(full)
    assert explained
    for each in explained:
        exempt = EXEMPT.get(each.name)
        most = FEW_BUFFERS if exempt is None else exempt.most_buffers
        assert each.num_buffers <= most, each
        assert not each.read_whole or each.name == "LIST_UNENDED", each
