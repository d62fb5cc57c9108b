"""Stranger (g) is another user of the same machine: the files that they plant, and the API on its loopback."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

from api.door.machine import find_user
from tests.api_server import api_client, assert_problem, count_jobs
from tests.database import ask
from tests.waiting import wait_for
from vectormill.domain.errors import VectormillError
from vectormill.files.roots import Roots
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.keys.own_key import make_own_key, make_ticket, read_own_key
from vectormill.models.registry import Registry
from vectormill.objects.store import delete_object, describe_object, write_object
from vectormill.processes.logs import open_log, rotate_log
from vectormill.settings import Settings
from vectormill.sources.opening import open_source
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import FILES, SQL, TREE, Source

SECRET = "the-secret-of-another-user"


@pytest.fixture
def swapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beneath the root that a link to a folder of secrets replaces once a path in it was looked at."""
    root, folder, secrets = tmp_path / "root", tmp_path / "root" / "in", tmp_path / "secrets"
    for each in folder, secrets:
        each.mkdir(parents=True)
        (each / "a.jsonl").write_text(json.dumps({"key": "a", "text": SECRET if each == secrets else "mine"}))
    find = Roots.find

    def find_and_swap(roots: Roots, path: Path) -> tuple[Path, Path]:
        found = find(roots, path)
        if sys._getframe(1).f_code.co_name == "opened" and not folder.is_symlink():
            folder.rename(root / "former")
            folder.symlink_to(secrets)
        return found

    monkeypatch.setattr(Roots, "find", find_and_swap)
    return folder


def read(engine: Engine, kind: str, root: Path, options: dict[str, object]) -> list[object]:
    place = SourcePlace(engine, Settings(source_root=root), Registry({}), collection="docs")
    return [item for batch in open_source(Source(kind, options), place).read() for item in batch]


def test_a_link_that_is_planted_between_look_and_opening_leads_nowhere(engine: Engine, swapped: Path) -> None:
    root, secrets = swapped.parent, swapped.parent.parent / "secrets"
    roots, url = Roots((root,)), f"file://{swapped}"
    ways: dict[str, Callable[[], object]] = {
        "files": lambda: read(engine, FILES, root, {"files": [f"{swapped}/a.jsonl"]}),
        "tree": lambda: read(engine, TREE, root, {"folder": str(swapped), "include": ["*"]}),
        "url_file": lambda: read(engine, SQL, root, {"query": "SELECT 1", "url_file": f"{swapped}/a.jsonl"}),
        "input": lambda: describe_object(f"{url}/a.jsonl", roots),
        "write": lambda: write_object(f"{url}/new.jsonl", b"planted", roots),
        "delete": lambda: delete_object(f"{url}/a.jsonl", roots),
    }
    for name, act in ways.items():
        if swapped.is_symlink():
            swapped.unlink()
            (root / "former").rename(swapped)
        said = ""
        try:
            said = str(act())
        except (VectormillError, OSError) as error:
            said = str(error)
        assert swapped.is_symlink(), name
        assert SECRET not in said, name
        assert [path.name for path in secrets.iterdir()] == ["a.jsonl"], name


OTHER_UID = 54_321
# Sends requests as their lines say, and prints the status and the body of each answer.
ASK = """
import http.client, json, os, socket, sys
host, port, requests = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
for method, path, headers, body in requests:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request(method, path, json.dumps(body) if body else None, headers)
    answer = connection.getresponse()
    print(json.dumps([answer.status, answer.read().decode()]))
    connection.close()
"""
# Sends a request that changes something, and closes the connection before the server can look at it.
ASK_AND_LEAVE = """
import socket, sys
for _ in range(100):
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
        connection.sendall(sys.argv[3].encode())
"""
Request = tuple[str, str, dict[str, str], object]
JSON_BODY = {"Content-Type": "application/json"}
JOB = {"items": [{"key": "a", "text": "one"}], "options": {"dimensions": 8}}


def run_as(uid: int, program: str, *arguments: str) -> str:
    """Run a program of Python as another user of this machine; return what it prints."""
    if os.geteuid() != 0:
        # Nobody but root can become a second user, so the tests that need one are skipped elsewhere.
        pytest.skip("only root can start a process of another user")
    command = [sys.executable, "-I", "-c", program, *arguments]
    done = subprocess.run(
        command, user=uid, group=uid, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask_as(uid: int, url: httpx.URL, *requests: Request) -> list[tuple[int, str]]:
    lines = run_as(uid, ASK, url.host, str(url.port), json.dumps(requests)).splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir(mode=0o711)
    return tmp_path / "data"


@pytest.fixture
def client(engine: Engine, data_dir: Path) -> Iterator[httpx.Client]:
    """An API on the loopback, without keys, of a stack that has a key of its own."""
    make_own_key(data_dir)
    with api_client(engine, data_dir=data_dir) as client:
        yield client


EVERYTHING: tuple[Request, ...] = (
    ("GET", "/v1/jobs", {}, None),
    ("GET", "/v1/jobs", {"Authorization": "Bearer anything"}, None),
    ("GET", "/metrics", {}, None),
    ("GET", "/docs", {}, None),
    ("POST", "/v1/jobs", JSON_BODY, JOB),
    ("POST", "/v1/embeddings", JSON_BODY, {"input": "x", "model": "all-MiniLM-L6-v2"}),
    ("GET", "/console/jobs", {}, None),
    ("DELETE", "/v1/jobs/1", {}, None),
)


def test_another_user_of_the_machine_is_refused_with_the_reason_and_the_same_user_needs_no_key(
    client: httpx.Client, engine: Engine
) -> None:
    answers = ask_as(OTHER_UID, client.base_url, *EVERYTHING, ("GET", "/livez", {}, None))
    for (method, path, _, _), (status, body) in zip(EVERYTHING, answers, strict=False):
        if path == "/console/jobs":  # the form for a key
            assert (status, body) == (303, ""), body
            continue
        assert status == 401, (method, path, body)
        assert f"uid {OTHER_UID}" in body, body
        assert "vectormill keys create NAME" in body
    assert answers[-1][0] == 200
    assert count_jobs(engine) == 0
    for headers in (
        {},
        {"Authorization": "Bearer anything"},
        {"api-key": "x"},
    ):  # as before, whatever the client
        assert client.get("/v1/jobs", headers=headers).status_code == 200
    assert client.post("/v1/jobs", json=JOB).status_code == 202
    assert client.get("/console/jobs").status_code == 200
    assert ask_as(0, client.base_url, ("GET", "/v1/jobs", {}, None))[0][0] == 200


def test_whose_a_forwarded_request_is_nobody_knows_so_it_needs_the_key_of_the_stack(
    client: httpx.Client, data_dir: Path
) -> None:
    own = {"Authorization": f"Bearer {make_own_key(data_dir)}"}
    for name in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "x-forwarded-proto"):
        refused = client.get("/v1/jobs", headers={name: "127.0.0.1"})
        assert_problem(refused, 401, "other-user", "cannot tell whose request this is", "api.key")
        assert client.get("/v1/jobs", headers={name: "127.0.0.1", **own}).status_code == 200
        assert client.get("/v1/jobs", headers={name: "127.0.0.1", "api-key": "x"}).status_code == 401


def test_a_connection_that_was_closed_is_not_taken_for_one_of_root(
    client: httpx.Client, engine: Engine
) -> None:
    body = json.dumps(JOB)
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    run_as(OTHER_UID, ASK_AND_LEAVE, client.base_url.host, str(client.base_url.port), f"{head}\r\n\r\n{body}")
    assert client.get("/v1/jobs").status_code == 200  # by now, all of them were looked at
    assert count_jobs(engine) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_linux_tells_the_user_of_a_connection_while_it_is_open(host: str) -> None:
    served = ("::1", socket.AF_INET6) if host == "::1" else ("127.0.0.1", socket.AF_INET)
    with socket.create_server((served[0], 0), family=served[1]) as server:
        peer = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        peer.connect((host, server.getsockname()[1]))
        own, address = server.accept()
        with own:
            assert find_user(own, address, own.getsockname()) == os.geteuid()
            peer.close()
            assert find_user(own, address, own.getsockname()) is None


def test_nobody_else_can_read_the_key_of_a_stack_or_put_one_in_its_place(data_dir: Path) -> None:
    secret = make_own_key(data_dir)
    path = data_dir / "api.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = "import sys; print(open(sys.argv[1]).read())"
    with pytest.raises(AssertionError, match="Permission denied"):
        run_as(OTHER_UID, read, str(path))
    for number in range(3):
        if number == 0:
            os.chown(path, OTHER_UID, OTHER_UID)
        elif number == 1:
            path.chmod(0o644)
        else:
            path.rename(data_dir / "x")
            path.symlink_to("x")
        assert read_own_key(data_dir) is None
        renewed = make_own_key(data_dir)
        assert renewed != secret
        assert (path.lstat().st_uid, stat.S_IMODE(path.lstat().st_mode)) == (os.geteuid(), 0o600)
        secret = renewed


def test_a_ticket_signs_one_browser_in_once_and_soon(client: httpx.Client, data_dir: Path) -> None:
    through = {"X-Forwarded-For": "10.0.0.1"}
    ticket = make_ticket(make_own_key(data_dir), int(time.time()))
    old = make_ticket(make_own_key(data_dir), int(time.time()) - 3600)
    for wrong in (
        "",
        "1.x",
        "x",
        "1" * 5000 + ".x",
        old,
        ticket[:-1],
        make_ticket("vmk_other", int(time.time())),
    ):
        answer = client.get("/console/login", params={"ticket": wrong}, headers=through)
        assert (answer.status_code, "vectormill_console" in answer.cookies) == (200, False), wrong
    assert client.get("/console/jobs", headers=through).headers["location"].startswith("/console/login")
    answer = client.get("/console/login", params={"ticket": ticket}, headers=through)
    assert (answer.status_code, answer.headers["location"]) == (303, "/console/jobs")
    assert client.get("/console/jobs", headers=through).status_code == 200
    client.cookies.clear()
    again = client.get("/console/login", params={"ticket": ticket}, headers=through)
    assert (again.status_code, "vectormill_console" in again.cookies) == (200, False)


def test_an_open_api_lets_everybody_in_and_a_key_closes_it_to_all(engine: Engine, data_dir: Path) -> None:
    with api_client(engine, data_dir=data_dir, open_loopback=True) as client:
        assert ask_as(OTHER_UID, client.base_url, EVERYTHING[0])[0][0] == 200
        assert client.get("/v1/jobs", headers={"X-Forwarded-For": "10.0.0.1"}).status_code == 200
        own = make_own_key(data_dir)
        ask(engine, create_key, "first", make_secret(), "admin")
        wait_for(lambda: client.get("/v1/jobs").status_code == 401, 10)
        assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {own}"}).status_code == 401


def test_logs_are_private_and_follow_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"x" * 100)
    log = tmp_path / "logs" / "api.log"
    umask = os.umask(0)
    try:
        open_log(log).close()
        log.write_bytes(b"y" * 100)
        log.with_name("api.log.1").symlink_to(victim)
        rotate_log(log, 10)
    finally:
        os.umask(umask)
    for path in log, log.with_name("api.log.1"):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    log.unlink()
    log.symlink_to(victim)
    for act in (lambda: open_log(log), lambda: rotate_log(log, 10)):
        with pytest.raises(OSError, match="symbolic links"):
            act()
    assert victim.read_bytes() == b"x" * 100
