"""Workers on two hosts share one Postgres and one Redis; one is cut off in the middle, and nothing is lost."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from urllib.parse import unquote

import pytest
from sqlalchemy import make_url

from tests.acceptance.hosts import Host, host, why_not
from tests.blackbox.service import SETTINGS
from tests.services import connected_engine, migrated_database, running_postgres, running_valkey
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.corpus import read_docstrings
from vectormill.files.ndjson import ItemJson
from vectormill.problems import ApiUnreachable
from vectormill.processes.lifetimes import free_port
from vectormill.settings import process_environment

NUM_ITEMS = 600  # some ten seconds on two hosts of one thread each: enough to cut one off in the middle
REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON)]


class Cluster:
    """One API and scheduler here, a worker on each of two hosts."""

    def __init__(self, client: Client, hosts: list[Host], database_url: str) -> None:
        self.client = client
        self.hosts = hosts
        self.database_url = database_url

    def alive_workers(self) -> set[str]:
        """The hosts whose worker has given a sign of life lately."""
        return {worker["name"].partition("@")[2] for worker in self.client.workers()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        database_url = stack.enter_context(migrated_database(stack.enter_context(running_postgres())))
        redis_url = stack.enter_context(running_valkey())
        database, redis = make_url(database_url), make_url(redis_url)
        socket_folder = unquote(str(database.query.get("host", "")))
        port = int(str(database.query.get("port", database.port)))
        redis_port = redis.port or 6379
        targets = {
            port: f"{socket_folder}/.s.PGSQL.{port}" if socket_folder else (str(database.host), port),
            redis_port: (str(redis.host), redis_port),
        }
        hosts = [stack.enter_context(host(number, targets)) for number in (1, 2)]
        environment = process_environment() | SETTINGS | {"VECTORMILL_WORKER_THREADS": "1"}

        def urls(address: str | None) -> dict[str, str]:
            if address is None:
                return {"VECTORMILL_DATABASE_URL": database_url, "VECTORMILL_REDIS_URL": redis_url}
            return {
                "VECTORMILL_DATABASE_URL": database.set(host=address, port=port, query={}).render_as_string(
                    False
                ),
                "VECTORMILL_REDIS_URL": redis.set(host=address).render_as_string(False),
            }

        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(end_together, processes)
        api_port = free_port()
        for command in (["api", "--port", str(api_port)], ["scheduler"]):
            with (tmp_path / f"{command[0]}.log").open("wb") as log:
                arguments = [sys.executable, "-m", "vectormill.cli", *command]
                processes.append(
                    subprocess.Popen(arguments, env=environment | urls(None), stdout=log, stderr=log)
                )
        for each in hosts:
            command = ["-m", "vectormill.cli", "worker", "--model", "all-MiniLM-L6-v2"]
            processes.append(
                each.start(command, environment | urls(each.gateway), tmp_path / f"{each.name}.log")
            )
        client = stack.enter_context(Client(f"http://127.0.0.1:{api_port}"))
        yield Cluster(client, hosts, database_url)


def end_together(processes: "list[subprocess.Popen[bytes]]") -> None:
    """A worker takes seconds to hand its chunks back, so all are told before any is waited for."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(120)


def docstrings() -> list[ItemJson]:
    return [{"key": text.key, "text": text.text[:400]} for text in islice(read_docstrings(), NUM_ITEMS)]


def test_a_host_cut_off_in_the_middle_costs_time_but_no_item(cluster: Cluster) -> None:
    client, (first, second) = cluster.client, cluster.hosts

    def both_are_there() -> bool:
        try:
            return cluster.alive_workers() == {first.name, second.name}
        except ApiUnreachable:  # it is still starting
            return False

    wait_for(both_are_there, 120, "a worker on each host has loaded its model")
    job = client.submit(docstrings(), model="all-MiniLM-L6-v2", collection="docs")
    wait_for(lambda: held_chunks(cluster, second) > 0, 60, "the second host holds chunks")
    second.cut()
    ended = client.wait(job["id"], timeout_seconds=180)
    assert (ended["state"], ended["num_done"], ended["num_failed"]) == ("completed", NUM_ITEMS, 0)
    assert ended["num_retried_chunks"] > 0
    keys = [item["key"] for item in docstrings()]
    assert [vector["key"] for vector in client.vectors(job["id"])] == keys
    with connected_engine(cluster.database_url) as engine, engine.connect() as connection:
        stored = connection.exec_driver_sql("SELECT key FROM docs").scalars().all()
    assert sorted(stored) == sorted(keys)
    wait_for(lambda: cluster.alive_workers() == {first.name}, 60, "the host that is cut off counts as gone")
    second.mend()
    wait_for(lambda: second.name in cluster.alive_workers(), 90, "the host that is back works again")


def held_chunks(cluster: Cluster, host: Host) -> int:
    statement = f"SELECT count(*) FROM vectormill.chunks WHERE state = 'leased' AND lease_owner LIKE '%%{host.name}%%'"
    with connected_engine(cluster.database_url) as engine, engine.connect() as connection:
        return int(connection.exec_driver_sql(statement).scalar_one())
