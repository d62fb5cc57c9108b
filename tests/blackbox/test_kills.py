"""Kill or empty anything: a job costs time, and no item."""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.blackbox.service import Service, assert_close, wait_for

NUM_ITEMS = 600


@contextmanager
def job_in_the_middle(service: Service, name: str) -> Iterator[dict[str, str]]:
    """Yield the texts of a job of which some vectors are committed while its model stands still; wait for its end."""
    texts = {f"k{n}": f"{name} {n} " + "some words of text " * 8 for n in range(NUM_ITEMS)}
    job = service.submit(texts, collection=name)
    wait_for(lambda: service.ask("GET", f"/v1/jobs/{job}")["num_done"] > 0, "the first vectors are there")
    with service.frozen():
        yield texts
    if service.process is None:
        service.start()
    wait_for(service.is_ready, "the service is whole again")
    ended = service.wait(job, 300)
    assert (ended["state"], ended["num_done"], ended["num_failed"]) == ("completed", NUM_ITEMS, 0)
    rows = service.rows(name)
    assert sorted(rows) == sorted(texts)
    assert_close(rows["k599"], service.embed([texts["k599"]])[0])


@pytest.mark.parametrize(
    "victim", ["runner_process", "worker.app", "scheduler", "indexer", "valkey-server", "postgres"]
)
def test_a_killed_process_costs_time_and_no_item(service: Service, name: str, victim: str) -> None:
    with job_in_the_middle(service, name):
        process = service.processes(victim)[0]
        if victim == "postgres":  # the server itself, and not one of its connections
            process = next(each for each in service.processes(victim) if each.name() == "postgres")
        process.kill()
        psutil.wait_procs([process], timeout=60)


def test_a_killed_api_comes_back(service: Service, name: str) -> None:
    with job_in_the_middle(service, name):
        process = next(
            each for each in service.processes() if "api" in each.cmdline() or "api.main" in each.cmdline()
        )
        process.kill()
        psutil.wait_procs([process], timeout=60)
        wait_for(lambda: service.is_ready() or None, "the API answers again")


def test_a_power_cut_costs_time_and_no_item(service: Service, name: str) -> None:
    with job_in_the_middle(service, name):
        service.kill()


def test_an_emptied_redis_costs_time_and_no_item(service: Service, name: str) -> None:
    import json

    from redis import Redis

    with job_in_the_middle(service, name):
        url = json.loads((service.data_dir / "stack.json").read_text())["redis_url"]
        with Redis.from_url(url) as redis:
            redis.flushall()
