"""Extraction jobs over HTTP, by RexUniNLU in a real worker's engine: records back, kept through retries and splits."""

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine, text

from tests.api_server import JSON, assert_problem, lines
from tests.chunk_work import encode_all, working
from tests.commands import run
from tests.database import execute
from tests.indexers import KeptSource, indexing
from tests.models import DEVICE
from tests.rexuninlu import GOLDEN, describe, find_case, summarize
from vectormill.client import Client
from vectormill.models.registry import Registry
from vectormill.settings import ModelEntry
from worker.engine.engine import Engine as EncodingEngine
from worker.settings import WorkerSettings

ROOT = Path(__file__).parents[3]
MODEL = "rex"
MODELS = {MODEL: ModelEntry(path=str(GOLDEN / "model"))}
CASE = find_case("ee_sport")
ITEMS = [{"key": f"k{number}", "text": CASE["text"] + " " * number} for number in range(5)]
BLANK = {"key": "blank", "text": " "}
API_SETTINGS = {"models": MODELS, "chunk_max_items": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EncodingEngine]:
    card = Registry(MODELS).card(MODEL, weights=True)
    engine = EncodingEngine(card, DEVICE, WorkerSettings(threads=1), tmp_path_factory.mktemp("cache"))
    engine.start()
    yield engine
    engine.stop()


def submit(client: httpx.Client, items: list[dict[str, Any]], **options: Any) -> httpx.Response:
    body = {"items": items, "model": MODEL, "options": options}
    return client.post("/v1/jobs", content=json.dumps(body), headers=JSON)


def test_records_are_those_of_the_reference_in_every_format(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    answer = submit(client, [*ITEMS, BLANK], extract_schema=json.dumps(CASE["schema"]))
    assert answer.status_code == 202, answer.text
    job = answer.json()
    assert job["options"]["task"] == "extract"
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    path = f"/v1/jobs/{job['id']}/results"
    rows = [json.loads(line) for line in client.get(path).text.splitlines()]
    assert [row["key"] for row in rows] == [item["key"] for item in ITEMS]
    assert describe(rows[0]["output"]) == summarize(CASE["output"])
    table = pq.read_table(io.BytesIO(client.get(path, params={"format": "parquet"}).content)).to_pylist()
    assert [(row["key"], json.loads(row["output"])) for row in table] == [
        (row["key"], row["output"]) for row in rows
    ]
    errors = client.get(f"/v1/jobs/{job['id']}/errors").json()["data"]
    assert [(error["key"], error["code"]) for error in errors] == [("blank", "empty_text")]


def test_records_are_kept_in_a_collection_by_type_and_told_by_sql_items_and_exports(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    body = {
        "items": [*ITEMS, BLANK],
        "model": MODEL,
        "collection": "entities",
        "options": {"extract_schema": json.dumps(CASE["schema"])},
    }
    job = client.post("/v1/jobs", content=json.dumps(body), headers=JSON).json()
    assert set(encode_all(engine, model, MODEL)) == {"done"}
    rows = [json.loads(line) for line in client.get(f"/v1/jobs/{job['id']}/results").text.splitlines()]
    assert [row["key"] for row in rows] == [item["key"] for item in ITEMS]
    assert sorted(describe(rows[0]["output"])) == sorted(summarize(CASE["output"]))

    expected: dict[str, list[Any]] = {}
    for path in rows[0]["output"]:
        expected.setdefault(path[0]["type"], []).append(path)
    assert expected.keys() <= CASE["schema"].keys()
    name, paths = next(iter(expected.items()))
    with engine.connect() as connection:
        statement = text("SELECT output -> CAST(:name AS text) FROM entities WHERE key = 'k0'")
        assert connection.execute(statement, {"name": name}).scalar_one() == paths
    assert client.get("/v1/collections/entities/items/k0").json()["output"] == expected

    export = "/v1/collections/entities/export"
    exported = [json.loads(line) for line in client.get(export).text.splitlines()]
    assert [row["key"] for row in exported] == [item["key"] for item in ITEMS]
    assert exported[0] == {"key": "k0", "output": expected, "metadata": None}
    answer = client.get(export, params={"format": "parquet", "include": "output"})
    table = pq.read_table(io.BytesIO(answer.content)).to_pylist()
    assert [(row["key"], json.loads(row["output"])) for row in table] == [
        (row["key"], row["output"]) for row in exported
    ]
    assert client.get("/v1/collections/entities").json()["kind"] == "records"
    like = client.post("/v1/collections/entities/search", json={"more_like": "k0"})
    assert_problem(like, 409, "wrong-kind", "collection 'entities' contains records")


def test_a_command_fills_a_collection_of_records(
    client: httpx.Client, engine: Engine, model: EncodingEngine, tmp_path: Path
) -> None:
    texts, schema, out = (tmp_path / name for name in ("texts.jsonl", "schema.json", "records.jsonl"))
    texts.write_bytes(lines(ITEMS))
    schema.write_text(json.dumps(CASE["schema"]), encoding="utf-8")
    arguments = (str(texts), "--schema", str(schema), "-o", str(out), "--model", MODEL)
    place = ("--collection", "entities", "--api-url", str(client.base_url))
    with working(engine, model, MODEL):
        assert run("extract", *arguments, *place) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    kept = execute(engine, "SELECT key, output FROM entities ORDER BY key").all()
    assert [row.key for row in kept] == [row["key"] for row in rows]
    for row, listed in zip(kept, rows, strict=True):
        assert [path for name in sorted(row.output) for path in row.output[name]] == listed["output"]
        assert row.output


_, _, SECTION = (
    (ROOT / "docs/RECORDS.md").read_text(encoding="utf-8").partition("## Keep the entities of a table")
)
EXAMPLE = re.findall(r"```sql\n(.*?);\n```", SECTION, re.DOTALL)
QUERY = "SELECT id, body, section FROM news"
SOURCE = {"query": QUERY, "key": "id", "text": "body", "metadata": ["section"]}


def reindex(ours: Client, **options: Any) -> Mapping[str, Any]:
    run = ours.wait_run(ours.reindex("entities", **options)["id"], timeout_seconds=60, poll_seconds=0.05)
    assert (run["state"], run["error"]) == ("completed", None)
    return run


def test_the_documented_table_and_its_entities_are_kept_in_step(
    client: httpx.Client, engine: Engine, model: EncodingEngine
) -> None:
    """As docs/RECORDS.md has it, with a schema of which this model finds something."""
    table, joined, counted, unread = EXAMPLE
    wide = {**CASE["schema"], "机构": None}
    texts = [CASE["text"] + " " * number for number in range(4)]

    def ask(statement: str) -> list[Any]:
        with engine.begin() as connection:
            result = connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
            return list(result) if result.returns_rows else []

    ask(table)
    for number, content in enumerate(texts):
        ask(f"INSERT INTO news VALUES ({number}, '{content}', 'sport')")
    made = client.post(
        "/v1/collections",
        json={
            "name": "entities",
            "model": MODEL,
            "keep_text": True,
            "options": {"extract_schema": json.dumps(CASE["schema"])},
        },
    )
    assert made.status_code == 201, made.text
    source = KeptSource()
    with (
        Client(str(client.base_url)) as ours,
        working(engine, model, MODEL),
        indexing(engine, source, source.open),
    ):
        ours.set_source("entities", "sql", SOURCE)
        assert reindex(ours)["counts"]["num_new"] == 4
        ((output,),) = ask("SELECT output FROM entities WHERE key = '0'")
        paths = [path for name in sorted(output) for path in output[name]]
        expected = sorted(CASE["output"]["items"], key=lambda path: path[0]["type"])
        assert paths == expected
        spans = Counter((path[-1]["type"], path[-1]["span"]) for path in paths)
        found = {(row.type, row.span): row for row in ask(counted)}
        assert {named: found[named].number for named in spans} == {
            named: 4 * number for named, number in spans.items()
        }
        assert next(iter(found.values())).keys == [str(number) for number in range(4)]
        assert ask(joined) == []

        ask("UPDATE news SET section = 'other' WHERE id = 1")
        ask("UPDATE news SET id = 20 WHERE id = 2")
        assert ask(unread) == [(20,)]
        counts = reindex(ours, confirm=True)["counts"]
        assert (counts["num_metadata_only"], counts["num_moved"], counts["num_deleted"]) == (1, 1, 0)
        assert ask(unread) == []
        assert ask("SELECT key, metadata ->> 'section' FROM entities WHERE key = '1'") == [("1", "other")]

        run = reindex(ours, extract_schema=json.dumps(wide))
        assert run["report"]["checking"]["texts"]["num_compared"] == 4
        assert run["report"]["checking"]["recall"] is None
        assert {name for row in ask("SELECT output FROM entities") for name in row.output} <= set(wide)
        assert [row.key for row in ask(joined)] == [
            row.key for row in ask("SELECT key FROM entities WHERE output ? '机构' ORDER BY key")
        ]
        checked = ours.wait_run(ours.check_collection("entities")["id"], timeout_seconds=60)
        assert checked["report"]["checking"]["problems"] == []
