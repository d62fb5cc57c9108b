"""Everything `vectormill up` does around its children, with small programs in their place and real servers."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from tests.clusters import connect, new_directory, value
from tests.waiting import wait_for
from vectormill.embedded.data_dir import RunningStack, find_running
from vectormill.embedded.stack import EmbeddedStack
from vectormill.processes import lifetimes as processes

STOP_SECONDS = 90

# Stands for `python -m vectormill.cli`. STATE is a directory in which scheduler and worker leave their pids.
COMMAND = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

name, arguments = sys.argv[1], sys.argv[2:]
state = Path(os.environ["STATE"])
print(name, *arguments, flush=True)


def alive(name):
    try:
        os.kill(int((state / name).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        said = {"workers": int(alive("worker")), "scheduler": alive("scheduler"), "indexer": alive("indexer")}
        said["failing_workers"] = int("WORKER_FAILS" in os.environ and alive("worker"))
        self.send_response(200 if self.path in ("/readyz", "/healthcheck") else 404)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())


if name == "migrate":
    time.sleep(float(os.environ.get("MIGRATE_SECONDS", 0)))  # a migration that takes so long
    sys.exit(os.environ.get("MIGRATE_FAILS", 0))
elif name in ("api", "flower"):
    host, port = arguments[arguments.index("--host") + 1], arguments[arguments.index("--port") + 1]
    HTTPServer((host, int(port)), Answers).serve_forever()
else:
    if "WORKER_FAILS" in os.environ:
        print(os.environ["WORKER_FAILS"], flush=True)
    (state / name).write_text(str(os.getpid()))
    time.sleep(600)  # a process that runs until it is ended
"""

UP = """
import json, logging, os, sys
from pathlib import Path
from vectormill.domain.errors import VectormillError
from vectormill.settings import Settings
from vectormill.up import UpOptions, run_up

logging.basicConfig(level=logging.INFO)
data_dir, command, urls = Path(sys.argv[1]), tuple(json.loads(sys.argv[2])), json.loads(sys.argv[3])
here, port = "127.0.0.1", int(os.environ.get("API_PORT", 0))
settings = Settings(
    data_dir=data_dir, api_host=here, api_port=port, flower_host=here, flower_port=0,
    database_url=urls[0], redis_url=urls[1],
)
options = UpOptions(settings, ("m",), os.environ, command)
try:
    sys.exit(run_up(options))
except VectormillError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Up:
    """One `up` on a directory, with its output."""

    def __init__(
        self, home: Path, *, urls: tuple[str | None, str | None] = (None, None), **environ: str
    ) -> None:
        self.data_dir = home / "data"
        self.output = home / f"up-{time.monotonic_ns()}.txt"
        program = home / "command.py"
        program.write_text(COMMAND)
        argv = [sys.executable, "-c", UP, str(self.data_dir), json.dumps([sys.executable, str(program)])]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*argv, json.dumps(urls)],
                env={"PATH": os.defpath, "STATE": str(home), **environ},
                cwd=Path.cwd(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def ready_lines(self) -> list[str]:
        return [line for line in self.output.read_text().splitlines() if line.startswith("ready")]

    def wait_until_ready(self) -> RunningStack:
        wait_for(lambda: bool(self.ready_lines) or self.process.poll() is not None)
        found = find_running(self.data_dir)
        assert found is not None, self.output.read_text()
        return found

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)


@pytest.fixture
def home() -> Iterator[Path]:
    with new_directory() as directory:
        yield directory
        # Whatever a failed test left running. Nothing to end is the usual case.
        found = find_running(directory / "data")
        if found is not None:
            os.kill(found.pid, signal.SIGKILL)
            wait_for(lambda: not processes.is_alive(found.pid))
        EmbeddedStack(directory / "data").destroy()


def all_gone(descendants: list[psutil.Process]) -> bool:
    return not any(processes.is_alive(process.pid, process.create_time()) for process in descendants)


def pid_of(home: Path, name: str) -> int:
    with contextlib.suppress(ValueError, FileNotFoundError):
        return int((home / name).read_text())
    return 0


def get(url: str | None, path: str) -> int:
    assert url is not None
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=5)
    with contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status


def test_up_runs_everything_repairs_what_dies_and_leaves_nothing(home: Path) -> None:
    up = Up(home)
    running = up.wait_until_ready()
    url, option = running.api_url, f"--data-dir {up.data_dir}"
    ready = up.output.read_text().splitlines()
    assert ready[ready.index(up.ready_lines[0]) :] == [
        f"ready  api {url}  console {url}/console  flower {running.flower_url}  data {up.data_dir}",
        f"next   in another terminal: `vectormill submit FILE --collection docs {option}`, "
        f'and then `vectormill search docs "WORDS" {option}`',
    ]
    assert get(running.api_url, "/readyz") == get(running.flower_url, "/healthcheck") == 200
    assert (up.data_dir / "logs" / "migrate.log").read_text() == "migrate\n"
    assert (up.data_dir / "logs" / "worker.log").read_text() == "worker --model m\n"
    assert ("started as root" in up.output.read_text()) == (os.geteuid() == 0)
    with connect(running.database_url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS x")

    scheduler = pid_of(home, "scheduler")
    os.kill(scheduler, signal.SIGKILL)
    postmaster = int((up.data_dir / "postgres" / "data" / "postmaster.pid").read_text().split()[0])
    os.kill(postmaster, signal.SIGKILL)
    (valkey,) = processes.running_in(up.data_dir / "valkey", "valkey-server")
    valkey.kill()
    wait_for(lambda: pid_of(home, "scheduler") not in (0, scheduler))
    wait_for(lambda: answers(running.database_url))
    with redis.Redis.from_url(running.redis_url, socket_timeout=5) as client:
        wait_for(lambda: pings(client))

    second = Up(home)
    assert second.process.wait(STOP_SECONDS) == 1
    assert (
        f"AlreadyRunning: another vectormill (pid {up.process.pid}) is running on"
        in second.output.read_text()
    )

    descendants = up.descendants()
    assert len(descendants) > 5
    assert up.stop() == 0
    assert all_gone(descendants)
    assert len(up.ready_lines) == 1
    assert find_running(up.data_dir) is None


def pings(client: "redis.Redis") -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def answers(database_url: str) -> bool:
    with contextlib.suppress(Exception):
        return value(database_url, "SELECT x FROM t") == 7
    return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has PR_SET_PDEATHSIG")
def test_after_a_kill_nothing_stays_and_the_next_up_goes_on(home: Path) -> None:
    up = Up(home)
    running = up.wait_until_ready()
    with connect(running.database_url) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS x")
    descendants = up.descendants()
    up.process.kill()
    up.process.wait()
    wait_for(lambda: all_gone(descendants))
    again = Up(home)
    assert answers(again.wait_until_ready().database_url)
    assert again.stop(signal.SIGINT) == 0


def test_up_does_not_take_the_api_of_another_stack_for_its_own(home: Path) -> None:
    other = home / "other"
    other.mkdir()
    for name in ("scheduler", "indexer", "worker"):
        (other / name).write_text(str(os.getpid()))
    (home / "api.py").write_text(COMMAND)
    port = processes.free_port()
    argv = [sys.executable, str(home / "api.py"), "api", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(argv, env={"STATE": str(other)}) as api:
        wait_for(lambda: not processes.is_port_free(port))
        up = Up(home, urls=("postgresql+psycopg://given/db", "redis://given/0"), API_PORT=str(port))
        assert up.process.wait(STOP_SECONDS) == 1
        api.kill()
    said = up.output.read_text()
    assert f"PortTaken: cannot listen on 127.0.0.1 port {port}: another program uses the port" in said
    assert up.ready_lines == []


def test_a_migration_that_fails_ends_up_with_its_words(home: Path) -> None:
    up = Up(home, MIGRATE_FAILS="the table is upside down")
    assert up.process.wait(60) == 1
    assert (
        "MigrationFailed: the database could not be migrated:\n    migrate\n    the table is upside down"
        in (up.output.read_text())
    )
    assert find_running(up.data_dir) is None


def test_a_model_that_cannot_be_loaded_ends_up_at_once_with_the_reason(home: Path) -> None:
    up = Up(home, WORKER_FAILS="openvino was killed by SIGFPE")
    assert up.process.wait(60) == 1
    output = up.output.read_text()
    assert "ChildNotReady: a worker cannot load its model:" in output
    assert "openvino was killed by SIGFPE" in output.partition("ChildNotReady")[2]
    assert up.ready_lines == []
    assert find_running(up.data_dir) is None


def test_up_can_be_stopped_while_it_starts(home: Path) -> None:
    up = Up(home, MIGRATE_SECONDS="600")
    wait_for(lambda: (up.data_dir / "logs" / "migrate.log").exists() or up.process.poll() is not None)
    descendants = up.descendants()
    assert up.stop() == 0
    assert all_gone(descendants)
    assert up.ready_lines == []


def test_servers_that_are_given_are_used_and_none_is_started(home: Path) -> None:
    up = Up(home, urls=("postgresql+psycopg://given/db", "redis://given/0"))
    running = up.wait_until_ready()
    assert (running.database_url, running.redis_url) == ("postgresql+psycopg://given/db", "redis://given/0")
    environ = psutil.Process(pid_of(home, "worker")).environ()
    assert environ["VECTORMILL_DATABASE_URL"] == running.database_url
    assert environ["VECTORMILL_REDIS_URL"] == running.redis_url
    assert environ["STATE"] == str(home)
    assert not {process.name() for process in up.descendants()} & {"postgres", "valkey-server"}
    assert up.stop() == 0
