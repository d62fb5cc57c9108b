"""Both clients try again as long as it makes sense, and no longer."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import httpx
import pytest

from vectormill.client import AsyncClient, Client
from vectormill.client.requests import FIRST_SECONDS, JITTER_SHARE, LONGEST_SECONDS, Retries
from vectormill.problems import ApiError, ApiFailure, ApiUnreachable, read_retry_after

NOW: Final = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


@dataclass
class Server:
    """Answers in this order, then with success; what it was asked, and how long its client waited between."""

    answers: list[httpx.Response | Exception] = field(default_factory=list)
    requests: list[httpx.Request] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if self.answers else httpx.Response(200, json={"data": [], "id": "j"})
        if isinstance(answer, Exception):
            raise answer
        return answer


# What a test does with a client, on either of them: the name of a method, and its arguments.
Do = Callable[..., Any]


def do_blocking(server: Server, retry_seconds: float, calls: list[tuple[str, tuple[Any, ...]]]) -> Any:
    def answer(request: httpx.Request) -> httpx.Response:
        request.read()
        return server.answer(request)

    transport = httpx.MockTransport(answer)
    result = None
    with Client(transport=transport, retry_seconds=retry_seconds, pause=server.pauses.append) as client:
        for name, arguments in calls:
            result = getattr(client, name)(*arguments)
    return result


def do_async(server: Server, retry_seconds: float, calls: list[tuple[str, tuple[Any, ...]]]) -> Any:
    async def answer(request: httpx.Request) -> httpx.Response:
        await request.aread()
        return server.answer(request)

    async def pause(seconds: float) -> None:
        server.pauses.append(seconds)

    async def run() -> Any:
        result = None
        transport = httpx.MockTransport(answer)
        async with AsyncClient(transport=transport, retry_seconds=retry_seconds, pause=pause) as client:
            for name, arguments in calls:
                result = await getattr(client, name)(*arguments)
        return result

    return asyncio.run(run())


@pytest.fixture(params=[do_blocking, do_async], ids=["blocking", "async"])
def do(request: pytest.FixtureRequest) -> Do:
    def run(server: Server, *calls: tuple[Any, ...], retry_seconds: float = 6.0) -> Any:
        return request.param(server, retry_seconds, [(name, arguments) for name, *arguments in calls])

    return run


def busy(status: int = 429, retry_after: str | None = None) -> httpx.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return httpx.Response(status, headers=headers, json={"title": "Busy", "detail": "Come back later."})


def test_what_passes_is_asked_again_after_longer_and_longer_pauses(do: Do) -> None:
    for status in [429, 502, 503, 504]:
        server = Server([busy(status)] * 3)
        assert do(server, ("models",)) == []
        assert len(server.requests) == 4
        for pause, least in zip(server.pauses, (0.2, 0.4, 0.8), strict=True):
            assert least <= pause <= least * (1 + JITTER_SHARE)


def test_what_does_not_pass_is_not_asked_again(do: Do) -> None:
    for status in [400, 401, 404, 409, 422, 500]:
        server = Server([busy(status)])
        with pytest.raises(ApiError):
            do(server, ("models",))
        assert (len(server.requests), server.pauses) == (1, [])


def test_no_pause_is_shorter_than_the_server_asked_for(do: Do) -> None:
    server = Server([busy(retry_after="2"), busy(503)])
    do(server, ("models",))
    assert 2.0 <= server.pauses[0] <= 2.0 * (1 + JITTER_SHARE)
    assert server.pauses[1] < 2.0


def test_a_server_that_wants_longer_than_there_is_patience_is_left_alone_at_once(do: Do) -> None:
    server = Server([busy(retry_after="3600")])
    with pytest.raises(ApiError, match="Come back later") as refused:
        do(server, ("models",))
    assert refused.value.retry_after == 3600
    assert server.pauses == []


def test_all_pauses_together_are_bounded(do: Do) -> None:
    server = Server([busy(503)] * 100)
    with pytest.raises(ApiFailure):
        do(server, ("models",))
    assert sum(server.pauses) == pytest.approx(6.0)
    assert len(server.requests) == 6


def test_no_patience_is_no_second_attempt(do: Do) -> None:
    server = Server([busy()])
    with pytest.raises(ApiError):
        do(server, ("models",), retry_seconds=0)
    assert len(server.requests) == 1


def test_a_connection_that_is_lost_is_made_again_once_it_has_worked(do: Do) -> None:
    server = Server([httpx.Response(200, json={"data": []}), httpx.ReadError("reset")])
    assert do(server, ("models",), ("workers",)) == []
    assert len(server.requests) == 3


def test_a_service_that_never_answered_is_not_waited_for(do: Do) -> None:
    server = Server([httpx.ConnectError("refused")])
    with pytest.raises(ApiUnreachable, match="vectormill up"):
        do(server, ("models",))
    assert server.pauses == []


def test_what_cannot_be_repeated_is_not(do: Do) -> None:
    server = Server([busy(503)])
    with pytest.raises(ApiFailure):
        do(server, ("retry", "j"))
    assert len(server.requests) == 1


def test_a_submission_is_repeated_under_one_key_with_the_same_items(do: Do) -> None:
    server = Server([busy(503), busy(429, retry_after="1")])
    do(server, ("submit", [{"key": "a", "text": "one"}]))
    assert len({request.headers["Idempotency-Key"] for request in server.requests}) == 1
    assert {request.content for request in server.requests} == {b'{"key":"a","text":"one"}\n'}
    assert len(server.requests) == 3


def test_what_makes_something_is_repeated_under_one_key_with_the_same_body(do: Do) -> None:
    for call in [
        ("push", "docs", [{"key": "a", "text": "one"}]),
        ("start_run", "docs", "check"),
        ("reindex", "docs"),
        ("run_schedule", "nightly"),
        ("create_webhook", "https://example.com/hook"),
    ]:
        server = Server([busy(503), busy(429, retry_after="1")])
        do(server, call, call)
        assert len(server.requests) == 4
        keys = [request.headers["Idempotency-Key"] for request in server.requests]
        assert keys[0] == keys[1] == keys[2] != keys[3]  # another call means another thing
        assert len({(request.url, request.content) for request in server.requests}) == 1


def test_items_that_come_once_are_sent_once(do: Do) -> None:
    for call in [("submit",), ("push", "docs")]:
        server = Server([busy(503)])
        with pytest.raises(ApiFailure):
            do(server, (*call, iter([{"key": "a", "text": "one"}])))
        assert len(server.requests) == 1


def test_how_long_a_server_wants_to_be_left_alone_is_read() -> None:
    for written, seconds in [
        ("17", 17.0),
        ("Mon, 23 Nov 2026 12:00:30 GMT", 30.0),
        ("Mon, 23 Nov 2026 12:00:30 -0000", 30.0),
        ("Mon, 23 Nov 2026 11:00:00 GMT", 0.0),  # is over
        ("", None),
        ("soon", None),
        ("-5", None),
    ]:
        assert read_retry_after({"Retry-After": written}, NOW) == seconds


def test_pauses_double_up_to_the_longest_and_differ_by_chance() -> None:
    error = ApiUnreachable()
    calm = Retries(1000.0, chance=lambda: 0.0).begin()
    pauses = [calm.before_next(error) or 0.0 for _ in range(12)]
    assert pauses[:4] == [FIRST_SECONDS * factor for factor in (1, 2, 4, 8)]
    assert pauses[-1] == LONGEST_SECONDS
    hasty = Retries(1000.0, chance=lambda: 1.0).begin()
    assert hasty.before_next(error) == FIRST_SECONDS * (1 + JITTER_SHARE)
