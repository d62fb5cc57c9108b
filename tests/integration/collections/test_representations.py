"""Collections and jobs with dense, sparse and multi-vector outputs. Real Postgres, no model."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from sqlalchemy import Engine

from api.streams.row_streams import start_reading, write_job
from tests.building import build, encode_all, swap
from tests.database import ask, execute
from tests.integration.collections.test_kinds import KEEPING, fill, select
from tests.kinds import MANY, representations_of
from tests.outputs import finish_all
from tests.protocol import SPEC, claim_next, make_items, submit
from vectormill.collections.collections import create_collection, find_generation
from vectormill.collections.exports import Inclusion, read_pages
from vectormill.collections.items import find_item
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.task import OUTPUTS
from vectormill.jobs.chunk import ChunkOutcome, Claim
from vectormill.jobs.chunks import split_chunk
from vectormill.jobs.completion import complete_chunk
from vectormill.jobs.export import read_results
from vectormill.jobs.item import (
    ENCODING_FAILED,
    NON_FINITE_VECTOR,
    TOO_MANY_WEIGHTS,
    ZERO_VECTOR,
    Item,
    ItemFailure,
)
from vectormill.jobs.jobs import list_item_errors
from vectormill.objects.manifest import read_table
from vectormill.ragged import Ragged
from vectormill.vectors.representations import Representations

SPARSE_ONLY = replace(MANY, outputs="sparse", dimensions=0, normalize=False, token_dimensions=0)
VECTORS_ONLY = replace(MANY, outputs="multi_vector", dimensions=0, normalize=False, sparse_dimensions=0)
SPECS = pytest.mark.parametrize(
    "spec",
    [MANY, SPARSE_ONLY, VECTORS_ONLY, replace(MANY, vector_type="float32")],
    ids=["all", "sparse", "multi", "float32"],
)


def commit(
    engine: Engine,
    claimed: Claim,
    items: Sequence[Item],
    rows: Sequence[Representations],
    failed: Sequence[int] = (),
) -> None:

    results = Ragged.from_rows([np.frombuffer(row.pack(), np.uint8) for row in rows], np.uint8)
    failures = {place: ItemFailure(ENCODING_FAILED, "by this test") for place in failed}
    outcome = ChunkOutcome(failures, 10, 10, [], item_tokens=[10] * len(items))
    ask(engine, complete_chunk, claimed, items, np.arange(len(items)), results, outcome)


def assert_same(packed: bytes | None, item: Item, spec: EncodingSpec) -> None:
    assert packed == representations_of(item.text, spec).pack()


@SPECS
@pytest.mark.parametrize("collection", [None, "docs"])
def test_a_job_gives_back_each_output_in_its_own_order(
    engine: Engine, spec: EncodingSpec, collection: str | None
) -> None:
    items = make_items(10)[::-1]
    job = submit(engine, items, spec=spec, collection=collection)
    encode_all(engine)
    found = [
        pair for block in read_results(engine, job.id) for pair in zip(block.keys, block.results, strict=True)
    ]
    assert [key for key, _ in found] == [item.key for item in items]
    for (_, packed), item in zip(found, items, strict=True):
        assert_same(packed, item, spec)


@SPECS
def test_each_output_is_a_column_of_the_view(engine: Engine, spec: EncodingSpec) -> None:
    ask(engine, create_collection, "docs", spec, KEEPING, 100)
    item = make_items(1)[0]
    fill(engine, spec, item)
    expected = representations_of(item.text, spec)
    if spec.has_output("dense"):
        ((dense,),) = select(engine, "SELECT CAST(embedding AS text) FROM docs")
        assert msgspec.json.decode(dense) == expected.dense.tolist()
    if spec.has_output("sparse"):
        ((product,),) = select(engine, "SELECT -(sparse <#> sparse) FROM docs")
        assert product == pytest.approx(float((expected.weights**2).sum()))
    if spec.has_output("multi_vector"):
        vectors = select(engine, "SELECT CAST(unnest(multi_vector) AS text) FROM docs")
        assert [msgspec.json.decode(vector) for (vector,) in vectors] == expected.vectors.tolist()
    columns = select(engine, "SELECT column_name FROM information_schema.columns WHERE table_name = 'docs'")
    assert {"embedding", "sparse", "multi_vector"} & {name for (name,) in columns} == {
        column
        for column, name in zip(("embedding", "sparse", "multi_vector"), OUTPUTS, strict=True)
        if spec.has_output(name)
    }


@SPECS
def test_exports_and_items_have_each_output(
    engine: Engine, spec: EncodingSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vectormill.collections.exports.PAGE_BYTES", 200)  # a page of few rows
    ask(engine, create_collection, "docs", spec, KEEPING, 100)
    items = make_items(9)
    fill(engine, spec, *items)
    pages = list(read_pages(engine, ask(engine, find_generation, "docs"), Inclusion()))
    assert len(pages) > 1
    rows = [
        pair
        for page in pages
        for pair in zip(page.keys, page.results if page.results is not None else [], strict=True)
    ]
    assert [key for key, _ in rows] == [item.key for item in items]
    for (_, packed), item in zip(rows, items, strict=True):
        assert_same(packed, item, spec)
    whole, bare = (
        ask(engine, find_item, "docs", "k3", has_vector=has_vector) for has_vector in (True, False)
    )
    assert whole.results is not None
    assert_same(whole.results[0], items[3], spec)
    assert bare.results is None


@SPECS
def test_the_formats_of_a_job_say_the_same(engine: Engine, spec: EncodingSpec) -> None:
    items = [*make_items(5), Item('quoted "é"', b"more")]
    job = submit(engine, items, spec=spec)
    encode_all(engine)

    def export(name: str) -> bytes:
        return b"".join(write_job(job, name, start_reading(read_results(engine, job.id))))

    lines = [msgspec.json.decode(line) for line in export("ndjson").splitlines()]
    table = pq.read_table(io.BytesIO(export("parquet"))).to_pylist()
    assert [line["key"] for line in lines] == [row["key"] for row in table] == [item.key for item in items]
    for line, row, item in zip(lines, table, items, strict=True):
        expected = representations_of(item.text, spec)
        wanted = {
            "embedding": expected.dense.tolist(),
            "sparse": {"indices": expected.indices.tolist(), "weights": expected.weights.tolist()},
            "multi_vector": expected.vectors.tolist(),
        }
        names = [name for name, output in zip(wanted, OUTPUTS, strict=True) if spec.has_output(output)]
        assert line == {"key": item.key} | {name: wanted[name] for name in names}
        pairs = zip(expected.indices.tolist(), expected.weights.tolist(), strict=True)
        wanted["sparse"] = [{"index": index, "weight": weight} for index, weight in pairs]
        assert row == {"key": item.key} | {name: wanted[name] for name in names}


def test_parts_in_object_storage_have_each_output(engine: Engine, tmp_path: Path) -> None:
    items = make_items(5)
    submit(engine, items, spec=MANY, output_url=f"file://{tmp_path}/out")
    finish_all(engine)
    for row, item in zip(read_table(f"file://{tmp_path}/out").to_pylist(), items, strict=True):
        assert np.array_equal(row["multi_vector"], representations_of(item.text).vectors)


def test_a_chunk_that_is_split_keeps_what_its_items_have(engine: Engine) -> None:
    items = make_items(4)
    job = submit(engine, items, spec=MANY)
    first = claim_next(engine)
    commit(engine, first, items, [representations_of(item.text) for item in items], failed=[2])
    execute(engine, "UPDATE vectormill.chunks SET state = 'pending', only_items = '{2}'")
    execute(engine, "UPDATE vectormill.jobs SET state = 'running', num_failed = 0, num_open_chunks = 1")
    again = claim_next(engine)
    ask(engine, split_chunk, again, "it ended its worker")
    (block, *more) = read_results(engine, job.id)
    records = [*block.results, *(record for other in more for record in other.results)]
    assert [record is None for record in records] == [False, False, True, False]
    assert_same(records[3], items[3], MANY)


def test_what_a_column_cannot_hold_fails_its_item_alone(engine: Engine) -> None:
    spec = replace(MANY, sparse_dimensions=20_000)
    items = make_items(4)
    job = submit(engine, items, spec=spec, collection="docs")
    large = replace(representations_of(items[0].text), dense=np.full(8, 1e6, np.float32))
    many = replace(
        representations_of(items[1].text),
        indices=np.arange(16_001, dtype=np.uint32),
        weights=np.ones(16_001, np.float32),
    )
    tiny = replace(large, dense=np.full(8, 1e-9, np.float32))
    commit(engine, claim_next(engine), items, [large, many, representations_of(items[2].text), tiny])
    errors = ask(engine, list_item_errors, job.id, after=None, limit=10)
    assert {error.key: error.code for error in errors} == {
        "k0": NON_FINITE_VECTOR, "k1": TOO_MANY_WEIGHTS, "k3": ZERO_VECTOR
    }  # fmt: skip
    assert select(engine, "SELECT key FROM docs") == [("k2",)]


def test_a_collection_gets_more_outputs_by_a_build(engine: Engine) -> None:
    dense = replace(SPEC, pooling="cls")
    ask(engine, create_collection, "docs", dense, KEEPING, 100)
    fill(engine, dense, *make_items(3))
    for spec in (MANY, SPARSE_ONLY, dense):
        building = build(engine, spec)
        swap(engine, building)
        shown = select(engine, "SELECT column_name FROM information_schema.columns WHERE table_name = 'docs'")
        assert ({("sparse",)} <= set(shown)) == spec.has_output("sparse")
        assert ({("embedding",)} <= set(shown)) == spec.has_output("dense")
