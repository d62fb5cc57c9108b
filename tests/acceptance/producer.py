"""Producer: submits jobs in spite of faults, notes which were acknowledged, and checks them at the end."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import numpy as np

from tests.acceptance import tiny
from tests.acceptance.parts import Parts
from tests.acceptance.stack import Stack
from vectormill.client import Client
from vectormill.jobs.job import TERMINAL_JOB_STATES
from vectormill.problems import ApiError, ApiUnreachable

# The API or its database is down, or the previous request with the same key is still being read.
_PASSING = (409, 502, 503, 504)
_PAUSE_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class Promise:
    """A job that was answered 202: its texts, their keys, and the collection that must get the vectors."""

    job_id: str
    collection: str | None
    keys: list[str]
    numbers: list[int]


@dataclass(slots=True)
class Ledger:
    """The jobs that were acknowledged, and the unexpected answers of the API."""

    promises: list[Promise] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)


class Producer:
    """A client that submits jobs in pairs, with and without a collection, and waits for both."""

    def __init__(self, url: str, seed: int, collection: str, job_items: int, ledger: Ledger) -> None:
        self._url = url
        self._dice = random.Random(seed)
        self._collection = collection
        self._job_items = job_items
        self._ledger = ledger

    def run(self, over: threading.Event) -> None:
        def pause(seconds: float) -> None:
            over.wait(seconds)

        with Client(self._url, timeout=15, pause=pause) as client:
            while not over.is_set():
                mine = [self._submit(client, target, over) for target in (None, self._collection)]
                for promise in mine:
                    if promise is not None:
                        self._wait(client, promise, over)

    def _submit(self, client: Client, collection: str | None, over: threading.Event) -> Promise | None:
        """Submit a job under one Idempotency-Key until there is an answer; None when the test is over first.

        Without the retries it would be unknown whether the job exists.
        """
        numbers = self._dice.sample(range(tiny.NUM_TEXTS), self._job_items)
        # All jobs use the same keys, so that in a collection the newest job wins.
        keys = [f"key{position}" for position in range(len(numbers))]
        key = str(uuid4())
        while True:
            try:
                job = client.submit(
                    tiny.items(numbers, keys), model=tiny.MODEL, collection=collection, idempotency_key=key
                )
            except (ApiError, ApiUnreachable, httpx.HTTPError) as error:
                self._note(error, "POST /v1/jobs")
                if over.wait(_PAUSE_SECONDS) and not isinstance(error, ApiUnreachable):
                    return None
                if over.is_set():
                    return None  # nothing was acknowledged
                continue
            promise = Promise(job["id"], collection, keys, numbers)
            self._ledger.promises.append(promise)
            return promise

    def _wait(self, client: Client, promise: Promise, over: threading.Event) -> None:
        while not over.wait(_PAUSE_SECONDS):
            try:
                if client.job(promise.job_id)["state"] in TERMINAL_JOB_STATES:
                    return
            except (ApiError, ApiUnreachable) as error:
                self._note(error, f"GET /v1/jobs/{promise.job_id}")

    def _note(self, error: Exception, request: str) -> None:
        if isinstance(error, ApiError) and error.status not in _PASSING:
            self._ledger.surprises.append(f"{request}: {error.status} {error}")


@contextmanager
def load(service: Stack | Parts, seed: int, num_producers: int, job_items: int) -> Iterator[Ledger]:
    """Let producers submit jobs while the block runs. At its end some of their jobs may still be open."""
    ledger, over = Ledger(), threading.Event()
    producers = [
        Producer(service.api_url, seed + number, f"docs_{seed}_{number % 2}", job_items, ledger)
        for number in range(num_producers)
    ]
    threads = [threading.Thread(target=producer.run, args=(over,)) for producer in producers]
    for thread in threads:
        thread.start()
    try:
        yield ledger
    finally:
        over.set()
        for thread in threads:
            thread.join()
        print(f"{len(ledger.promises)} jobs were acknowledged")


def promise(parts: Parts, numbers: list[int], collection: str | None = None) -> Promise:
    """Submit one job of these texts, and return it as a promise."""
    keys = [f"k{number}" for number in numbers]
    with parts.client() as client:
        job = client.submit(tiny.items(numbers, keys), model=tiny.MODEL, collection=collection)
    return Promise(job["id"], collection, keys, numbers)


def assert_kept(parts: Parts, *promises: Promise, seconds: float = 120.0) -> None:
    """Check that every job ends, with exactly one vector for each item, which is its own."""
    with parts.client() as client:
        for each in promises:
            client.wait(each.job_id, timeout_seconds=seconds)
    broken = find_broken_promises(parts, promises, parts.directory)
    assert not broken, "\n".join(broken)


def answers(url: str) -> bool:
    """Return whether an API answers at this URL."""
    try:
        return httpx.get(f"{url}/livez", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def find_broken_promises(stack: Stack | Parts, promises: Sequence[Promise], directory: Path) -> list[str]:
    """Return a sentence for each broken promise, such as an item without exactly one vector, its own."""
    broken: list[str] = []
    sequence = {str(job_id): seq for job_id, seq in stack.sql("SELECT id, seq FROM vectormill.jobs")}
    with stack.client() as client:
        for promise in promises:
            broken += _check_job(client, promise, directory)
    for name in sorted({promise.collection for promise in promises if promise.collection}):
        of_it = [promise for promise in promises if promise.collection == name and promise.job_id in sequence]
        broken += _check_collection(
            stack, name, sorted(of_it, key=lambda each: int(str(sequence[each.job_id]))), directory
        )
    left = list(
        stack.sql(
            "SELECT job_id, state, count(*) FROM vectormill.chunks"
            " WHERE state IN ('pending', 'queued', 'leased') GROUP BY job_id, state"
        )
    )
    return broken + [f"chunks are left: {row}" for row in left]


def _check_job(client: Client, promise: Promise, directory: Path) -> list[str]:
    job = client.job(promise.job_id)
    counts = (job["state"], job["num_done"], job["num_failed"])
    broken = []
    if counts != ("completed", len(promise.keys), 0):
        codes = [error["code"] for error in client.errors(promise.job_id)]
        broken.append(f"job {promise.job_id}: {counts}, errors {sorted(set(codes))} × {len(codes)}")
    if promise.collection is not None:
        return broken  # the collection has the newest job's vectors: see _check_collection
    vectors = list(client.vectors(promise.job_id))
    if [vector["key"] for vector in vectors] != promise.keys:
        return [*broken, f"job {promise.job_id}: {len(vectors)} vectors of {len(promise.keys)} keys"]
    found = np.array([vector["embedding"] for vector in vectors], dtype=np.float32)
    wrong = tiny.wrong_vectors(directory, promise.numbers, found)
    return broken + ([f"job {promise.job_id}: wrong vectors {wrong[:5]}"] if wrong else [])


def _check_collection(
    stack: Stack | Parts, name: str, oldest_first: list[Promise], directory: Path
) -> list[str]:
    newest = {
        key: number
        for promise in oldest_first
        for key, number in zip(promise.keys, promise.numbers, strict=True)
    }
    rows = [(str(key), str(vector)) for key, vector in stack.sql(f"SELECT key, embedding::text FROM {name}")]
    if sorted(key for key, _ in rows) != sorted(newest):
        return [f"collection {name}: {len(rows)} rows of {len(newest)} keys"]
    found = np.array([np.fromstring(vector.strip("[]"), sep=",") for _, vector in rows], dtype=np.float32)
    wrong = tiny.wrong_vectors(directory, [newest[key] for key, _ in rows], found)
    return [f"collection {name}: not the newest job's vectors {wrong[:5]}"] if wrong else []
