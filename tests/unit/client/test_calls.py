"""What both clients ask for with `embed`, `rerank`, `events` and `readiness`, and what they make of the answers."""

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
import numpy as np
import pytest

from vectormill.client import AsyncClient, Client
from vectormill.domain.errors import InvalidOption
from vectormill.problems import ApiFailure, ApiUnreachable

Answer = Callable[[httpx.Request], httpx.Response]
# What a client answers to a method's name and its arguments; an iterator's rows as a list.
Ask = Callable[..., Any]
RUNNING: Final = {"id": "j", "state": "running", "num_done": 1}
COMPLETED: Final = {"id": "j", "state": "completed", "num_done": 2}


def ask_blocking(answer: Answer, name: str, *arguments: Any, **options: Any) -> Any:
    with Client(transport=httpx.MockTransport(answer), pause=lambda seconds: None) as client:
        result = getattr(client, name)(*arguments, **options)
        return list(result) if isinstance(result, Iterator) else result


def ask_async(answer: Answer, name: str, *arguments: Any, **options: Any) -> Any:
    async def pause(seconds: float) -> None:
        pass

    async def run() -> Any:
        async with AsyncClient(transport=httpx.MockTransport(answer), pause=pause) as client:
            result = getattr(client, name)(*arguments, **options)
            return [row async for row in result] if hasattr(result, "__aiter__") else await result

    return asyncio.run(run())


@pytest.fixture(params=[ask_blocking, ask_async], ids=["blocking", "async"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen


def write_embeddings(request: httpx.Request) -> httpx.Response:
    """A text's vector is its number and its letters; the last one comes first."""
    texts = json.loads(request.content)["input"]
    rows = [
        {
            "index": index,
            "embedding": base64.b64encode(np.array([float(text), len(text)], "<f4").tobytes()).decode(),
        }
        for index, text in enumerate(texts)
    ]
    return httpx.Response(200, json={"data": rows[::-1], "model": "m", "object": "list"})


def test_texts_are_encoded_in_parts_and_come_back_in_their_order(ask: Ask) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append({"path": request.url.path, **json.loads(request.content)})
        return write_embeddings(request)

    matrix = ask(answer, "embed", (str(number) for number in range(4_100)), model="m", input_type="query")
    assert [len(body.pop("input")) for body in asked] == [2_048, 2_048, 4]
    wanted = {"path": "/v1/embeddings", "model": "m", "input_type": "query", "encoding_format": "base64"}
    assert asked == [wanted] * 3
    assert (matrix.dtype, matrix.shape) == (np.float32, (4_100, 2))
    assert matrix[:, 0].tolist() == list(range(4_100))
    matrix /= 2  # belongs to whoever asked


def test_of_no_texts_there_is_an_array_without_rows_and_no_request(ask: Ask) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise AssertionError(request.url)

    assert ask(answer, "embed", [], dimensions=64).shape == (0, 64)


def test_a_text_alone_is_not_taken_for_a_list_of_letters(ask: Ask) -> None:
    with pytest.raises(InvalidOption, match=r"embed\(\[text\]\)"):
        ask(write_embeddings, "embed", "letters")


def test_without_a_worker_the_reason_comes_at_once(ask: Ask) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(503, json={"title": "Away", "detail": "No live worker serves m."})

    for name, arguments in (("embed", (["a"],)), ("rerank", ("a", ["b"]))):
        with pytest.raises(ApiFailure, match="No live worker serves m"):
            ask(answer, name, *arguments)
    assert len(asked) == 2  # the server has waited already


def write_events(*jobs: dict[str, Any]) -> bytes:
    events = [f"event: progress\ndata: {json.dumps(job)}\n\n: awake\n\n" for job in jobs]
    return "".join(events).encode()


def test_events_that_break_off_are_asked_for_again_and_nothing_is_told_twice(ask: Ask) -> None:
    streams = [write_events(RUNNING), b"", write_events(RUNNING, COMPLETED)]

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/jobs/j/events"
        return httpx.Response(200, content=streams.pop(0))

    assert ask(answer, "events", "j") == [RUNNING, COMPLETED]
    assert streams == []


def test_events_that_bring_nothing_any_more_are_given_up(ask: Ask) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, content=write_events(RUNNING))

    with pytest.raises(ApiUnreachable, match="closed the event stream of job j before the job ended"):
        ask(answer, "events", "j")
    assert 2 < len(asked) < 20
