"""The estimated size of rows is the size that Postgres needs for them."""

import pytest
from sqlalchemy import Engine, text

from vectormill.collections.sizing import estimate_row_bytes

NUM_ROWS = 3000


@pytest.mark.parametrize(
    ("column", "dimensions", "bits"),
    [
        ("halfvec", 384, 16),
        ("halfvec", 1024, 16),
        ("vector", 384, 32),
        ("vector", 1024, 32),
        ("bit", 1024, 1),
    ],
)
def test_rows_take_what_was_estimated(engine: Engine, column: str, dimensions: int, bits: int) -> None:
    vector = (
        f"repeat('01', {dimensions // 2})::bit({dimensions})"
        if column == "bit"
        else f"(SELECT array_agg(random())::real[]::vector::{column} FROM generate_series(1, {dimensions}) WHERE i = i)"
    )
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE TABLE sized (key text PRIMARY KEY, content_hash bytea NOT NULL, "
                f"embedding {column}({dimensions}), job_seq bigint NOT NULL)"
            )
        )
        rows = f"SELECT 'key-' || i, sha256(i::text::bytea), {vector}, 7 FROM generate_series(1, {NUM_ROWS}) AS i"
        connection.execute(text(f"INSERT INTO sized {rows}"))
        size: int = connection.scalar(text("SELECT pg_total_relation_size('sized')")) or 0
    assert estimate_row_bytes(dimensions * bits // 8, key_bytes=9) == pytest.approx(size / NUM_ROWS, rel=0.1)
