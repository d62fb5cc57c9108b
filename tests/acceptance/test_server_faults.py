"""Postgres, Redis and the schedulers are restarted, emptied, filled or cut off under load; nothing is lost."""

import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
from redis.exceptions import ResponseError

from tests.acceptance import tiny
from tests.acceptance.parts import Parts
from tests.acceptance.producer import Ledger, Promise, answers, assert_kept, load, promise
from tests.waiting import wait_for
from vectormill.broker.app import queue_of
from vectormill.processes.lifetimes import free_port

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

JOB_ITEMS = 500
NUM_CYCLES = 10


def pids(parts: Parts) -> set[int]:
    return {process.pid for process in [*parts.workers(), *parts.runners()]}


def wait_for_progress(parts: Parts, ledger: Ledger) -> None:
    """Until chunks are done that were not done at the call."""

    def num_done() -> int:
        ((count,),) = parts.query("SELECT coalesce(sum(num_done), 0) FROM vectormill.jobs")
        return int(str(count))

    before = num_done()
    wait_for(lambda: num_done() > before, 120, f"jobs go on ({len(ledger.promises)} were acknowledged)")


def test_postgres_and_redis_restarted_ten_times_under_load_cost_no_item_and_no_worker(parts: Parts) -> None:
    before = pids(parts)
    with load(parts, seed=21, num_producers=2, job_items=JOB_ITEMS) as ledger:
        for cycle in range(NUM_CYCLES):
            wait_for_progress(parts, ledger)
            server = parts.postgres if cycle % 2 else parts.valkey
            assert server.pid is not None
            process = psutil.Process(server.pid)
            # SIGINT: a fast shutdown, as an operator's restart is.
            process.send_signal(signal.SIGKILL if cycle % 4 < 2 else signal.SIGINT)
            _, alive = psutil.wait_procs([process], timeout=60)
            assert not alive, f"{server.name} did not end"
            server.start()
        wait_for_progress(parts, ledger)
    assert_kept(parts, *ledger.promises)
    assert ledger.surprises == []
    assert pids(parts) == before, "a worker or its model was started afresh"


def test_keys_of_redis_deleted_and_renamed_under_load_cost_no_item(parts: Parts) -> None:
    dice = random.Random(31)
    with load(parts, seed=31, num_producers=2, job_items=JOB_ITEMS) as ledger, parts.redis() as redis:
        wait_for_progress(parts, ledger)
        for _ in range(20):
            keys = [key.decode() for key in redis.keys("*") if isinstance(key, bytes)]
            # A queue's list is there only while messages wait in it, so its name is tried whether it is or not.
            name = dice.choice([*sorted(keys), queue_of(tiny.MODEL), queue_of(tiny.MODEL) + "\x06\x169"])
            if dice.random() < 0.5 or not redis.exists(name):
                redis.delete(name)
            else:
                with suppress(ResponseError):  # its messages were taken meanwhile
                    redis.rename(name, f"lost:{uuid4()}")
            wait_for_progress(parts, ledger)
    assert_kept(parts, *ledger.promises)
    assert ledger.surprises == []


def test_of_three_schedulers_any_may_be_killed_at_any_time(parts: Parts) -> None:
    dice = random.Random(41)
    names = ["scheduler", "scheduler-2", "scheduler-3"]
    for name in names[1:]:
        parts.start(name, "scheduler")
    try:
        with load(parts, seed=41, num_producers=2, job_items=JOB_ITEMS) as ledger:
            for _ in range(8):
                wait_for_progress(parts, ledger)
                victim = dice.choice(names)
                parts.end_part(victim, signal.SIGKILL)
                parts.start(victim, "scheduler")
            wait_for_progress(parts, ledger)
        assert_kept(parts, *ledger.promises)
        assert ledger.surprises == []
    finally:
        for name in names[1:]:
            if name in parts.processes:
                parts.end_part(name)


def test_an_api_killed_in_a_request_leaves_one_job_when_the_client_repeats_it(parts: Parts) -> None:
    dice = random.Random(61)
    api_port = free_port()
    numbers = list(range(300))
    kept: list[Promise] = []
    for _ in range(4):
        headers = {"Idempotency-Key": str(uuid4())}
        body = {"model": tiny.MODEL, "items": tiny.items(numbers)}
        parts.start("api-2", "api", "--port", str(api_port))
        wait_for(lambda: answers(f"http://127.0.0.1:{api_port}"), 60, "the second API is there")
        victim = psutil.Process(parts.processes["api-2"].pid)
        # Killed between nothing and 40 ms after the request was sent: before, in and after its transaction.
        killer = threading.Timer(dice.uniform(0, 0.04), victim.kill)
        killer.start()
        with suppress(httpx.HTTPError):
            httpx.post(f"http://127.0.0.1:{api_port}/v1/jobs", json=body, headers=headers, timeout=60)
        killer.join()
        parts.end_part("api-2")
        again = httpx.post(f"{parts.api_url}/v1/jobs", json=body, headers=headers, timeout=60)
        assert again.status_code == 202, again.text
        kept.append(Promise(again.json()["id"], None, [f"k{number}" for number in numbers], numbers))
    assert_kept(parts, *kept)


@contextmanager
def small_disk(parts: Parts, kilobytes: int) -> Iterator[Path]:
    """A file system of this size, on which new tables of Postgres lie."""
    assert parts.postgres.pid is not None
    owner = psutil.Process(parts.postgres.pid).uids().real
    directory = parts.directory / "small"
    directory.mkdir()
    size = ["-o", f"size={kilobytes}k,mode=700,uid={owner}"]
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", *size, "tmpfs", str(directory)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        (directory / "tables").mkdir(mode=0o700)
        os.chown(directory / "tables", owner, -1)
        parts.change(f"CREATE TABLESPACE small LOCATION '{directory}/tables'")
        parts.change("ALTER SYSTEM SET default_tablespace = 'small'")
        parts.change("SELECT pg_reload_conf()")
        yield directory
    finally:
        parts.change("ALTER SYSTEM RESET default_tablespace")
        parts.change("SELECT pg_reload_conf()")
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_jobs_wait_while_the_disk_of_postgres_is_full_and_go_on_when_there_is_room(
    parts: Parts, collection: str
) -> None:
    with small_disk(parts, 4096) as disk:
        first = promise(parts, list(range(10)), collection)  # makes the table, while there is room
        assert_kept(parts, first)
        ballast = disk / "ballast"
        fill(ballast)
        kept = promise(parts, list(range(1000, 3000)), collection)
        wait_for(lambda: log_has(parts, "No space left on device"), 60, "a commit finds no room")
        wait_for(lambda: says(parts, kept, "No space left on device"), 30, "the job says what it waits for")
        ballast.unlink()
        with parts.client() as client:
            client.wait(kept.job_id, timeout_seconds=240)
        assert_kept(parts, first, kept)
        parts.change(f"DROP VIEW {collection}")
        parts.change("DELETE FROM vectormill.jobs")
        drop_tables_of(parts, "small")
        parts.change("DROP TABLESPACE small")


def fill(ballast: Path) -> None:
    """Takes all the room there is."""
    with ballast.open("wb", buffering=0) as file:
        piece = bytes(4096)
        try:
            while file.write(piece) == len(piece):
                pass
        except OSError:
            return


def log_has(parts: Parts, words: str) -> bool:
    return any(words in log.read_text(errors="replace") for log in (parts.directory / "logs").glob("*.log"))


def says(parts: Parts, kept: Promise, word: str) -> bool:
    with parts.client() as client:
        return word in str(client.job(kept.job_id)["waiting_because"] or "")


def drop_tables_of(parts: Parts, tablespace: str) -> None:
    rows = list(parts.query(f"SELECT schemaname, tablename FROM pg_tables WHERE tablespace = '{tablespace}'"))
    for schema, table in rows:
        parts.change(f"DROP TABLE {schema}.{table} CASCADE")
