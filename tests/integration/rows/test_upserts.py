"""What a chunk's arrays say is what the rows of its collection hold, whatever keys, texts and numbers there are."""

import json
from dataclasses import replace

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, text

from tests.database import ask
from tests.protocol import SPEC
from vectormill.collections import generation_tables
from vectormill.collections.collections import open_collection
from vectormill.collections.generation_tables import attributes_name, table_name, upsert_rows
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.jobs.item import Item, Items
from vectormill.vectors.quantization import measure_ranges
from vectormill.vectors.vector_types import Rows, make_rows, read_columns

DIMENSIONS = 13
ODD_KEYS = [
    "", " ", "é", "e\u0301", "\U0001f600", "a\nb\tc", '{"quoted","array"}', "NULL", "\\x00", "k" * 2048,
]  # fmt: skip
ITEMS = [
    Item(key, f"text of {key} \U0001f600".encode(), f'{{"place": {place}}}'.encode() if place % 2 else b"")
    for place, key in enumerate(ODD_KEYS)
]
VECTORS = np.random.default_rng(3).standard_normal((len(ITEMS), DIMENSIONS)).astype(np.float32)


def write(
    engine: Engine, vector_type: str, items: list[Item], vectors: np.ndarray, *, job_seq: int, keep_text: bool
) -> int:
    kind = VECTOR_TYPES[vector_type]
    spec = replace(SPEC, dimensions=DIMENSIONS, vector_type=vector_type)
    with engine.begin() as connection:
        generation = open_collection(connection, "docs", spec)
        rows = make_rows(vectors, kind, measure_ranges(VECTORS))
        upsert_rows(connection, generation.id, job_seq, items, rows, spec, keep_text=keep_text)
    return generation.id


def read(connection: Connection, generation_id: int, vector_type: str) -> dict[str, tuple[object, ...]]:
    kind = VECTOR_TYPES[vector_type]
    found = connection.execute(
        text(f"""
            SELECT live.key, live.content_hash, live.job_seq, kept.metadata, kept.metadata_hash, kept.text,
                   {kind.column}_send(live.embedding) AS embedding
              FROM vectormill.{table_name(generation_id)} AS live
              LEFT JOIN vectormill.{attributes_name(generation_id)} AS kept ON kept.key = live.key
        """)
    )
    return {row.key: (*tuple(row)[1:-1], _numbers(row.embedding, vector_type)) for row in found}


def _numbers(wire: bytes, vector_type: str) -> list[float]:
    row: Rows = read_columns(bytes(wire), VECTOR_TYPES[vector_type], DIMENSIONS)[0]
    numbers: list[float] = row.tolist()
    return numbers


def expect(
    items: list[Item], vectors: np.ndarray, vector_type: str, job_seq: int, *, keep_text: bool
) -> dict[str, tuple[object, ...]]:
    rows = make_rows(vectors, VECTOR_TYPES[vector_type], measure_ranges(VECTORS))
    return {
        item.key: (
            item.content_hash(),
            job_seq,
            json.loads(item.metadata) if item.metadata else None,
            Items.of([item]).metadata_hashes()[0] or None,
            item.text.decode() if keep_text else None,
            row.tolist(),
        )
        for item, row in zip(items, rows, strict=True)
    }


@pytest.mark.parametrize("keep_text", [False, True])
@pytest.mark.parametrize("vector_type", VECTOR_TYPES)
def test_rows_hold_what_their_items_say(engine: Engine, vector_type: str, keep_text: bool) -> None:
    generation_id = write(engine, vector_type, ITEMS, VECTORS, job_seq=5, keep_text=keep_text)
    assert ask(engine, read, generation_id, vector_type) == expect(
        ITEMS, VECTORS, vector_type, 5, keep_text=keep_text
    )


def test_a_chunk_that_is_written_in_parts_leaves_the_same_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, "float16", ITEMS[:4], VECTORS[4:8], job_seq=9, keep_text=True)
    monkeypatch.setattr(
        generation_tables, "MAX_ARRAY_BYTES", 3 * VECTOR_TYPES["float16"].column_bytes(DIMENSIONS)
    )
    generation_id = write(engine, "float16", ITEMS, VECTORS, job_seq=5, keep_text=True)
    with engine.connect() as connection:
        newer = expect(ITEMS[:4], VECTORS[4:8], "float16", 9, keep_text=True)
        older = expect(ITEMS, VECTORS, "float16", 5, keep_text=True)
        assert read(connection, generation_id, "float16") == older | newer


@pytest.mark.parametrize("part_rows", [3, 100])
@pytest.mark.parametrize("vector_type", VECTOR_TYPES)
def test_of_items_with_one_key_the_last_is_written(
    engine: Engine, vector_type: str, part_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = VECTOR_TYPES[vector_type].column_bytes(DIMENSIONS)
    monkeypatch.setattr(generation_tables, "MAX_ARRAY_BYTES", part_rows * size)
    items = [replace(ITEMS[place % 4], text=b"text %d" % place) for place in range(len(ITEMS))]
    generation_id = write(engine, vector_type, items, VECTORS, job_seq=5, keep_text=True)
    assert ask(engine, read, generation_id, vector_type) == expect(
        items, VECTORS, vector_type, 5, keep_text=True
    )
