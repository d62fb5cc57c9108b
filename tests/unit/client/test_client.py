import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.unit.fake_api import FakeApi, serving_fake_api
from vectormill.client import Client, is_loopback
from vectormill.client.requests import write_json
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.files.ndjson import ItemJson
from vectormill.problems import ApiError, ApiFailure, ApiUnreachable, WaitTimeout
from vectormill.processes.lifetimes import free_port

ITEMS: list[ItemJson] = [
    {"key": "a", "text": "one"},
    {"key": "b", "text": ""},
    {"key": "c\u2028c", "text": "three\nlines\u2028here", "metadata": {"page": 1}},
    {"key": "d", "text": "  "},
    {"key": "e", "text": "\t"},
]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with serving_fake_api() as fake:
        yield fake


@pytest.fixture
def client(api: FakeApi) -> Iterator[Client]:
    with Client(api.url, timeout=60, pause=lambda seconds: None) as made:
        yield made


def test_a_job_goes_out_and_its_vectors_come_back(client: Client, api: FakeApi) -> None:
    job = client.submit(
        ITEMS, model="mini", collection="docs", priority=0, normalize=False, metadata={"n": 1}
    )
    seen: list[str] = []
    ended = client.wait(job["id"], lambda state: seen.append(state["state"]))
    assert api.items[job["id"]] == ITEMS
    assert seen == ["running", "completed_with_errors"]
    assert ended["num_failed"] == 3
    assert list(client.vectors(job["id"])) == [
        {"key": "a", "embedding": [3.0, 1.0]},
        {"key": "c\u2028c", "embedding": [16.0, 1.0]},
    ]


def test_what_is_not_given_is_not_sent_so_that_the_server_decides(client: Client, api: FakeApi) -> None:
    client.submit(ITEMS, collection="docs", truncate=False, vector_type="int8")
    given = {"collection": "docs", "truncate": "false", "vector_type": "int8"}
    assert api.requests[-1] == ("POST", "/v1/jobs", given)


@pytest.mark.parametrize("gzip", [True, False])
def test_an_upload_is_streamed_in_many_parts(client: Client, api: FakeApi, gzip: bool) -> None:
    job = client.submit(({"key": str(i), "text": "x" * 1000} for i in range(1000)), gzip=gzip)
    assert job["num_items"] == 1000
    assert api.headers[-1]["Transfer-Encoding"] == "chunked"
    assert api.headers[-1].get("Content-Encoding") == ("gzip" if gzip else None)


def test_a_lone_surrogate_travels_escaped_so_that_the_server_can_report_the_item(
    client: Client, api: FakeApi
) -> None:
    job = client.submit([{"key": "half", "text": "\ud800"}])
    assert api.items[job["id"]][0]["text"] == "\ud800"


def test_what_json_cannot_say_is_refused_before_it_is_sent(client: Client, api: FakeApi) -> None:
    for metadata in ({"score": float("nan")}, {"score": float("inf")}, {"at": object()}):
        with pytest.raises(InvalidOption, match="cannot be encoded as JSON"):
            client.put_item("docs", "a", "A text.", metadata=metadata)
    assert not api.requests


def test_a_query_with_a_lone_surrogate_is_left_to_the_server_to_judge(client: Client) -> None:
    assert write_json({"text": "cut \ud83d"}) == rb'{"text": "cut \ud83d"}'
    assert client.search("docs", "cut \ud83d").num_rows_read == 12_345


def test_an_answer_that_was_lost_makes_no_second_job(client: Client, api: FakeApi) -> None:
    client.models()  # a connection that works
    api.drops_before_success = 1
    job = client.submit(ITEMS)
    assert list(api.jobs) == [job["id"]]
    keys = {header["Idempotency-Key"] for header in api.headers if "Idempotency-Key" in header}
    assert len(keys) == 1


def test_an_upload_that_cannot_be_replayed_is_not_repeated(client: Client, api: FakeApi) -> None:
    client.models()
    api.drops_before_success = 1
    with pytest.raises(ApiUnreachable, match="broke during POST /v1/jobs"):
        client.submit(iter(ITEMS))


def test_an_api_that_is_away_for_a_moment_is_asked_again(client: Client, api: FakeApi) -> None:
    api.failures_before_success = 3
    assert client.submit(ITEMS)["num_items"] == len(ITEMS)


def test_an_api_that_stays_away_is_a_failure_with_its_own_words(client: Client, api: FakeApi) -> None:
    api.failures_before_success = 100
    with pytest.raises(ApiFailure, match=r"^Postgres cannot be reached; try again later\.$"):
        client.submit(ITEMS)
    assert api.failures_before_success == 94


def test_a_refusal_carries_the_problem_and_its_places(client: Client) -> None:
    with pytest.raises(ApiError) as caught:
        client.submit([{"key": "a", "text": "not json"}])
    assert (caught.value.status, caught.value.title) == (400, "Refused")
    assert caught.value.errors == ({"line": 2, "detail": "not JSON"},)
    assert str(caught.value) == "Line 2 is not valid JSON."


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"<html>", "The API refused the request: Bad Request (HTTP 400)."),  # a proxy in between
        (b"[]", "The API refused the request: Bad Request (HTTP 400)."),
        (
            b'{"title": "Odd", "errors": [{"pointer": "/items/2", "detail": "no text"}, "x"]}',
            "The API refused the request: Odd (HTTP 400). [pointer /items/2: no text] [x]",
        ),
    ],
)
def test_an_answer_without_a_detail_is_still_a_sentence(body: bytes, sentence: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(400, content=body))
    with Client(transport=transport) as client, pytest.raises(ApiError) as caught:
        client.models()
    assert str(caught.value) == sentence


def test_an_answer_that_is_not_json_asks_whether_this_is_vectormill() -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=b"<html>"))
    with Client(transport=transport) as client, pytest.raises(ApiUnreachable, match="Is it a Vectormill API"):
        client.models()


def test_a_refused_connection_says_which_url_and_how_to_start(client: Client) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    pauses: list[float] = []
    with Client(url, pause=pauses.append) as lost, pytest.raises(ApiUnreachable) as caught:
        lost.jobs().__next__()
    assert url in str(caught.value)
    assert "vectormill up" in str(caught.value)
    assert not pauses, "nobody waits for a service that never answered"


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://[::1"])
def test_what_is_no_url_is_said_to_be_none(url: str) -> None:
    with pytest.raises(VectormillError, match="is not a URL"), Client(url) as client:
        client.models()


def test_lists_are_read_page_by_page(client: Client, api: FakeApi) -> None:
    ids = [client.submit(ITEMS)["id"] for _ in range(5)]
    assert [job["id"] for job in client.jobs()] == ids[::-1]
    assert list(client.jobs(state="failed")) == []
    assert [error["key"] for error in client.errors(ids[0])] == ["b", "d", "e"]


def test_waiting_ends_in_time_and_leaves_the_job_alone(client: Client) -> None:
    job = client.submit(ITEMS)
    with pytest.raises(WaitTimeout, match="it goes on"):
        client.wait(job["id"], timeout_seconds=0)


def test_an_export_that_breaks_off_leaves_the_file_as_it_was(
    client: Client, api: FakeApi, tmp_path: Path
) -> None:
    job = client.submit(ITEMS)
    out = tmp_path / "vectors.jsonl"
    out.write_text("before")
    api.is_export_cut = True
    with pytest.raises(ApiUnreachable, match="broke"):
        client.export(job["id"], out)
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]


def test_an_export_goes_to_a_path_or_to_an_open_file(client: Client, tmp_path: Path) -> None:
    job = client.submit(ITEMS)
    out, buffer = tmp_path / "vectors.jsonl", io.BytesIO()
    num_bytes = client.export(job["id"], out)
    assert client.export(job["id"], buffer) == num_bytes == out.stat().st_size
    assert out.read_bytes() == buffer.getvalue()
    assert [json.loads(line)["key"] for line in buffer.getvalue().split(b"\n") if line] == ["a", "c\u2028c"]


def test_jobs_are_paused_resumed_cancelled_and_retried(client: Client) -> None:
    job = client.submit(ITEMS)
    assert client.pause(job["id"])["state"] == "paused"
    assert client.resume(job["id"])["state"] == "queued"
    assert client.cancel(job["id"])["state"] == "cancelled"
    assert client.retry(job["id"])["state"] == "queued"


def test_an_ended_job_is_deleted_and_one_that_goes_on_is_not(client: Client) -> None:
    job = client.submit(ITEMS)
    with pytest.raises(ApiError, match="cancel it first") as refused:
        client.delete(job["id"])
    assert refused.value.status == 409
    client.cancel(job["id"])
    client.delete(job["id"])
    with pytest.raises(ApiError, match="There is no job"):
        client.job(job["id"])


def test_a_search_sends_a_text_or_a_vector(client: Client) -> None:
    client.submit(ITEMS)
    assert [match["key"] for match in client.search("docs", "one", limit=1)] == ["a"]
    assert len(client.search("docs", embedding=(1.0, 0.0))) == 5
    assert client.search("docs", "one").num_rows_read == 12_345
    assert client.search("indexed", "one").num_rows_read is None
    with pytest.raises(ApiError, match="no collection nowhere"):
        client.search("nowhere", "one")


def test_an_id_cannot_lead_to_another_route(client: Client, api: FakeApi) -> None:
    with pytest.raises(ApiError):
        client.job("../models?x=1")
    assert api.requests[-1][1] == "/v1/jobs/..%2Fmodels%3Fx%3D1"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://[::1]:8000", True),
        ("http://localhost", True),
        ("https://vectors.example.org", False),
        ("http://10.0.0.1", False),
    ],
)
def test_no_proxy_is_asked_for_this_machine_itself(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
