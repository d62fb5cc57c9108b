"""Redis and Postgres are full, read-only or restarted: jobs wait with a reason, go on, and nothing is lost."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import psycopg
import pytest

from tests.acceptance import tiny
from tests.acceptance.parts import Parts, frozen
from tests.acceptance.producer import Ledger, Promise, assert_kept, load, promise
from tests.waiting import wait_for
from vectormill.jobs.job import TERMINAL_JOB_STATES

pytestmark = [pytest.mark.timeout(600)]

ITEMS = 200  # four chunks
NUM_CYCLES = 4


def leased(parts: Parts, kept: Promise) -> int:
    """How many chunks of the job workers hold."""
    ((count,),) = parts.sql(
        f"SELECT count(*) FROM vectormill.chunks WHERE state = 'leased' AND job_id = '{kept.job_id}'"
    )
    return int(str(count))


def says(parts: Parts, kept: Promise, words: str) -> bool:
    """Return whether the job waits for what these words say."""
    with parts.client() as client:
        return words in str(client.job(kept.job_id)["waiting_because"] or "")


def test_jobs_wait_with_a_reason_while_redis_is_full_and_go_on_when_it_is_not(parts: Parts) -> None:
    with parts.redis() as redis:
        limit = redis.config_get("maxmemory")["maxmemory"]
        redis.config_set("maxmemory", "1")
        try:
            kept = promise(parts, list(range(ITEMS)))  # 202: submitting needs no Redis
            wait_for(lambda: says(parts, kept, "Redis"), 60, "the job says what it waits for")
        finally:
            redis.config_set("maxmemory", limit)
    assert_kept(parts, kept)


def test_jobs_wait_while_postgres_is_read_only_and_go_on_when_it_is_not(
    parts: Parts, collection: str
) -> None:
    with frozen(parts.runners()):
        kept = [promise(parts, list(range(ITEMS)), collection), promise(parts, list(range(ITEMS)))]
        for each in kept:
            wait_for(lambda each=each: leased(parts, each) > 0, 60, "workers hold chunks")  # type: ignore[misc]
        set_read_only(parts, "on")
        wait_for(lambda: is_read_only(parts), because="the servers' processes have read the setting")
    try:
        wait_for(lambda: has_lapsed(parts), 60, "a lease could not be renewed")
        refused = httpx.post(
            f"{parts.api_url}/v1/jobs",
            json={"model": tiny.MODEL, "items": [{"key": "a", "text": "b"}]},
            timeout=60,
        )
        assert refused.status_code == 503, refused.text
        assert "read-only" in refused.json()["detail"], refused.text
        with parts.client() as client:
            states = {client.job(each.job_id)["state"] for each in kept}
        assert states.isdisjoint(TERMINAL_JOB_STATES)
    finally:
        set_read_only(parts, "off")
    assert_kept(parts, *kept)


def set_read_only(parts: Parts, value: str) -> None:
    parts.sql(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
    parts.sql("SELECT pg_reload_conf()")


def is_read_only(parts: Parts) -> bool:
    with psycopg.connect(parts.database_url.replace("postgresql+psycopg", "postgresql")) as connection:
        return connection.execute("SHOW transaction_read_only").fetchone() == ("on",)


def has_lapsed(parts: Parts) -> bool:
    return bool(parts.sql("SELECT 1 FROM vectormill.chunks WHERE state = 'leased' AND lease_until < now()"))


def wait_for_progress(parts: Parts, ledger: Ledger) -> None:
    """Until chunks are done that were not done at the call."""

    def num_done() -> int:
        ((count,),) = parts.sql("SELECT coalesce(sum(num_done), 0) FROM vectormill.jobs")
        return int(str(count))

    before = num_done()
    wait_for(lambda: num_done() > before, 120, f"jobs go on ({len(ledger.promises)} were acknowledged)")


@pytest.mark.slow
def test_postgres_and_redis_restarted_under_load_cost_no_item_and_no_worker(parts: Parts) -> None:
    before = pids_of(parts)
    with load(parts, seed=21, num_producers=2, job_items=500) as ledger:
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
    assert pids_of(parts) == before, "a worker or its model was started afresh"


def pids_of(parts: Parts) -> set[int]:
    return {process.pid for process in [*parts.workers(), *parts.runners()]}


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
        parts.sql(f"CREATE TABLESPACE small LOCATION '{directory}/tables'")
        parts.sql("ALTER SYSTEM SET default_tablespace = 'small'")
        parts.sql("SELECT pg_reload_conf()")
        yield directory
    finally:
        parts.sql("ALTER SYSTEM RESET default_tablespace")
        parts.sql("SELECT pg_reload_conf()")
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.slow
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
        parts.sql(f"DROP VIEW {collection}")
        parts.sql("DELETE FROM vectormill.jobs")
        drop_tables_of(parts, "small")
        parts.sql("DROP TABLESPACE small")


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


def drop_tables_of(parts: Parts, tablespace: str) -> None:
    rows = parts.sql(f"SELECT schemaname, tablename FROM pg_tables WHERE tablespace = '{tablespace}'")
    for schema, table in rows:
        parts.sql(f"DROP TABLE {schema}.{table} CASCADE")
