"""Flower with our page in it: Flower's own application and templates, asked over HTTP, without a broker."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from flower.app import Flower
from flower.options import options
from flower.urls import handlers
from flower.urls import settings as flower_settings
from tornado.httpclient import AsyncHTTPClient, HTTPResponse
from tornado.httpserver import HTTPServer
from tornado.ioloop import IOLoop
from tornado.testing import bind_unused_port

from vectormill.db.jobs.backlog import Waiting
from vectormill.flower_pages.backlog import Backlog, BacklogReader
from vectormill.flower_pages.pages import add_backlog, describe_age, find_console_url

ROWS = (
    Waiting("all-MiniLM-L6-v2", 0, 1, 5, 0, 1, 2, 7.0),
    Waiting("<b>big</b>", 5, 3, 70000, 40, 2, 8, 11_100.0),
    Waiting("idle", 9, 1, 4, 0, 0, 1, None),
)


class Told(BacklogReader):
    def __init__(self, backlog: Backlog) -> None:
        super().__init__(None)
        self._backlog = backlog

    def read(self) -> Backlog:
        return self._backlog


@contextmanager
def flower(reader: BacklogReader, console_url: str | None = None) -> Iterator[Any]:
    """Asks a Flower that has our page; Flower's lists are as they were afterwards."""
    before, loop = list(handlers), IOLoop()
    settings = dict(flower_settings)
    add_backlog(handlers, settings, reader, console_url=console_url, api_port=8000)
    app = Flower(options=options, capp=Celery(), io_loop=loop, **settings)
    socket, port = bind_unused_port()
    server = HTTPServer(app)

    def ask(path: str, **given: Any) -> HTTPResponse:
        async def fetch() -> HTTPResponse:
            client = AsyncHTTPClient()
            return await client.fetch(f"http://127.0.0.1:{port}{path}", raise_error=False, **given)

        answer: HTTPResponse = loop.run_sync(fetch, timeout=60)
        return answer

    async def listen() -> None:
        server.add_sockets([socket])

    loop.run_sync(listen)
    try:
        yield ask
    finally:
        handlers[:] = before
        server.stop()
        loop.run_sync(server.close_all_connections)
        app.executor.shutdown()
        loop.close(all_fds=True)


def test_the_page_tells_queue_depth_and_oldest_age_by_model_and_priority() -> None:
    with flower(Told(Backlog(ROWS))) as ask:
        answer = ask("/backlog")
    page = answer.body.decode()
    assert answer.code == 200
    cells = [part.partition("</td>")[0] for part in page.partition("<tbody>")[2].split("<td>")[1:]]
    assert cells[:7] == ["all-MiniLM-L6-v2", "0", "1", "5", "1", "2", "7 s"]
    assert cells[7:14] == ["&lt;b&gt;big&lt;/b&gt;", "5", "3", "70000", "42", "8", "3 h 5 min"]
    assert cells[20] == "–"
    assert answer.headers["Refresh"] == "5"


def test_every_page_of_flower_s_leads_to_the_backlog_and_to_the_console() -> None:
    with flower(Told(Backlog()), "https://vectors.example.org/console") as ask:
        pages = {path: ask(path) for path in ("/", "/workers", "/tasks", "/backlog")}
        assert ask("/nothing").code == 404
    for path, answer in pages.items():
        page = answer.body.decode()
        assert answer.code == 200, path
        assert 'href="/backlog"' in page, path
        assert 'href="https://vectors.example.org/console">Console</a>' in page, path
        assert ('aria-current="page">Backlog' in page) == (path == "/backlog")


def test_without_a_database_or_with_one_that_is_away_the_page_says_so() -> None:
    with flower(BacklogReader(None)) as ask:
        assert "Set VECTORMILL_DATABASE_URL" in ask("/backlog").body.decode()
    with flower(BacklogReader("postgresql://nobody@127.0.0.1:1/nothing")) as ask:
        answer = ask("/backlog")
    assert answer.code == 200
    assert "Postgres did not answer" in answer.body.decode()


@pytest.fixture
def password() -> Iterator[str]:
    before = options.basic_auth
    options.basic_auth = ["me:moonshine"]
    yield "me:moonshine"
    options.basic_auth = before


def test_a_password_guards_the_page_as_it_does_flower_s(password: str) -> None:
    with flower(Told(Backlog(ROWS))) as ask:
        assert ask("/backlog").code == 401
        words = base64.b64encode(password.encode()).decode()
        assert ask("/backlog", headers={"Authorization": f"Basic {words}"}).code == 200


def test_several_who_look_at_once_are_told_what_was_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, read = [100.0], list[str]()

    def count(url: str) -> Backlog:
        read.append(url)
        return Backlog(ROWS)

    monkeypatch.setattr("vectormill.flower_pages.backlog._read", count)
    reader = BacklogReader("postgresql://here", lambda: now[0])
    assert reader.read() == reader.read() == Backlog(ROWS)
    now[0] += 3
    reader.read()
    assert len(read) == 2


@pytest.mark.parametrize(
    ("console_url", "host", "found"),
    [
        (None, "127.0.0.1:5555", "http://127.0.0.1:8000/console"),
        (None, "[::1]:5555", "http://[::1]:8000/console"),
        (None, "mill.example.org", "http://mill.example.org:8000/console"),
        ("https://v.example.org/console", "127.0.0.1:5555", "https://v.example.org/console"),
    ],
)
def test_the_console_is_looked_for_where_it_was_said_or_beside_flower(
    console_url: str | None, host: str, found: str
) -> None:
    assert find_console_url(console_url, host, 8000) == found


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, "–"), (0.2, "0 s"), (59.4, "59 s"), (60, "1 min"), (3700, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_an_age_is_told_in_its_two_largest_units(seconds: float | None, words: str) -> None:
    assert describe_age(seconds) == words
