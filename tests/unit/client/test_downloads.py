"""Downloads that break off, by whatever they were begun, beside downloads that do not."""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vectormill.client import Client
from vectormill.files.outputs import write_vectors
from vectormill.problems import ApiUnreachable

KEYS = [f"k{number:03}" for number in range(400)]
MATRIX = np.arange(800, dtype=np.float32).reshape(400, 2)


def write_parquet() -> bytes:
    sink = io.BytesIO()
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(MATRIX.reshape(-1)), 2)
    pq.write_table(pa.table({"key": KEYS, "embedding": embedding}), sink)
    return sink.getvalue()


PARQUET = write_parquet()
LINES = [
    json.dumps({"key": key, "embedding": row.tolist()}) + "\n" for key, row in zip(KEYS, MATRIX, strict=True)
]


class Breaking(httpx.SyncByteStream):
    """A body of which `num_bytes` arrive before the connection is lost; -1: all."""

    def __init__(self, content: bytes, num_bytes: int) -> None:
        self._content, self._num_bytes = content, num_bytes

    def __iter__(self) -> Iterator[bytes]:
        yield self._content if self._num_bytes < 0 else self._content[: self._num_bytes]
        if self._num_bytes >= 0:
            raise httpx.ReadError("reset")


def answering(losses: int) -> Callable[[httpx.Request], httpx.Response]:
    """Answer as the API does, but lose the first connections in the midst of their bodies."""
    left = [losses]

    def answer(request: httpx.Request) -> httpx.Response:
        given = parse_qs(request.url.query.decode())
        if request.url.path.endswith("/errors"):
            start = int(given.get("after", ["0"])[0])
            page = {"data": [json.loads(line) for line in LINES[start : start + 200]]}
            content = json.dumps(page | {"next": str(start + 200) if start < 200 else None}).encode()
        elif request.url.path == "/v1/jobs/j":
            content = b'{"id": "j", "options": {}}'
            return httpx.Response(200, content=content)
        elif given.get("format") == ["ndjson"]:
            start = KEYS.index(given["after"][0]) + 1 if "after" in given else 0
            content = "".join(LINES[start:]).encode()
        else:
            content = PARQUET
        left[0] -= 1
        return httpx.Response(200, stream=Breaking(content, -1 if left[0] < 0 else len(content) // 2))

    return answer


def to_path(fetch: Callable[[Any], object], folder: Path) -> bytes:
    fetch(folder / "out")
    assert [path.name for path in folder.iterdir()] == ["out"]
    return (folder / "out").read_bytes()


def to_file_object(fetch: Callable[[Any], object], folder: Path) -> bytes:
    with (folder / "out").open("w+b") as file:
        file.write(b"before")
        fetch(file)
    return (folder / "out").read_bytes().removeprefix(b"before")


def to_memory(fetch: Callable[[Any], object], folder: Path) -> bytes:
    file = io.BytesIO()
    fetch(file)
    return file.getvalue()


def to_pipe(fetch: Callable[[Any], object], folder: Path) -> bytes:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as file:
        fetch(file)
    with os.fdopen(reading, "rb") as file:
        return file.read()


def to_named_pipe(fetch: Callable[[Any], object], folder: Path) -> bytes:
    os.mkfifo(folder / "out")
    reading = os.open(folder / "out", os.O_RDONLY | os.O_NONBLOCK)
    fetch(folder / "out")
    with os.fdopen(reading, "rb") as file:
        return file.read()


BEGUN: dict[str, Callable[[Client, Any, str], object]] = {
    "export": lambda client, target, format: client.export("j", target, format),
    "export of a collection": lambda client, target, format: client.export_collection("docs", target, format),
    "certificate": lambda client, target, format: client.certificate("j", target),
}


@pytest.mark.parametrize("write", [to_path, to_file_object, to_memory, to_pipe, to_named_pipe])
@pytest.mark.parametrize("format", ["ndjson", "parquet"])
@pytest.mark.parametrize("begun", BEGUN)
def test_a_download_goes_on_after_lost_connections_wherever_it_was_begun(
    begun: str, format: str, write: Callable[..., bytes], tmp_path: Path
) -> None:
    transport = httpx.MockTransport(answering(losses=2))
    with Client(transport=transport, pause=lambda _: None) as client:
        content = write(lambda target: BEGUN[begun](client, target, format), tmp_path)
    assert content == ("".join(LINES).encode() if format == "ndjson" and begun != "certificate" else PARQUET)


READ: dict[str, Callable[[Client, Path], Any]] = {
    "rows": lambda client, _: [row["key"] for row in client.vectors("j")],
    "rows of a collection": lambda client, _: [row["key"] for row in client.collection_rows("docs")],
    "table": lambda client, _: client.vectors("j").to_arrow()["key"].to_pylist(),
    "matrix": lambda client, _: client.collection_rows("docs").to_numpy()[0],
    "errors": lambda client, _: [error["key"] for error in client.errors("j")],
    "npy": lambda client, folder: read_npy(client, folder / "out.npy"),
}


def read_npy(client: Client, path: Path) -> list[str]:
    write_vectors(lambda path, format: client.export("j", path, format), path, "npy")
    np.testing.assert_array_equal(np.load(path), MATRIX)
    return [json.loads(line) for line in Path(f"{path}.keys.txt").read_text().splitlines()]


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("read", READ)
def test_what_is_read_goes_on_too(read: str, losses: int, tmp_path: Path) -> None:
    with Client(transport=httpx.MockTransport(answering(losses)), pause=lambda _: None) as client:
        assert READ[read](client, tmp_path) == KEYS


@pytest.mark.parametrize("write", [to_path, to_pipe])
def test_a_download_that_never_ends_leaves_a_file_as_it_was(
    write: Callable[..., bytes], tmp_path: Path
) -> None:
    (tmp_path / "out").write_bytes(b"before")
    with (
        Client(transport=httpx.MockTransport(answering(losses=1000)), pause=lambda _: None) as client,
        pytest.raises(ApiUnreachable, match="incomplete"),
    ):
        write(lambda target: client.export("j", target, "parquet"), tmp_path)
    assert (tmp_path / "out").read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
