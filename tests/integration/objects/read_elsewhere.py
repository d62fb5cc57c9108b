"""Read rows with another program and print them as JSON, key -> row: `read_elsewhere.py PROGRAM PLACE [NAME]`.

What reads an output by the examples of docs/SCALE.md finds it in the folder `vectors` here; PLACE is then a key of it.

Runs in an environment of its own, without Vectormill and its packages.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from glob import glob
from pathlib import Path
from typing import Any, Final


def find_example(words: str) -> str:
    """Return the block of examples in docs/SCALE.md that has these words; its line, if they end with a dot."""
    page = (Path(__file__).parents[3] / "docs" / "SCALE.md").read_text()
    section = page.partition("## Read by other programs")[2].partition("\n## ")[0]
    block: str
    (block,) = (each for each in re.findall(r"```\w+\n(.*?)```", section, re.DOTALL) if words in each)
    return next(line for line in block.splitlines() if words in line) if words.endswith(".") else block


def read_duckdb(_: str, __: str) -> Iterator[dict[str, Any]]:
    import duckdb

    result = duckdb.execute("SELECT * FROM 'vectors/*.parquet' ORDER BY key")
    names = [column[0] for column in result.description]
    rows = result.fetchall()
    assert duckdb.execute("SELECT * FROM 'vectors/**/*.parquet' ORDER BY key").fetchall() == rows
    yield from (dict(zip(names, row, strict=True)) for row in rows)


def search_duckdb(key: str, _: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that are nearest to a key's."""
    import duckdb

    example = find_example("-- DuckDB").replace("[384]", "[8]").replace("'readme'", "?")
    view, search, _ = example.split(";")
    duckdb.execute(view)
    for found, distance in duckdb.execute(search, [key]).fetchall():
        yield {"key": found, "distance": distance}


def read_polars(_: str, __: str) -> Iterator[dict[str, Any]]:
    import polars

    names: dict[str, Any] = {}
    exec(find_example("import polars"), names)
    frame = polars.scan_parquet("vectors/**/*.parquet").collect()
    assert names["matrix"].shape == (len(frame), len(frame["embedding"][0]))
    assert frame.equals(polars.scan_parquet("vectors/*.parquet").collect())
    yield from frame.iter_rows(named=True)


def import_lancedb(_: str, __: str) -> Iterator[dict[str, Any]]:
    import lancedb
    import pyarrow.dataset

    exec(find_example("import lancedb"), {})
    # A dataset of a folder leaves out what begins with `_`.
    assert pyarrow.dataset.dataset("vectors").count_rows() == 11
    yield from lancedb.connect("lance").open_table("papers").to_arrow().to_pylist()


def read_spark(_: str, __: str) -> Iterator[dict[str, Any]]:
    from pyspark.sql import SparkSession

    options = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "600m",
        "spark.ui.enabled": "false",
    }
    spark = SparkSession.builder.master("local[1]").config(map=options).getOrCreate()
    rows = eval(find_example("spark."), {"spark": spark}).collect()
    assert spark.read.parquet("vectors").count() == len(rows)
    assert spark.read.option("recursiveFileLookup", "true").parquet("vectors").count() == len(rows)
    yield from [row.asDict() for row in rows]
    spark.stop()


def read_ray(_: str, __: str) -> Iterator[dict[str, Any]]:
    import ray

    ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, _node_ip_address="127.0.0.1")
    rows = eval(find_example("ray."), {"ray": ray, "glob": glob}).take_all()
    assert ray.data.read_parquet("vectors").count() == len(rows)
    for row in rows:
        yield {**row, "embedding": list(row["embedding"])}


def read_daft(_: str, __: str) -> Iterator[dict[str, Any]]:
    import daft

    rows = eval(find_example("daft."), {"daft": daft}).to_pylist()
    assert daft.read_parquet("vectors/**/*.parquet").count_rows() == len(rows)
    yield from rows


def read_iceberg_daft(metadata: str, _: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of Iceberg, given the URL of its metadata."""
    import daft
    from pyiceberg.table import StaticTable

    yield from daft.read_iceberg(StaticTable.from_metadata(metadata)).to_pylist()


def read_iceberg_polars(metadata: str, _: str) -> Iterator[dict[str, Any]]:
    import polars
    from pyiceberg.table import StaticTable

    table = StaticTable.from_metadata(metadata)
    yield from polars.scan_iceberg(table, reader_override="native").collect().iter_rows(named=True)


def read_lancedb(uri: str, name: str) -> Iterator[dict[str, Any]]:
    import lancedb

    yield from lancedb.connect(uri).open_table(name).to_arrow().to_pylist()


def create_lancedb(uri: str, name: str) -> Iterator[dict[str, Any]]:
    """Create a table whose vectors have five dimensions."""
    import lancedb
    import pyarrow

    kind = pyarrow.list_(pyarrow.float32(), 5)
    lancedb.connect(uri).create_table(name, schema=pyarrow.schema({"key": "string", "embedding": kind}))
    yield from ()


def read_qdrant(path: str, name: str) -> Iterator[dict[str, Any]]:
    from qdrant_client import QdrantClient

    client = QdrantClient(path=path)
    found, _ = client.scroll(name, limit=1000, with_vectors=True)
    params = client.get_collection(name).config.params.vectors
    for point in found:
        yield {"id": point.id, "embedding": point.vector, "distance": params.distance, **point.payload}
    client.close()


def create_qdrant(path: str, name: str) -> Iterator[dict[str, Any]]:
    """Create a collection whose vectors have five dimensions, and one whose vectors have names."""
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=path)
    params = models.VectorParams(size=5, distance=models.Distance.DOT)
    client.create_collection(name, params)
    client.create_collection(f"{name}-named", {"text": params})
    client.close()
    yield from ()


READERS: Final[dict[str, Callable[[str, str], Iterator[dict[str, Any]]]]] = {
    "duckdb": read_duckdb,
    "search with duckdb": search_duckdb,
    "polars": read_polars,
    "spark": read_spark,
    "ray": read_ray,
    "daft": read_daft,
    "iceberg with daft": read_iceberg_daft,
    "iceberg with polars": read_iceberg_polars,
    "parts into lancedb": import_lancedb,
    "lancedb": read_lancedb,
    "create lancedb": create_lancedb,
    "qdrant": read_qdrant,
    "create qdrant": create_qdrant,
}


def encode_other(value: Any) -> Any:
    """Return bytes as numbers and numbers of numpy as Python's, for JSON."""
    return value.item() if hasattr(value, "item") else list(value)


if __name__ == "__main__":
    program, place, name = (*sys.argv[1:], "")[:3]
    # Content hashes are bytes, which are no JSON, and some numbers of numpy.
    print(json.dumps(list(READERS[program](place, name)), default=encode_other))
