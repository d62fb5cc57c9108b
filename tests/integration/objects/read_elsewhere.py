"""Read rows with another program and print them as JSON, key -> row: `read_elsewhere.py PROGRAM PLACE [NAME]`.

Runs in an environment of its own, without Vectormill and its packages.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final


def read_duckdb(folder: str, _: str) -> Iterator[dict[str, Any]]:
    import duckdb

    found = duckdb.execute("SELECT * FROM read_parquet(?)", [f"{folder}/part-*.parquet"])
    names = [column[0] for column in found.description]
    yield from (dict(zip(names, row, strict=True)) for row in found.fetchall())


def search_duckdb(folder: str, _: str) -> Iterator[dict[str, Any]]:
    """Yield the rows by their distance from the first one, as docs/SCALE.md shows it."""
    import duckdb

    columns = "key, embedding::FLOAT[8] AS embedding"
    duckdb.execute(f"CREATE VIEW vectors AS SELECT {columns} FROM '{folder}/part-*.parquet'")
    yield from (
        {"key": key, "distance": distance}
        for key, distance in duckdb.execute(
            "SELECT key, array_cosine_distance(embedding, (SELECT embedding FROM vectors ORDER BY key LIMIT 1)) "
            "AS distance FROM vectors ORDER BY distance"
        ).fetchall()
    )


def read_polars(folder: str, _: str) -> Iterator[dict[str, Any]]:
    import polars

    yield from polars.scan_parquet(f"{folder}/part-*.parquet").collect().iter_rows(named=True)


def import_lancedb(folder: str, _: str) -> Iterator[dict[str, Any]]:
    """Create a table from a dataset of the parts, as docs/SCALE.md shows it."""
    import tempfile
    from pathlib import Path

    import lancedb
    import pyarrow.dataset

    parts = pyarrow.dataset.dataset([str(path) for path in sorted(Path(folder).glob("part-*.parquet"))])
    with tempfile.TemporaryDirectory() as place:
        table = lancedb.connect(place).create_table("vectors", parts.to_batches(), schema=parts.schema)
        yield from table.to_arrow().to_pylist()


def read_spark(folder: str, _: str) -> Iterator[dict[str, Any]]:
    from pyspark.sql import SparkSession

    options = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "600m",
        "spark.ui.enabled": "false",
    }
    spark = SparkSession.builder.master("local[1]").config(map=options).getOrCreate()
    yield from [row.asDict() for row in spark.read.parquet(f"{folder}/part-*.parquet").collect()]
    spark.stop()


def read_ray(folder: str, _: str) -> Iterator[dict[str, Any]]:
    from pathlib import Path

    import ray

    ray.init(num_cpus=1, object_store_memory=100 << 20, include_dashboard=False, _node_ip_address="127.0.0.1")
    parts = sorted(str(path) for path in Path(folder).glob("part-*.parquet"))
    for row in ray.data.read_parquet(parts).take_all():
        yield {**row, "embedding": list(row["embedding"])}


def read_daft(folder: str, _: str) -> Iterator[dict[str, Any]]:
    import daft

    yield from daft.read_parquet(f"{folder}/part-*.parquet").to_pylist()


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
