from typing import Any

import pytest

from vectormill.collections.collection import AUTO, HNSW, NO_INDEX
from vectormill.collections.index_plan import (
    MIB,
    IndexPlan,
    IndexSettings,
    ServerCapacity,
    plan_index,
    plan_sparse_index,
)
from vectormill.domain.errors import InvalidOption
from vectormill.domain.vector_type import VECTOR_TYPES

GIB = 1024 * MIB
BY_ITSELF = IndexSettings()
ROOM = ServerCapacity(16 * GIB, "its /proc/meminfo", 8, 64 * MIB, 2, 8)


def plan(
    num_rows: int = 100_000,
    dimensions: int = 384,
    vector_type: str = "float16",
    chosen: IndexSettings = BY_ITSELF,
    capacity: ServerCapacity = ROOM,
    *,
    is_live: bool = False,
) -> IndexPlan:
    return plan_index(
        num_rows,
        dimensions,
        VECTOR_TYPES[vector_type],
        chosen,
        capacity,
        is_live=is_live,
        least_rows=10_000,
        memory_share=0.25,
    )


def test_the_operator_class_is_that_of_the_search() -> None:
    cases: list[tuple[str, int, str | None]] = [
        ("float16", 4000, "halfvec_cosine_ops"),
        ("float32", 2000, "vector_cosine_ops"),
        ("binary", 64_000, "bit_hamming_ops"),
        ("float16", 4001, None),  # pgvector's own limits
        ("float32", 2001, None),
        ("int8", 384, None),  # searched by an expression
    ]
    for vector_type, dimensions, expected in cases:
        made = plan(dimensions=dimensions, vector_type=vector_type)
        assert made.operator_class == expected
        assert made.is_wanted == (expected is not None)
        assert made.reasons


def test_the_policy_says_from_how_many_rows_on_there_is_an_index() -> None:
    cases: list[tuple[str, int, bool]] = [
        (AUTO, 9_999, False),
        (AUTO, 10_000, True),
        (HNSW, 0, True),
        (NO_INDEX, 10_000_000, False),
    ]
    for policy, num_rows, is_wanted in cases:
        assert plan(num_rows, chosen=IndexSettings(policy)).is_wanted == is_wanted


def test_sparse_weights_follow_the_same_policy_and_take_memory_by_their_bytes() -> None:
    limits: dict[str, Any] = {"is_live": False, "least_rows": 10_000, "memory_share": 0.25}
    cases: list[tuple[str, int, str | None]] = [
        (AUTO, 9_999, None),
        (AUTO, 10_000, "sparsevec_ip_ops"),
        (NO_INDEX, 10_000, None),
    ]
    for policy, num_rows, expected in cases:
        made = plan_sparse_index(num_rows, 1000.0, IndexSettings(policy), ROOM, **limits)
        assert made.operator_class == expected
    small, large = (plan_sparse_index(100_000, size, BY_ITSELF, ROOM, **limits) for size in (800.0, 1600.0))
    assert large.graph_bytes - small.graph_bytes == 100_000 * 800


def test_the_shape_comes_from_the_rows_unless_it_is_asked_for() -> None:
    cases: list[tuple[int, IndexSettings, tuple[int, int]]] = [
        (100_000, IndexSettings(), (16, 64)),
        (1_000_000, IndexSettings(), (16, 128)),
        (20_000_000, IndexSettings(), (24, 128)),
        (100_000, IndexSettings(m=48), (48, 96)),  # pgvector refuses less than twice m
        (100_000, IndexSettings(ef_construction=20), (10, 20)),
        (100_000, IndexSettings(m=8, ef_construction=200), (8, 200)),
    ]
    for num_rows, chosen, shape in cases:
        made = plan(num_rows, chosen=chosen)
        assert (made.m, made.ef_construction) == shape


def test_a_graph_that_fits_gets_what_it_needs_and_no_more() -> None:
    made = plan()
    # Measured: pgvector 0.8.6 held 2,824 halfvecs of 384 dimensions in 4 MiB, and 2,105 with m = 32.
    assert made.graph_bytes / 100_000 == pytest.approx(4 * MIB / 2824, rel=0.03)
    assert plan(chosen=IndexSettings(m=32)).graph_bytes / 100_000 == pytest.approx(4 * MIB / 2105, rel=0.03)
    assert made.graph_bytes < made.memory_bytes < 1.2 * made.graph_bytes + 10 * MIB
    # maintenance_work_mem is whole kilobytes, and the graph seldom is
    for num_rows in range(100_000, 100_020):
        assert any(" and fits: " in reason for reason in plan(num_rows).reasons)


def test_a_graph_that_does_not_fit_gets_the_share_and_the_reason_says_what_it_costs() -> None:
    cases: list[tuple[int, int | None, int]] = [
        (4 * GIB, None, GIB),  # a quarter of what is free
        (128 * MIB, None, 64 * MIB),  # the server's own setting is what its operator allows anyway
        (128 * MIB, 3 * GIB, 3 * GIB),
    ]
    for free_bytes, asked, expected in cases:
        capacity = ServerCapacity(free_bytes, "a guess", 8, 64 * MIB, 2, 8)
        made = plan(5_000_000, capacity=capacity, chosen=IndexSettings(memory_bytes=asked))
        assert made.memory_bytes == expected
        assert any("many times slower" in reason for reason in made.reasons)


def test_the_build_takes_the_cores_that_searches_leave() -> None:
    cases: list[tuple[int | None, bool, IndexSettings, int]] = [
        (8, False, IndexSettings(), 7),  # beside the process that leads
        (8, True, IndexSettings(), 5),
        (2, True, IndexSettings(), 1),
        (1, False, IndexSettings(), 0),
        (64, False, IndexSettings(), 8),  # Postgres starts no more
        (None, False, IndexSettings(), 2),
        (8, False, IndexSettings(workers=3), 3),
        (8, False, IndexSettings(memory_bytes=100 * MIB), 2),  # 32 MiB for each process
    ]
    for num_cores, is_live, chosen, expected in cases:
        capacity = ServerCapacity(64 * GIB, "a guess", num_cores, 64 * MIB, 2, 8)
        assert plan(1_000_000, chosen=chosen, capacity=capacity, is_live=is_live).workers == expected


def test_what_pgvector_would_refuse_is_refused_before_it() -> None:
    cases: list[tuple[dict[str, int], str]] = [
        ({"m": 1}, "m is 1"),
        ({"m": 101}, "m is 101"),
        ({"ef_construction": 1001}, "ef_construction"),
        ({"m": 40, "ef_construction": 64}, "twice m"),
        ({"workers": -1}, "workers"),
        ({"memory_bytes": 10}, "memory_bytes"),
    ]
    for options, said in cases:
        with pytest.raises(InvalidOption, match=said):
            IndexSettings.from_options(AUTO, options)
