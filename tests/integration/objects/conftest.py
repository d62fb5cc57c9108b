"""A folder, and a bucket on a double of S3, as places for objects; and an API that reads and writes in a folder."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine

from tests.api_server import SMALL, api_client
from tests.s3_double import Double, s3_double
from vectormill.objects import reference, store


@dataclass(frozen=True)
class Place:
    """A place for objects: its URL, and how tests write, list and read there without the product's code."""

    url: str
    write: Callable[[str, bytes], None]
    names: Callable[[], list[str]]
    read: Callable[[str], bytes]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """A double of S3 that `s3://bucket` leads to."""
    with s3_double() as double:
        monkeypatch.setenv("AWS_ENDPOINT_URL", double.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setattr(store, "STORE_OPTIONS", {"retry_config": {"max_retries": 0}})
        store.open_store.cache_clear()
        yield double
        store.open_store.cache_clear()


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Each store in turn, with no row group kept of an earlier test."""
    monkeypatch.setattr(reference, "ROW_GROUPS", reference.RowGroups())
    if request.param == "file":

        def write(name: str, content: bytes) -> None:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # A new file each time, as a replacement by rename would be.
            path.unlink(missing_ok=True)
            path.write_bytes(content)

        def names() -> list[str]:
            return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

        return Place(f"file://{tmp_path}", write, names, lambda name: (tmp_path / name).read_bytes())
    double: Double = request.getfixturevalue("bucket")
    return Place(
        "s3://bucket/data",
        lambda name, content: double.put(f"bucket/data/{name}", content),
        lambda: sorted(path.removeprefix("bucket/data/") for path in double.objects),
        lambda name: double.objects[f"bucket/data/{name}"],
    )


ROWS = [{"id": f"k{number}", "body": f"text {number}", "page": number} for number in range(6)]


@pytest.fixture
def client(engine: Engine, tmp_path: Path) -> Iterator[httpx.Client]:
    """An API that reads and writes below the test's folder, with three rows in each of two objects."""
    (tmp_path / "in").mkdir()
    for number in (0, 1):
        lines = (json.dumps(row) for row in ROWS[3 * number : 3 * number + 3])
        (tmp_path / "in" / f"{number}.jsonl").write_text("\n".join(lines))
    with api_client(engine, source_root=tmp_path / "in", output_root=tmp_path / "out") as client:
        yield client


def post(client: httpx.Client, tmp_path: Path, *names: str, **body: Any) -> httpx.Response:
    wanted = {"urls": [f"file://{tmp_path}/{name}" for name in names], "text": "body", "key": "id"}
    wanted |= body.pop("input", {})
    return client.post("/v1/jobs", json={"input": wanted, "options": SMALL, **body})
