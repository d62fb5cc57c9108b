"""Trickle, inflate and repeat: what a stranger or one key sends neither stops an API process nor fills its memory."""

import re
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from sqlalchemy import Engine

import api.routes.health
from api.dependencies import Resources
from api.limits.patience import MAX_HEAD_BYTES
from tests.api_server import assert_problem, counted_client
from tests.waiting import wait_for
from vectormill.jobs.item import MAX_PAIRS_BYTES
from vectormill.keys import api_keys
from vectormill.keys.api_key import make_secret
from vectormill.keys.api_keys import create_key
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.workers.operations import Readiness

LOGIN = b"POST /console/login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16000\r\n"
FORM = LOGIN + b"Content-Type: application/x-www-form-urlencoded\r\n\r\nkey="
SEARCH = b"POST /v1/collections/docs/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port or 80), 20)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server ends the connection, and nothing where it was reset."""
    answer = b""
    try:
        while part := connection.recv(65536):
            answer += part
    except ConnectionResetError:
        pass
    return answer


def measure_memory() -> int:
    """Bytes of this process that are in memory; the API runs in it."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@contextmanager
def little_memory() -> Iterator[None]:
    """Assert that what is done here takes less than 64 MiB."""
    before = measure_memory()
    yield
    assert measure_memory() - before < 64 << 20


def test_three_hundred_trickled_logins_leave_every_other_request_its_place(engine: Engine) -> None:
    with (
        counted_client(engine, max_logins=4) as (client, gates),
        little_memory(),
        ExitStack() as open_sockets,
    ):
        trickling = [open_sockets.enter_context(connect(client)) for _ in range(300)]
        for connection in trickling:
            connection.sendall(FORM)
        wait_for(lambda: gates.logins.inside == 4, because="the gate of logins is full")
        for byte in (b"v", b"m", b"k"):
            for connection in trickling:
                try:
                    connection.sendall(byte)
                except OSError:
                    continue  # it was refused and closed
            assert client.get("/v1/jobs").status_code == 200
        assert gates.logins.inside <= 4
        assert gates.requests.inside == 0


def test_a_login_that_is_sent_byte_by_byte_ends_although_it_is_never_silent(engine: Engine) -> None:
    with counted_client(engine, body_idle_seconds=0.3) as (client, gates), connect(client) as connection:
        connection.sendall(FORM)
        connection.settimeout(0.01)
        answer = b""
        for _ in range(10_000):
            connection.sendall(b"v")
            try:
                answer = connection.recv(65536)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")
        wait_for(lambda: gates.logins.inside == 0, because="its place is free")


def test_a_head_of_sixteen_megabytes_is_refused_long_before_its_end(engine: Engine) -> None:
    with counted_client(engine) as (client, _), little_memory():
        num_sent = 0
        with connect(client) as connection:
            connection.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
            with suppress(OSError):  # a client that goes on sending is reset, and may not read why
                for _ in range(16 << 4):
                    num_sent += connection.send(b"x" * (64 << 10))
        assert num_sent < 16 << 20
        assert client.get("/v1/jobs").status_code == 200


def test_a_client_that_stops_at_the_limit_of_heads_reads_why_it_is_refused(engine: Engine) -> None:
    with counted_client(engine) as (client, _), connect(client) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        for _ in range(
            64
        ):  # it waits after each part, so that nothing that it sent is unread when it is refused
            connection.sendall(b"x" * 8192)
            if select.select([connection], [], [], 0.1)[0]:
                break
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"larger than 64 KiB" in answer
        assert client.get("/livez", headers={"X-Long": "x" * (MAX_HEAD_BYTES // 2)}).status_code == 200


def test_a_query_of_a_megabyte_for_a_thousand_documents_is_refused_unmultiplied(engine: Engine) -> None:
    query, texts = "x" * 1_000_000, [f"document {number}" for number in range(1000)]
    floods = (
        ("/v1/rerank", {"model": DEFAULT_MODEL, "query": query, "documents": texts}),
        ("/v2/rerank", {"model": DEFAULT_MODEL, "query": query, "documents": texts}),
        ("/rerank", {"query": query, "texts": texts}),
    )
    with (
        counted_client(engine, redis_url="redis://127.0.0.1:1") as (client, _),
        little_memory(),
        ThreadPoolExecutor(4) as askers,
    ):
        answers = [askers.submit(client.post, path, json=body) for path, body in floods for _ in range(8)]
        assert client.get("/v1/jobs").status_code == 200
        for answer in answers:
            assert answer.result().status_code in (400, 422)  # 400 is Cohere's
            assert f"{MAX_PAIRS_BYTES:,}" in answer.result().text


def test_one_connection_more_than_allowed_is_refused_and_the_others_are_served(engine: Engine) -> None:
    with counted_client(engine, max_connections=2) as (client, _):
        assert client.get("/livez").status_code == 200  # which keeps its connection
        with connect(client) as second, connect(client) as third:
            third.sendall(b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_all(third).startswith(b"HTTP/1.1 503 ")
            second.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert read_all(second).startswith(b"HTTP/1.1 200 ")
            assert client.get("/livez").status_code == 200


def test_probes_from_sixty_four_connections_look_once_a_second_in_no_thread_of_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Readiness] = []

    def count_looks(resources: Resources) -> Readiness:
        looks.append(check_readiness(resources))
        return looks[-1]

    check_readiness = api.routes.health.check_readiness
    monkeypatch.setattr(api.routes.health, "check_readiness", count_looks)
    monkeypatch.setattr(api.routes.health, "FRESH_SECONDS", 3600.0)
    with counted_client(engine) as (client, _), little_memory(), ThreadPoolExecutor(64) as askers:

        def ask(_: int) -> list[int]:
            with httpx.Client(base_url=client.base_url, timeout=30, trust_env=False, verify=False) as own:
                return [own.get("/readyz").status_code for _ in range(5)]

        answers = [status for each in askers.map(ask, range(64)) for status in each]
        assert client.get("/v1/jobs").status_code == 200
    assert answers == [200] * 320
    assert len(looks) == 1


def test_trickled_bodies_of_searches_take_no_place_of_a_search(engine: Engine) -> None:
    with counted_client(engine, max_searches=1) as (client, gates), connect(client) as trickling:
        trickling.sendall(SEARCH + b"Content-Length: 100\r\n\r\n{")
        wait_for(lambda: gates.requests.inside == 1, because="the slow body is being read")
        answer = client.post("/v1/collections/docs/search", json={"text": "a"})
        assert_problem(answer, 404, "collection-not-found")


def test_one_key_leaves_room_for_another(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "FRESH_SECONDS", 300.0)
    greedy, modest = make_secret(), make_secret()
    with engine.begin() as connection:
        create_key(connection, "greedy", greedy, "read", None)
        create_key(connection, "modest", modest, "read", None)
    with counted_client(engine, max_requests_per_key=1) as (client, gates), connect(client) as trickling:

        def list_jobs(secret: str) -> httpx.Response:
            return client.get("/v1/jobs", headers={"Authorization": f"Bearer {secret}"})

        # From here on a request does not wait for Postgres between the count of all requests and that of its key.
        assert list_jobs(greedy).status_code == 200
        wait_for(lambda: gates.requests.inside == 0, because="that request is over")
        key = b"Authorization: Bearer " + greedy.encode() + b"\r\n"
        trickling.sendall(SEARCH + key + b"Content-Length: 100\r\n\r\n{")
        wait_for(lambda: gates.requests.inside == 1, because="the slow body is being read")
        assert_problem(list_jobs(greedy), 429, "limit-reached", "VECTORMILL_MAX_REQUESTS_PER_KEY", "greedy")
        assert list_jobs(modest).status_code == 200
