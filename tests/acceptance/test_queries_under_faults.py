"""Queries while a worker is killed or Redis is away: each is answered, at once or with a sentence that says why not."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from redis import Redis

from tests.acceptance import tiny
from tests.acceptance.parts import Parts
from tests.waiting import wait_for
from vectormill.broker.queries import pulse_key
from vectormill.jobs.job import COMPLETED

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

NUM_CLIENTS = 8
# Of searches in a row: a death is noticed in a second, and on a busy machine it may be some.
LATE_SECONDS = 5.0


def fill(parts: Parts, collection: str) -> None:
    with parts.client() as client:
        job = client.submit(tiny.items(list(range(200))), model=tiny.MODEL, collection=collection)
        assert client.wait(job["id"], timeout_seconds=120)["state"] == COMPLETED


def search(parts: Parts, collection: str, number: int) -> httpx.Response:
    url = f"{parts.api_url}/v1/collections/{collection}/search"
    return httpx.post(url, json={"text": tiny.texts()[number], "limit": 1}, timeout=60, trust_env=False)


def is_found(answer: httpx.Response, number: int) -> bool:
    return answer.status_code == 200 and answer.json()["data"][0]["key"] == f"k{number}"


def count_listeners(parts: Parts) -> int:
    """Workers with a pulse: a process that is there may still be loading its model."""
    with Redis.from_url(parts.redis_url) as redis:
        return sum(1 for _ in redis.scan_iter(pulse_key("*")))


def test_queries_are_answered_while_workers_are_killed(parts: Parts, collection: str) -> None:
    fill(parts, collection)
    killed: list[int] = []
    slowest = 0.0

    def ask(number: int) -> httpx.Response:
        nonlocal slowest
        began = time.monotonic()
        answer = search(parts, collection, number % 200)
        slowest = max(slowest, time.monotonic() - began)
        return answer

    wait_for(lambda: count_listeners(parts) == 2, 120, "both workers take queries")
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        for round_number in range(3):
            answers = [clients.submit(ask, number) for number in range(200)]
            wait_for(lambda: sum(each.done() for each in answers) > 20, because="searches are answered")  # noqa: B023
            victim = parts.workers()[0]
            killed.append(victim.pid)
            victim.send_signal(signal.SIGKILL)
            for number, each in enumerate(answers):
                assert is_found(each.result(), number), each.result().text
            psutil.wait_procs([victim], timeout=60)
            wait_for(lambda: count_listeners(parts) == 2, 120, "the worker is back, and takes queries")
            assert len(killed) == round_number + 1
    assert slowest < LATE_SECONDS


def test_queries_wait_for_a_redis_that_is_restarted(parts: Parts, collection: str) -> None:
    fill(parts, collection)
    assert is_found(search(parts, collection, 3), 3)
    parts.valkey.stop()
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = [clients.submit(search, parts, collection, number) for number in range(NUM_CLIENTS)]
        parts.valkey.start()
        for number, each in enumerate(answers):
            assert is_found(each.result(), number), each.result().text
    ((num_jobs,),) = parts.sql("SELECT count(*) FROM vectormill.jobs WHERE finished_at IS NULL")
    assert num_jobs == 0
