"""A collection's rows exported: whole, in constant memory, in the order of keys, from any key on."""

import io
import json
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import psutil
import pyarrow
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from tests.api_server import api_client, assert_problem, encode_waiting, submit
from tests.database import ask, execute
from tests.http_server import QuietHandler, serving_http
from tests.protocol import SPEC, vector_of
from vectormill.client import Client
from vectormill.collections.collections import find_generation, open_collection
from vectormill.collections.exports import READ_PAGE, Inclusion, compose_statement, read_pages
from vectormill.collections.generation_tables import upsert_rows
from vectormill.db.session import walk_plan
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import Item
from vectormill.vectors.vector_types import make_rows

PATH = "/v1/collections/docs/export"


def fill(engine: Engine, num_rows: int, spec: EncodingSpec = SPEC) -> None:
    """Rows of which every third has metadata, and every fifth a text that is kept."""
    kind = spec.kept_type
    drawn = np.random.default_rng(5).standard_normal((num_rows, spec.dimensions)).astype(np.float32)
    items = [
        Item(f"k{number:06}", b"text %d" % number, b'{"n": %d}' % number if number % 3 == 0 else b"")
        for number in range(num_rows)
    ]
    generation = ask(engine, open_collection, "docs", spec)
    for start in range(0, num_rows, 5000):
        rows = make_rows(drawn[start : start + 5000], kind, None)
        with engine.begin() as connection:
            part = items[start : start + 5000]
            upsert_rows(connection, generation.id, 1, part, rows, spec)
    execute(engine, KEEP_TEXTS.format(attributes=f"vectormill.{generation.table_name}_attributes"))
    execute(engine, "ANALYZE")


KEEP_TEXTS = """
    INSERT INTO {attributes} (key, text, job_seq)
    SELECT key, 'text of ' || key, 1 FROM docs WHERE right(key, 1) IN ('0', '5')
    ON CONFLICT (key) DO UPDATE SET text = excluded.text
"""


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def test_rows_come_in_the_order_of_keys_with_what_is_included(client: httpx.Client, engine: Engine) -> None:
    items = [{"key": key, "text": f"text {key}", "metadata": {"of": key}} for key in ("b", "ä", "a", "c c")]
    submit(client, [*items, {"key": "bare", "text": "bare"}], collection="docs")
    encode_waiting(engine)
    keys = list(execute(engine, "SELECT key FROM docs ORDER BY key").scalars())
    rows = lines(client.get(PATH, params={"include": "vector,metadata,text"}))
    assert [row["key"] for row in rows] == keys
    found = {row["key"]: row for row in rows}
    assert found["ä"]["metadata"] == {"of": "ä"}
    assert found["bare"]["metadata"] is None
    assert found["bare"]["text"] is None
    assert np.abs(np.array(found["b"]["embedding"]) - vector_of(b"text b")).max() < 1e-3
    assert [set(row) for row in lines(client.get(PATH, params={"include": "text"}))] == [{"key", "text"}] * 5
    table = pq.read_table(io.BytesIO(client.get(PATH, params={"format": "parquet"}).content))
    assert table.column_names == ["key", "embedding", "metadata"]
    assert table["key"].to_pylist() == keys
    assert json.loads(table["metadata"].to_pylist()[keys.index("ä")]) == {"of": "ä"}
    stored = np.array(table["embedding"].to_pylist(), dtype=np.float16)
    assert np.array_equal(stored, np.array([row["embedding"] for row in rows], dtype=np.float16))


def test_an_empty_collection_is_exported_as_no_rows(client: httpx.Client) -> None:
    assert client.post("/v1/collections", json={"name": "docs"}).status_code == 201
    assert client.get(PATH).content == b""
    assert pq.read_table(io.BytesIO(client.get(PATH, params={"format": "parquet"}).content)).num_rows == 0


@pytest.mark.parametrize("format", ["ndjson", "parquet"])
def test_twenty_thousand_rows_are_exported_in_constant_memory(engine: Engine, format: str) -> None:
    wide = EncodingSpec("fake", "1", "mean", True, 256, "", 64)
    fill(engine, 20_000, wide)
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())  # as the API does
    with api_client(engine) as client:
        params = {"format": format, "include": "vector,metadata,text"}
        client.get(PATH, params={**params, "limit": 4000})  # what is loaded and kept once
        process = psutil.Process()
        before, peak, num_bytes = process.memory_info().rss, 0, 0
        with client.stream("GET", PATH, params=params) as answer:
            for part in answer.iter_bytes(1 << 20):
                num_bytes += len(part)
                peak = max(peak, process.memory_info().rss)
    assert num_bytes > 20_000 * 256 * (3 if format == "ndjson" else 2)
    assert peak - before < 24 << 20


def test_an_export_that_goes_on_in_the_middle_equals_the_whole(client: httpx.Client, engine: Engine) -> None:
    fill(engine, 3000)
    params: dict[str, Any] = {"include": "vector,metadata,text"}
    whole = client.get(PATH, params=params).text
    text_of_parts, after = "", ""
    for _ in range(4):
        part = client.get(PATH, params={**params, "limit": 800, "after": after}).text
        text_of_parts += part
        after = json.loads(part.splitlines()[-1])["key"]
    assert text_of_parts == whole
    assert client.get(PATH, params={**params, "after": after}).text == ""
    assert len(whole.splitlines()) == 3000


def test_long_texts_make_a_page_end_early(engine: Engine) -> None:
    fill(engine, 50)
    generation = ask(engine, find_generation, "docs")
    execute(engine, f"UPDATE vectormill.{generation.table_name}_attributes SET text = repeat('ab ', 200000)")
    pages = list(read_pages(engine, generation, Inclusion(text=True)))
    assert [key for page in pages for key in page.keys] == [f"k{number:06}" for number in range(50)]
    assert len(pages) > 10


def test_an_export_is_pinned_to_the_generation_that_it_began_with(
    client: httpx.Client, engine: Engine
) -> None:
    fill(engine, 100)
    answer = client.get(PATH, params={"limit": 50})
    generation = answer.headers["Vectormill-Generation"]
    execute(engine, "UPDATE vectormill.generations SET state = 'retired', retired_at = now()")
    execute(
        engine,
        "INSERT INTO vectormill.generations (collection_id, spec, fingerprint, state)"
        " SELECT collection_id, spec, 'other', 'live' FROM vectormill.generations",
    )
    rest = client.get(PATH, params={"after": "k000049", "generation": generation})
    assert len(lines(rest)) == 50
    assert rest.headers["Vectormill-Generation"] == generation
    execute(engine, "UPDATE vectormill.generations SET state = 'pruned' WHERE id = :id", id=int(generation))
    assert_problem(
        client.get(PATH, params={"generation": generation}), 409, "conflict", "start the export again"
    )


def test_a_page_is_found_by_the_key_behind_which_it_begins(engine: Engine) -> None:
    fill(engine, 20_000)
    with engine.connect() as connection:
        generation = find_generation(connection, "docs")
        driver = connection.connection.driver_connection
        assert driver is not None
        statement = compose_statement(generation, Inclusion(text=True)).as_string(driver)
        (plan,) = driver.execute(
            "EXPLAIN (FORMAT JSON) " + statement, {"after": "k010000", "limit": 500, "most_bytes": 1 << 20}
        ).fetchone()[0]
    nodes = list(walk_plan(plan["Plan"]))
    assert not [node for node in nodes if node["Node Type"] == "Seq Scan"], READ_PAGE
    scans = [node["Relation Name"] for node in nodes if node["Node Type"] == "Index Scan"]
    assert sorted(scans) == [generation.table_name, f"{generation.table_name}_attributes"]


def test_an_export_that_is_no_export_is_refused(client: httpx.Client) -> None:
    cases: tuple[dict[str, Any], ...] = (
        {"after": "a\0b"},
        {"include": "vector,keys"},
        {"include": ""},
        {"format": "npy"},
        {"limit": 0},
        {"generation": 0},
    )
    for params in cases:
        assert_problem(client.get(PATH, params=params), 422, "invalid-request")


class BreakingProxy(QuietHandler):
    """Hands requests on, and ends every first answers' connection in the middle of a line."""

    target = ""
    cuts: ClassVar[list[int]] = []

    def answer(self) -> None:
        found = httpx.get(self.target + self.path, trust_env=False)
        body = found.content
        self.send_response(found.status_code)
        self.send_header("Vectormill-Generation", found.headers.get("Vectormill-Generation", ""))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)
        self.close_connection = True


def test_the_client_goes_on_after_lost_connections_and_the_file_is_whole(
    client: httpx.Client, engine: Engine, tmp_path: Path
) -> None:
    fill(engine, 500)
    BreakingProxy.target, BreakingProxy.cuts = str(client.base_url).rstrip("/"), [0, 5_000, 9_999, 20_001]
    with serving_http(BreakingProxy) as url, Client(url, pause=lambda _: None) as ours:
        ours.export_collection("docs", tmp_path / "docs.jsonl", include=("vector", "metadata", "text"))
        BreakingProxy.cuts = [3_000]
        ours.export_collection("docs", tmp_path / "docs.parquet", "parquet")
        BreakingProxy.cuts = [4_000, 0, 0, 0, 0, 0, 0, 0]
        with pytest.raises(Exception, match="broke"):
            list(ours.collection_rows("docs"))
    whole = client.get(PATH, params={"include": "vector,metadata,text"}).content
    assert (tmp_path / "docs.jsonl").read_bytes() == whole
    assert pq.read_table(tmp_path / "docs.parquet").num_rows == 500
