"""Tests of the client's requests and of broken answers; tests/integration/cli uses the real API."""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from vectormill.client import DEFAULT_URL, Client, is_loopback
from vectormill.client.requests import write_json
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.embedded.data_dir import RunningStack, write_note
from vectormill.extras import MissingLibrary
from vectormill.problems import ApiUnreachable, WaitTimeout
from vectormill.processes.lifetimes import free_port, started_at

RUNNING = {"id": "j", "state": "running"}


@contextmanager
def noting(answer: Callable[[httpx.Request], Any]) -> Iterator[tuple[Client, list[httpx.Request]]]:
    """Yield a client whose requests are answered by this function, and noted."""
    requests: list[httpx.Request] = []

    def note(request: httpx.Request) -> httpx.Response:
        request.read()
        requests.append(request)
        return httpx.Response(200, json=answer(request))

    with Client(transport=httpx.MockTransport(note), pause=lambda seconds: None) as client:
        yield client, requests


def test_a_client_without_a_key_sends_that_of_the_stack_on_its_data_directory_and_to_no_other_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VECTORMILL_API_KEY", raising=False)
    monkeypatch.setenv("VECTORMILL_DATA_DIR", str(tmp_path))
    for url, own, alive, sent in (
        (DEFAULT_URL, "vmk_own", True, "Bearer vmk_own"),
        (DEFAULT_URL, "vmk_own", False, None),
        (DEFAULT_URL, None, True, None),
        ("http://127.0.0.1:2", "vmk_own", True, None),
    ):
        began = (started_at(os.getpid()) or 0.0) if alive else 1.0
        write_note(tmp_path, RunningStack(os.getpid(), began, "", "", api_url=url, api_key=own))
        with noting(lambda request: RUNNING) as (client, requests):
            client.job("j")
        assert requests[0].headers.get("Authorization") == sent, (url, own, alive)


def test_what_is_not_given_is_not_sent_so_that_the_server_decides() -> None:
    with noting(lambda request: RUNNING) as (client, requests):
        client.submit(["one"], collection="docs", truncate=False, vector_type="int8")
    given = {"collection": "docs", "truncate": "false", "vector_type": "int8"}
    assert dict(requests[0].url.params) == given


def test_an_upload_is_streamed_and_compressed_where_that_is_asked_for() -> None:
    for is_compressed in (True, False):
        with noting(lambda request: RUNNING) as (client, requests):
            client.submit(({"key": str(i), "text": "x" * 1000} for i in range(1000)), gzip=is_compressed)
        (request,) = requests
        assert request.headers["Transfer-Encoding"] == "chunked"
        assert request.headers.get("Content-Encoding") == ("gzip" if is_compressed else None)
        content = gzip.decompress(request.content) if is_compressed else request.content
        assert len(content.splitlines()) == 1000


def test_a_lone_surrogate_travels_escaped_so_that_the_server_can_report_the_item() -> None:
    with noting(lambda request: RUNNING) as (client, requests):
        client.submit([{"key": "half", "text": "\ud800"}])
    assert json.loads(requests[0].content)["text"] == "\ud800"
    assert write_json({"text": "cut \ud83d"}) == rb'{"text": "cut \ud83d"}'


def test_what_json_or_a_url_cannot_say_is_refused_before_it_is_sent() -> None:
    with noting(lambda request: {}) as (client, requests):
        for metadata in ({"score": float("nan")}, {"score": float("inf")}, {"at": object()}):
            with pytest.raises(InvalidOption, match="cannot be encoded as JSON"):
                client.put_item("docs", "a", "A text.", metadata=metadata)
        for key in ("\ud800", "k" * 100_000):
            with pytest.raises(InvalidOption, match="cannot be written as a URL"):
                client.delete_item("docs", key)
    assert not requests


def test_metadata_in_a_list_names_columns_and_as_an_object_belongs_to_the_job() -> None:
    frame = pd.DataFrame({"id": [1], "body": ["one"], "page": [7]})
    with noting(lambda request: RUNNING) as (client, requests):
        client.submit(frame, text="body", key="id", metadata=["page"])
        client.submit(["one"], metadata={"n": 1})
        with pytest.raises(InvalidOption, match=r"metadata=\['page'\]"):
            client.submit(frame, metadata="page")
    assert json.loads(requests[0].content) == {"key": "1", "text": "one", "metadata": {"page": 7}}
    assert requests[1].url.params["metadata"] == '{"n": 1}'


def test_lists_are_read_page_by_page() -> None:
    def answer(request: httpx.Request) -> dict[str, Any]:
        start = int(request.url.params.get("after", 0))
        return {"data": [{"id": str(start)}], "next": str(start + 1) if start < 2 else None}

    with noting(answer) as (client, requests):
        assert [job["id"] for job in client.jobs(state="failed")] == ["0", "1", "2"]
    assert {request.url.params["state"] for request in requests} == {"failed"}


def test_waiting_ends_in_time_and_leaves_the_job_alone() -> None:
    with noting(lambda request: RUNNING) as (client, _), pytest.raises(WaitTimeout, match="it continues"):
        client.wait("j", timeout_seconds=0)


def test_an_answer_that_is_not_json_asks_whether_this_is_vectormill() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b"<html>"))
    with Client(transport=transport) as client, pytest.raises(ApiUnreachable, match="Is it a Vectormill API"):
        client.models()


def test_a_refused_connection_says_which_url_and_how_to_start() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    pauses: list[float] = []
    with (
        Client(url, pause=pauses.append) as lost,
        pytest.raises(ApiUnreachable, match="vectormill up") as caught,
    ):
        next(lost.jobs())
    assert url in str(caught.value)
    assert not pauses, "nobody waits for a service that never answered"


def test_what_is_no_url_is_said_to_be_none() -> None:
    for url in ["localhost:8000", "ftp://host", "http://[::1"]:
        with pytest.raises(VectormillError, match="is not a URL"), Client(url) as client:
            client.models()


def test_without_an_address_that_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECTORMILL_API_URL", "http://vectors.example.com/")
    with Client() as client, Client("http://127.0.0.1:9") as named:
        assert (client.base_url, named.base_url) == ("http://vectors.example.com", "http://127.0.0.1:9")
    monkeypatch.delenv("VECTORMILL_API_URL")
    with Client() as client:
        assert client.base_url == DEFAULT_URL


def test_a_library_that_is_missing_is_named_with_the_extra_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vectormill.extras.find_spec", lambda name: None)
    with noting(lambda request: {}) as (client, requests):
        with pytest.raises(MissingLibrary, match=r"pip install .*\[dataframes\]"):
            client.vectors("any").to_numpy()
        assert not requests


def test_neither_an_id_nor_a_key_of_several_lines_can_lead_to_another_route() -> None:
    with noting(lambda request: RUNNING) as (client, requests):
        client.job("../models?x=1")
        client.put_item("docs", "a\nb\n", "A text.")
        client.get_item("docs", "a\nb\n")
        client.delete_item("docs", "a\nb\n")
    job, *items = (request.url.raw_path for request in requests)
    assert job == b"/v1/jobs/..%2Fmodels%3Fx%3D1"
    assert set(items) == {b"/v1/collections/docs/items?key=a%0Ab%0A"}


def test_no_proxy_is_asked_for_this_machine_itself() -> None:
    assert all(map(is_loopback, ("http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost")))
    assert not any(map(is_loopback, ("https://vectors.example.org", "http://10.0.0.1")))
