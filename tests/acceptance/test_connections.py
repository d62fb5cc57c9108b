"""How many connections each process opens at the most, while all of them have plenty to do."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import psycopg

from tests.acceptance.stack import Stack
from vectormill.models.registry import DEFAULT_MODEL

# docs/POSTGRES.md, "Connections".
BUDGET = {"worker": 6, "api": 10, "scheduler": 4, "indexer": 20}


def name_process(application: str) -> str | None:
    """Which of the budget's processes a session belongs to; None for `up` itself and for tests."""
    if "@" in application:
        return "worker"
    if application == "vectormill pruner":  # a thread of the scheduler
        return "scheduler"
    if application.removeprefix("vectormill ") in ("follower", "batches", "inputs", "outputs"):
        return "indexer"  # threads of it
    for name in ("api", "scheduler", "indexer"):
        if application.removeprefix("vectormill").strip("- ").startswith(name):
            return name
    return None


class Census:
    """The most sessions that each process had at any look, on a connection of its own."""

    def __init__(self, url: str) -> None:
        self.most: Counter[str] = Counter()
        self._url = url
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Census":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stopping.wait(0.02):
                rows = connection.execute("SELECT application_name FROM pg_stat_activity").fetchall()
                seen = Counter(name for (application,) in rows if (name := name_process(application)))
                self.most |= seen


def test_every_process_keeps_to_its_budget_of_connections(stack: Stack, collection: str) -> None:
    url = stack.urls()["database_url"].replace("postgresql+psycopg", "postgresql")
    items = [{"key": f"k{number}", "text": f"some text {number}"} for number in range(1500)]
    with Census(url) as census, stack.client() as client:
        jobs = [client.submit(items, model=DEFAULT_MODEL, collection=collection) for _ in range(3)]

        def ask(number: int) -> object:
            with stack.client() as asking:
                if number % 3:
                    return asking.job(jobs[number % 3]["id"])
                return asking.search(collection, f"text {number}")

        with ThreadPoolExecutor(24) as pool:
            list(pool.map(ask, range(72)))
        for job in jobs:
            assert client.wait(job["id"], timeout_seconds=300)["state"] == "completed"
    assert set(census.most) == set(BUDGET)
    assert all(census.most[name] <= BUDGET[name] for name in BUDGET), census.most
