"""Files over HTTP with the official client: what is uploaded comes back, in the memory of one part."""

import tracemalloc
from collections.abc import Iterator

import httpx
import openai
import pytest
from sqlalchemy import Engine, text

from scheduler.pruner import Pruner
from tests.api_server import api_client
from tests.database import execute
from vectormill.batches.files import PART_BYTES

LINES = b"".join(b'{"custom_id": "%d"}\n' % number for number in range(1000))
# What no compression makes small: four parts, and one that is not full.
LARGE = bytes(range(256)) * (PART_BYTES // 64) + b"end"
BOUNDARY = "limit"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
API_SETTINGS = {"max_file_bytes": 2 * len(LARGE)}


def count(engine: Engine, table: str) -> int:
    return int(execute(engine, f"SELECT count(*) FROM vectormill.{table}").scalar_one())


def make_form(*parts: tuple[str, str, bytes]) -> bytes:
    """Of a name, what follows it in the header, and the content."""
    written = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{rest}\r\n\r\n'.encode()
        + body
        + b"\r\n"
        for name, rest, body in parts
    ]
    return b"".join(written) + f"--{BOUNDARY}--\r\n".encode()


def test_a_file_comes_back_as_it_was_sent_and_is_gone_when_it_is_deleted(client: openai.OpenAI) -> None:
    file = client.files.create(file=("lines.jsonl", LINES), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == (
        "file",
        len(LINES),
        "lines.jsonl",
        "batch",
    )
    assert (file.status, file.id[:5]) == ("processed", "file-")
    assert file.expires_at == file.created_at + 30 * 86400
    assert client.files.retrieve(file.id) == file
    assert client.files.content(file.id).content == LINES
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_files_are_listed_in_pages_from_either_end(client: openai.OpenAI) -> None:
    names = [client.files.create(file=(f"{n}.jsonl", LINES), purpose="batch").id for n in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == names[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == names
    first = client.files.list(limit=2)
    assert first.has_more
    assert [file.id for file in first.data] == [names[4], names[3]]
    assert [file.id for file in client.files.list(after=names[1])] == [names[0]]
    assert [file.id for file in client.files.list(purpose="batch_output")] == []
    with pytest.raises(openai.BadRequestError):
        client.files.list(purpose="poetry")
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-of-nobody")


def test_a_large_file_is_never_whole_in_the_memory_of_the_api(engine: Engine) -> None:
    """The server is in this process, so its memory is; 64 MiB are sent by a generator."""
    piece, num_pieces = LARGE[: PART_BYTES // 4], 256

    def body() -> Iterator[bytes]:
        head, _, tail = make_form(
            ("purpose", "", b"batch"), ("file", '; filename="x"', b"<content>")
        ).partition(b"<content>")
        yield head
        for _ in range(num_pieces):
            yield piece
        yield tail

    with api_client(engine) as http:
        tracemalloc.start()
        try:
            answer = http.post("/v1/files", content=body(), headers=FORM)
            assert answer.status_code == 200, answer.text
            num_bytes = 0
            with http.stream("GET", f"/v1/files/{answer.json()['id']}/content") as stream:
                for got in stream.iter_raw():
                    num_bytes += len(got)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert num_bytes == answer.json()["bytes"] == num_pieces * len(piece)
    assert peak < 16 << 20, f"{peak >> 20} MiB for a file of {num_bytes >> 20}"


def test_a_file_above_the_limit_is_refused_and_nothing_of_it_stays(
    client: openai.OpenAI, http: httpx.Client, engine: Engine
) -> None:
    with pytest.raises(openai.APIStatusError, match="VECTORMILL_MAX_FILE_BYTES") as refused:
        client.with_options(max_retries=0).files.create(file=("x", LARGE * 3), purpose="batch")
    assert refused.value.status_code == 413
    # And one that does not say how long it is.
    form = make_form(("purpose", "", b"batch"), ("file", '; filename="x"', LARGE * 3))
    pieces = (form[start : start + 65536] for start in range(0, len(form), 65536))
    assert http.post("/v1/files", content=pieces, headers=FORM).status_code == 413
    Pruner(engine, 86400, 3600).prune()
    assert count(engine, "request_files") == count(engine, "request_file_parts") == 0


def test_a_form_that_says_too_little_is_refused_with_what_it_lacks(http: httpx.Client) -> None:
    lines, purpose = ("file", '; filename="x"', LINES), ("purpose", "", b"batch")
    for body, said in (
        (make_form(purpose), "no file"),
        (make_form(lines), "purpose"),
        (make_form(("purpose", "", b"fine-tune"), lines), "purpose"),
        (make_form(purpose, ("file", "", b""))[:-30], "multipart"),
        (b"no form at all", "multipart"),
        (make_form(("purpose", "", b"x" * 5000), lines), "4096"),
        (make_form(purpose, ("expires_after[seconds]", "", b"soon"), lines), "expires_after"),
    ):
        answer = http.post("/v1/files", content=body, headers=FORM)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
    assert http.get("/v1/files").json()["data"] == []


def test_the_purpose_may_follow_the_file_which_may_be_empty(http: httpx.Client) -> None:
    for content in (LINES, b""):
        form = make_form(
            ("file", '; filename="C:\\\\of\\\\windows.jsonl"', content), ("purpose", "", b"batch")
        )
        answer = http.post("/v1/files", content=form, headers=FORM).json()
        assert (answer["filename"], answer["bytes"]) == ("windows.jsonl", len(content))
        assert http.get(f"/v1/files/{answer['id']}/content").content == content


def test_what_is_past_its_time_is_not_found_and_then_removed(client: openai.OpenAI, engine: Engine) -> None:
    file = client.files.create(
        file=("x", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at == file.created_at + 3600
    kept = client.files.create(file=("y", LINES), purpose="batch")
    execute(engine, "UPDATE vectormill.request_files SET expires_at = now() WHERE filename = 'x'")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    Pruner(engine, 86400, 3600).prune()
    assert count(engine, "request_files") == count(engine, "request_file_parts") == 1
    assert client.files.content(kept.id).content == LINES


def test_an_upload_whose_api_was_killed_is_removed_when_it_was_silent_for_long(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("""
                INSERT INTO vectormill.request_files (id, state, purpose, filename, updated_at)
                SELECT gen_random_uuid(), 'uploading', 'batch', name, now() - CAST(silent AS interval)
                  FROM (VALUES ('old', '2 hours'), ('young', '2 minutes')) AS upload (name, silent)
            """)
        )
    Pruner(engine, 86400, 3600).prune()
    assert execute(engine, "SELECT filename FROM vectormill.request_files").scalars().all() == ["young"]
