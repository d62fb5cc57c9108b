"""Items over HTTP: put, get, delete; how puts share jobs, what their clients hear, and what stays behind."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode
from urllib.request import Request, urlopen

import httpx
import pytest
import requests
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text
from starlette.types import ASGIApp, Receive, Scope, Send

from api.app import create_app
from api.intake.puts import Puts
from api.intake.requests import UnreadableItem, check_key
from tests.api_server import (
    JSON,
    api_client,
    assert_problem,
    count_jobs,
    delete,
    encode_waiting,
    encoding_meanwhile,
    many,
    serving,
    submit,
)
from tests.database import execute
from tests.protocol import vector_of
from tests.schedules import add_source, make_schedule
from tests.waiting import wait_for
from vectormill.client import Client
from vectormill.domain.errors import VectormillError
from vectormill.jobs.deletion import discard_ended_puts
from vectormill.settings import Settings

ITEMS = "/v1/collections/docs/items"


@pytest.fixture
def client(engine: Engine) -> Iterator[httpx.Client]:
    with api_client(engine) as client:
        job = submit(client, many(2), collection="docs")
        encode_waiting(engine)
        delete(client, f"/v1/jobs/{job['id']}")
        yield client


def put(client: httpx.Client, key: str, text: str = "a text", **more: Any) -> httpx.Response:
    return client.put(f"{ITEMS}/{quote(key, safe='')}", json={"text": text, **more.pop("body", {})}, **more)


def test_a_put_is_searchable_when_it_is_answered_and_leaves_no_job(
    client: httpx.Client, engine: Engine
) -> None:
    with encoding_meanwhile(engine):
        answer = put(client, "a", "first text", body={"metadata": {"page": 1}})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["key"], answer.json()["is_searchable"]) == ("a", True)
    assert answer.json()["searchable_at"].endswith("Z")
    found = client.post("/v1/collections/docs/search", json={"embedding": vector_of(b"first text").tolist()})
    assert found.json()["data"][0]["key"] == "a"
    wait_for(lambda: count_jobs(engine) == 0, 10, "the job of the put is gone")


def test_an_item_is_answered_with_what_is_kept_of_it(client: httpx.Client, engine: Engine) -> None:
    passage = {"document": "book", "index": 1, "start": 10, "end": 20}
    with encoding_meanwhile(engine):
        metadata = {"_passage": passage, "large": 1e30}  # an integer of more than 64 bits in Postgres
        assert put(client, "a", "first text", body={"metadata": metadata}).status_code == 200
    answer = client.get(f"{ITEMS}/a", params={"include": "vector"}).json()
    assert (answer["key"], answer["text"], answer["document"]) == ("a", None, "book")
    assert answer["passage"] == {"index": 1, "start": 10, "end": 20}
    assert answer["metadata"]["large"] == 10**30
    query = {"embedding": vector_of(b"first text").tolist(), "limit": 1}
    (match,) = client.post("/v1/collections/docs/search", json=query).json()["data"]
    assert match["metadata"]["large"] == 10**30
    assert len(answer["content_hash"]) == 32
    assert answer["embedding"] == pytest.approx(vector_of(b"first text").tolist(), abs=1e-3)
    assert client.get(f"{ITEMS}/k1").json()["embedding"] is None


def test_a_key_may_have_any_characters(client: httpx.Client, engine: Engine) -> None:
    cases: list[str] = [
        *("a/b", "/", "a//b/", "ä 🌍", "..", "a%2Fb", "?x=1#y", "items:delete", "\u200b", "k" * 1024),
        *("a\nb", "\n", "\na", "a\r\n", "\u2028"),
    ]
    for key in cases:
        path = f"{ITEMS}/{quote(key, safe='').replace('.', '%2E')}"
        for where in ({"url": path}, {"url": ITEMS, "params": {"key": key}}):
            with encoding_meanwhile(engine):
                assert client.put(**where, json={"text": "a text"}).json()["key"] == key
            assert client.get(**where).json()["key"] == key
            assert client.delete(**where).status_code == 204
            assert_problem(client.get(**where), 404, "item-not-found")


class Recorder:
    """ASGI middleware that keeps the paths and queries that arrived, as a client has left them."""

    def __init__(self, app: ASGIApp, arrived: list[tuple[str, dict[str, str]]]) -> None:
        self.app, self.arrived = app, arrived

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            query = dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
            self.arrived.append((scope["path"], query))
        await self.app(scope, receive, send)


def ask_requests(url: str, method: str, path: str, params: dict[str, str]) -> object:
    body = {"json": {"text": "t"}} if method == "PUT" else {}
    return requests.request(method, url + path, params=params, timeout=30, **body)  # type: ignore[arg-type]


def ask_httpx(url: str, method: str, path: str, params: dict[str, str]) -> object:
    body = {"json": {"text": "t"}} if method == "PUT" else {}
    given: dict[str, Any] = {"params": params} if params else {}  # else httpx drops a query in the path
    with httpx.Client(trust_env=False, verify=False, follow_redirects=True) as client:
        return client.request(method, url + path, **given, **body)  # type: ignore[arg-type]


def ask_urllib(url: str, method: str, path: str, params: dict[str, str]) -> object:
    body = b'{"text": "t"}' if method == "PUT" else None
    asked = Request(url + path + ("?" if params else "") + urlencode(params), body, JSON, method=method)
    with urlopen(asked, timeout=30) as answer:
        return answer.status


SAID_BY_CLIENTS: Final = (
    httpx.HTTPError,
    httpx.InvalidURL,
    requests.RequestException,
    OSError,
    HTTPException,
    ValueError,
)
FRAGMENTS: Final = (
    "..", ".", "/", "//", "%", "%2e", "%2E%2e", "%2f", "\\", "..\\", "?", "#", "&", "=", "+", " ", ";", "a", "k0", "\0",
    "\n", "\r\n", "\t", "é", "🌍", "../..", "../../other", "../source", "../generations/1", "../index",
    "../../../webhooks/1", "../../../schedules/docs", "JOB", "?confirm=docs", "items?key=k0", ":delete",
)  # fmt: skip
# All that a deletion could reach: each row with what names it.
LEDGER: Final = text("""
    SELECT 'item docs', key FROM docs UNION ALL SELECT 'item other', key FROM other
    UNION ALL SELECT 'collection', name FROM vectormill.collections
    UNION ALL SELECT 'generation', CAST(id AS text) FROM vectormill.generations
    UNION ALL SELECT 'source', CAST(collection_id AS text) FROM vectormill.sources
    UNION ALL SELECT 'schedule', name FROM vectormill.schedules
    UNION ALL SELECT 'webhook', CAST(id AS text) FROM vectormill.webhooks
    UNION ALL SELECT 'job', CAST(id AS text) FROM vectormill.jobs WHERE state <> 'deleting'
""")


def read_ledger(engine: Engine) -> set[tuple[str, str]]:
    return {(kind, name) for kind, name in execute(engine, LEDGER)}


def test_a_hostile_key_reaches_nothing_but_the_item_of_this_key(engine: Engine) -> None:
    app, arrived = create_app(Settings(put_wait_seconds=0), engine), list[tuple[str, dict[str, str]]]()
    app.add_middleware(Recorder, arrived=arrived)
    with serving(app) as url, httpx.Client(base_url=url, trust_env=False) as http, Client(url) as ours:
        for name in ("docs", "other"):
            submit(http, [{"key": "k0", "text": "t"}, {"key": "a", "text": "t"}], collection=name)
        encode_waiting(engine)
        add_source(engine, "docs")
        make_schedule(engine, "docs")
        http.post("/v1/webhooks", json={"url": "https://example.com/"}).raise_for_status()
        ended = f"../../../jobs/{http.get('/v1/jobs').json()['data'][0]['id']}"

        @settings(max_examples=250, derandomize=True, database=None, deadline=None, phases=(Phase.generate,))
        @given(
            key=st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join),
            method=st.sampled_from(("DELETE", "DELETE", "GET", "PUT")),
            form=st.sampled_from(("path", "quoted path", "parameter")),
            ask=st.sampled_from((ask_httpx, ask_requests, ask_urllib, None)),
        )
        def try_key(key: str, method: str, form: str, ask: Callable[..., object] | None) -> None:
            key = key.replace("JOB", ended)
            with suppress(UnreadableItem):
                item = {"key": check_key(key, 1024), "text": "t"}
                submit(http, [item], collection="docs")
                encode_waiting(engine)
            before = read_ledger(engine)
            arrived.clear()
            with suppress(*SAID_BY_CLIENTS, VectormillError):
                if ask is not None and form == "parameter":
                    ask(url, method, ITEMS, {"key": key})
                elif ask is not None:
                    ask(url, method, f"{ITEMS}/{quote(key, safe='') if form == 'quoted path' else key}", {})
                elif method == "DELETE":
                    ours.delete_item("docs", key)
                else:
                    ours.get_item("docs", key)
            after, is_certain = read_ledger(engine), ask is None or form == "parameter"
            named = {key} if is_certain else {find_item_name(*each) for each in arrived}
            lost = before - after
            assert lost <= {("item docs", name) for name in named}, arrived
            assert {kind for kind, _ in after - before} <= ({"job"} if method == "PUT" else set()), arrived
            if is_certain and method == "DELETE" and ("item docs", key) in before:
                assert lost == {("item docs", key)}, arrived

        try_key()


def find_item_name(path: str, query: dict[str, str]) -> str | None:
    """Return the key of the item of `docs` that a request names as it has arrived; None if it names none."""
    if path == ITEMS:
        return query.get("key")
    return path.removeprefix(f"{ITEMS}/") if path.startswith(f"{ITEMS}/") and not query else None


def test_a_key_that_ends_with_a_line_break_is_not_the_key_before_it(client: httpx.Client) -> None:
    assert_problem(client.get(f"{ITEMS}/k1%0A"), 404, "item-not-found")
    assert client.delete(f"{ITEMS}/k1%0A").status_code == 204
    assert client.get(f"{ITEMS}/k1").status_code == 200


def test_what_no_key_can_be_is_refused(client: httpx.Client) -> None:
    for path, said in (
        ("a%00b", "NUL"),
        ("%ff", "UTF-8"),
        ("%ED%A0%80", "UTF-8"),
        ("k" * 1025, "1025 bytes"),
    ):
        for method in ("GET", "PUT", "DELETE"):
            body = {"json": {"text": "a text"}} if method == "PUT" else {}
            answer = client.request(method, f"{ITEMS}/{path}", **body)  # type: ignore[arg-type]
            assert_problem(answer, 422, "invalid-item", said)
            answer = client.request(method, f"{ITEMS}?key={path}", **body)  # type: ignore[arg-type]
            assert_problem(answer, 422, "invalid-request" if said == "UTF-8" else "invalid-item", said)
    for method in ("GET", "DELETE"):
        assert_problem(
            client.request(method, ITEMS), 422, "invalid-item", f"{ITEMS}?key=…; all rows are read"
        )
        assert_problem(client.request(method, f"{ITEMS}?key="), 422, "invalid-item", "the key is empty")
    for key in ("", "a\0b", "k" * 1025, "\ud800"):
        answer = client.post(f"{ITEMS}:delete", content=json.dumps({"keys": ["a", key]}), headers=JSON)
        assert_problem(answer, 422, "invalid-item", "keys[1]")


def test_a_text_that_can_have_no_vector_is_refused_with_its_code(
    client: httpx.Client, engine: Engine
) -> None:
    for text_, code in (
        ("", "empty_text"),
        ("  ", "empty_text"),
        ("a\0b", "nul_character"),
        ("\ud800", "lone_surrogate"),
    ):
        answer = client.put(f"{ITEMS}/k1", content=json.dumps({"text": text_}), headers=JSON)
        problem = assert_problem(answer, 422, "invalid-item", code, "is unchanged")
        assert problem["errors"][0]["code"] == code
    assert_problem(client.put(f"{ITEMS}/a", json={"text": 1}), 422, "invalid-request", "text")
    assert_problem(client.put(f"{ITEMS}/a", content=b"{", headers=JSON), 400, "invalid-json")
    assert_problem(client.put(f"{ITEMS}/a", content=b"x"), 415, "unsupported-media-type")
    assert_problem(
        client.put("/v1/collections/none/items/a", json={"text": "t"}), 404, "collection-not-found"
    )
    assert count_jobs(engine) == 0


def test_who_does_not_want_to_wait_is_told_where_the_job_is(client: httpx.Client, engine: Engine) -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"params": {"wait_seconds": 0}}, None),
        ({"headers": {"Prefer": "respond-async"}}, "respond-async"),
        ({"headers": {"Prefer": "handling=lenient, wait=0"}}, "wait=0"),
        ({"params": {"wait_seconds": 0.01}, "headers": {"Prefer": "wait=60"}}, None),
    ]
    location = ""
    for more, applied in cases:
        answer = put(client, "a", "first text", **more)
        assert (answer.status_code, answer.json()["is_searchable"]) == (202, False)
        assert answer.headers.get("preference-applied") == applied
        location = answer.headers["location"]
        assert client.get(location).json()["state"] == "queued"
    encode_waiting(engine)
    assert client.get(location).json()["state"] == "completed"
    assert client.get(f"{ITEMS}/a").status_code == 200


def test_a_put_that_nobody_waited_for_keeps_its_job_until_the_pruner_comes(
    client: httpx.Client, engine: Engine
) -> None:
    put(client, "a", params={"wait_seconds": 0})
    with engine.begin() as connection:
        assert discard_ended_puts(connection, -1) == 0, "its text is nowhere else"
    encode_waiting(engine)
    with engine.begin() as connection:
        assert discard_ended_puts(connection) == 0
        assert discard_ended_puts(connection, -1) == 1
    assert count_jobs(engine) == 0


@contextmanager
def observed_puts(engine: Engine) -> Iterator[tuple[httpx.Client, Puts]]:
    """A client of an API, and what waits there to be written."""
    app = create_app(Settings(), engine)
    with serving(app) as url, httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        yield client, app.state.resources.puts


@contextmanager
def nobody_writes_jobs(engine: Engine) -> Iterator[None]:
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE vectormill.jobs IN SHARE MODE"))
        yield


# A worker that looks for chunks meanwhile waits for the same lock.
IS_WRITER_BLOCKED = text(r"""
    SELECT EXISTS (SELECT 1 FROM pg_locks JOIN pg_stat_activity USING (pid)
                    WHERE NOT granted AND relation = CAST('vectormill.jobs' AS regclass)
                      AND query ~ 'INSERT INTO vectormill[.]jobs[[:space:]]')
""")


def is_blocked(engine: Engine) -> bool:
    return bool(execute(engine, IS_WRITER_BLOCKED).scalar_one())


def count_waiting(puts: Puts) -> int:
    return puts.num_waiting


@pytest.mark.usefixtures("client")
def test_puts_that_come_at_once_share_jobs_and_each_hears_of_its_own(engine: Engine) -> None:
    with observed_puts(engine) as (client, puts), ThreadPoolExecutor(32) as clients:
        with encoding_meanwhile(engine):
            with nobody_writes_jobs(engine):
                asked = [clients.submit(put, client, "n0", "number 0")]
                wait_for(lambda: is_blocked(engine), because="the first one's job is being written")
                asked += [clients.submit(put, client, f"n{n}", f"number {n}") for n in range(1, 32)]
                wait_for(lambda: count_waiting(puts) == 31, because="the others wait for it")
            answers = [each.result() for each in asked]
        assert {answer.status_code for answer in answers} == {200}
        assert [answer.json()["key"] for answer in answers] == [f"n{number}" for number in range(32)]
        jobs = [answer.json()["job"] for answer in answers]
        assert (len(set(jobs)), len(set(jobs[1:]))) == (2, 1)
        for number in (0, 31):
            item = client.get(f"{ITEMS}/n{number}", params={"include": "vector"}).json()
            expected = vector_of(f"number {number}".encode()).tolist()
            assert item["embedding"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.usefixtures("client")
def test_of_two_puts_of_one_key_the_later_one_stays(engine: Engine) -> None:
    asked: list[Future[httpx.Response]] = []
    with observed_puts(engine) as (client, puts), ThreadPoolExecutor(3) as clients:
        with nobody_writes_jobs(engine):  # so that they meet in one process, one after the other
            for number in range(3):
                wanted = {"params": {"wait_seconds": 0}}
                asked.append(clients.submit(put, client, "a", f"text {number}", **wanted))
                wait_for(lambda: is_blocked(engine), because="the first one's job is being written")
                wait_for(lambda number=number: count_waiting(puts) == number, because="the others wait")  # type: ignore[misc]
        assert len({each.result().json()["job"] for each in asked}) == 3
        encode_waiting(engine)
        item = client.get(f"{ITEMS}/a", params={"include": "vector"}).json()
    assert item["embedding"] == pytest.approx(vector_of(b"text 2").tolist(), abs=1e-3)


def test_one_put_that_fails_does_not_take_its_neighbours_with_it(
    client: httpx.Client, engine: Engine
) -> None:
    with (
        api_client(engine, max_text_chars=10**7) as lenient,
        encoding_meanwhile(engine),
        ThreadPoolExecutor(2) as clients,
    ):
        bad = clients.submit(put, lenient, "bad", "x" * 1_000_001)
        good = clients.submit(put, lenient, "good", "a good text")
    assert (bad.result().status_code, good.result().status_code) == (422, 200)
    assert client.get(f"{ITEMS}/good").status_code == 200


def test_a_put_whose_job_is_cancelled_is_told_so(client: httpx.Client, engine: Engine) -> None:
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(put, client, "a")
        wait_for(lambda: count_jobs(engine) == 1, 10, "the put is committed")
        client.post(f"/v1/jobs/{client.get('/v1/jobs').json()['data'][0]['id']}/cancel").raise_for_status()
        assert_problem(answer.result(), 409, "conflict", "was cancelled")


def test_an_api_that_is_told_to_stop_tells_who_waits_where_its_job_is(
    client: httpx.Client, engine: Engine
) -> None:
    with ThreadPoolExecutor(1) as clients:
        with serving(create_app(Settings(), engine)) as url:
            waiting = httpx.Client(base_url=url, timeout=30, trust_env=False)
            answer = clients.submit(put, waiting, "a", params={"wait_seconds": 60})
            wait_for(lambda: count_jobs(engine) == 1, 10, "the put is committed")
            # The end of the block stops the API.
        assert answer.result().status_code == 202
        waiting.close()
    assert count_jobs(engine) == 1


def test_puts_beyond_the_limit_are_committed_and_do_not_wait(engine: Engine) -> None:
    with api_client(engine, max_waiting_puts=1) as client, ThreadPoolExecutor(1) as clients:
        submit(client, many(1), collection="docs")
        first = clients.submit(put, client, "a")
        wait_for(lambda: count_jobs(engine) == 2, 10, "the put is committed")
        assert put(client, "b").status_code == 202
        encode_waiting(engine)
        assert first.result().status_code == 200


def test_deletions_are_answered_with_what_was_there(client: httpx.Client, engine: Engine) -> None:
    answer = client.post(f"{ITEMS}:delete", json={"keys": ["k0", "k0", "k1", "gone"]})
    assert (answer.status_code, answer.json()) == (200, {"num_keys": 3, "num_deleted": 2})
    assert client.delete(f"{ITEMS}/k0").status_code == 204
    assert_problem(client.delete("/v1/collections/none/items/a"), 404, "collection-not-found")
    with api_client(engine, max_deleted_keys=2) as strict:
        answer = strict.post(f"{ITEMS}:delete", json={"keys": ["a", "b", "c"]})
        problem = assert_problem(answer, 413, "submission-too-large", "more than 2 keys")
        assert problem["limit"] == {"setting": "VECTORMILL_MAX_DELETED_KEYS", "value": 2}


def test_a_put_that_was_deleted_before_it_was_encoded_does_not_come_back(
    client: httpx.Client, engine: Engine
) -> None:
    put(client, "a", params={"wait_seconds": 0})
    assert client.delete(f"{ITEMS}/a").status_code == 204
    encode_waiting(engine)
    assert_problem(client.get(f"{ITEMS}/a"), 404, "item-not-found")
    with encoding_meanwhile(engine):
        assert put(client, "a").status_code == 200
    assert client.get(f"{ITEMS}/a").status_code == 200
