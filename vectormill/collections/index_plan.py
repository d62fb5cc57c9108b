"""Index plan: decide if a generation gets an HNSW index, its shape, and how much memory and cores its build takes.

The functions are pure and use no SQL: from the number of rows, the settings and the server's capacity they make a plan
with reasons. Limits and defaults are those of pgvector 0.8 (README, "HNSW"); the size of the graph was measured with
it: docs/INDEXES.md."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self, TypedDict, Unpack

from vectormill.collections.collection import AUTO, NO_INDEX
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.vector_type import COSINE, DEFAULT_TYPE, VectorType

KIB: Final = 1 << 10  # the unit of maintenance_work_mem
MIB: Final = 1 << 20

LEAST_M: Final = 2
LEAST_EF_CONSTRUCTION: Final = 4
MOST_M: Final = 100
MOST_EF_CONSTRUCTION: Final = 1000
MOST_WORKERS: Final = 31
# The smallest and the largest value that Postgres accepts as maintenance_work_mem.
LEAST_MEMORY_BYTES: Final = MIB
MOST_MEMORY_BYTES: Final = (1 << 31) * 1024 - 1024

# The options by which an owner chooses the shape and the resources of an index, with the least and the largest value.
SHAPE_OPTIONS: Final[Mapping[str, tuple[int, int]]] = {
    "m": (LEAST_M, MOST_M),
    "ef_construction": (LEAST_EF_CONSTRUCTION, MOST_EF_CONSTRUCTION),
    "workers": (0, MOST_WORKERS),
    "memory_bytes": (LEAST_MEMORY_BYTES, MOST_MEMORY_BYTES),
}

# The shape of the graph by number of rows: (from so many rows on, m, ef_construction). The first is pgvector's default,
# with which a search with ef_search = 100 has a recall@10 of 0.98 and more on real texts; larger graphs need a larger
# ef_construction for the same recall.
SHAPES: Final = ((0, 16, 64), (1_000_000, 16, 128), (10_000_000, 24, 128))

# In a graph that is built in memory, an element takes its vector, 2 × m neighbours of 16 bytes, and these bytes, which
# include its neighbours on upper layers. Measured with 8 and 384 dimensions, without the vector: 706 to 709 bytes with
# m = 16, and 1,216 with m = 32.
ELEMENT_BYTES: Final = 208
# A parallel build keeps this memory for other things, and another tenth for rows that are added during the build.
SPARE_BYTES: Final = 8 * MIB
SPARE_SHARE: Final = 0.1
# Postgres starts a parallel worker only if each has at least this much memory (plan_create_index_workers).
WORKER_BYTES: Final = 32 * MIB


# Codes are restored to floats first, since every dimension has its own scale and offset. All others are compared by the
# bare column, so that an index can serve.
COLUMN: Final = "vectors.embedding"
RESTORED: Final = (
    f"(CAST({COLUMN} AS {DEFAULT_TYPE.column}) * CAST(:steps AS vector) + CAST(:offsets AS vector))"
)


@dataclass(frozen=True, slots=True)
class VectorComparison:
    """How the dense vectors of a collection are compared in SQL: the SQL of a row's vector, with a query of a type.

    `score` is the SQL of the score by the distance.
    """

    column: str
    operator: str
    query_type: str
    score: str

    def write(self, query: str) -> str:
        """Return the SQL of the distance between a row of `vectors` and the SQL of a query."""
        return f"{self.column} {self.operator} {query}"


def choose_comparison(spec: EncodingSpec) -> VectorComparison:
    """Return how the dense vectors of a collection of this spec are compared."""
    kind, distance = spec.kept_type, spec.kept_type.distances[spec.similarity]
    query_type = f"{kind.column}({spec.dimensions})" if kind.is_packed else kind.query.column
    column = RESTORED if kind.has_ranges else COLUMN
    return VectorComparison(
        column, distance.operator, query_type, distance.score.format(dimensions=spec.dimensions)
    )


# Sparse weights are compared by their inner product. pgvector refuses to index more weights of a row than these
# (HNSW_MAX_NNZ in src/hnsw.h).
SPARSE_CLASS: Final = "sparsevec_ip_ops"
MOST_INDEXED_WEIGHTS: Final = 1000
# The SQL of the bytes of a row's weights. pgvector has no function that counts them; their binary form has 12 bytes,
# and 8 for each (sparsevec_send in src/sparsevec.c).
WEIGHTS_BYTES: Final = "octet_length(sparsevec_send(sparse))"
IS_INDEXED: Final = f"{WEIGHTS_BYTES} <= {12 + 8 * MOST_INDEXED_WEIGHTS}"
IS_TOO_LONG: Final = f"{WEIGHTS_BYTES} > {12 + 8 * MOST_INDEXED_WEIGHTS}"


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The index settings that a collection's owner has chosen; for None the plan chooses."""

    policy: str = AUTO
    m: int | None = None
    ef_construction: int | None = None
    workers: int | None = None
    memory_bytes: int | None = None

    @classmethod
    def from_options(cls, policy: str, options: Mapping[str, Any]) -> Self:
        """Read the index settings stored with a collection or a run. Raise InvalidOption for a value out of range."""
        chosen = {name: options[name] for name in SHAPE_OPTIONS if options.get(name) is not None}
        for name, value in chosen.items():
            least, most = SHAPE_OPTIONS[name]
            if not least <= value <= most:
                raise InvalidOption(f"{name} is {value:,}, but must be from {least:,} to {most:,}.")
        if chosen.get("ef_construction", MOST_EF_CONSTRUCTION) < 2 * chosen.get("m", 0):
            raise InvalidOption(
                f"ef_construction is {chosen['ef_construction']}, but must be at least twice m, which is {chosen['m']}."
            )
        return cls(policy, **chosen)


@dataclass(frozen=True, slots=True)
class ServerCapacity:
    """The capacity of the Postgres server for a build.

    `free_bytes` is free memory, and `source` says how it was found; `num_cores` is None if unknown. `maintenance_bytes`
    and `num_workers` are settings of the server; `most_workers` is the limit of parallel workers that it can start.
    """

    free_bytes: int
    source: str
    num_cores: int | None
    maintenance_bytes: int
    num_workers: int
    most_workers: int


class BuildLimits(TypedDict):
    """The limits of an index build that are common to all vectors of a generation."""

    is_live: bool
    least_rows: int
    memory_share: float


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """A plan to build an HNSW index, or none if `operator_class` is None. `reasons` are sentences for people."""

    operator_class: str | None
    m: int
    ef_construction: int
    workers: int
    memory_bytes: int
    graph_bytes: int
    reasons: tuple[str, ...]

    @property
    def is_wanted(self) -> bool:
        return self.operator_class is not None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON for reports and API responses."""
        return {"method": "hnsw" if self.is_wanted else None, **asdict(self), "reasons": list(self.reasons)}


def find_operator_class(
    kind: VectorType, dimensions: int, similarity: str = COSINE
) -> tuple[str | None, str]:
    """Return the operator class of an HNSW index that serves these vectors, or None if none does, and the reason."""
    if not kind.most_indexed:
        return None, (
            f"No index works for {kind.name}: a search compares restored codes, each dimension with its own scale and "
            "offset, but pgvector indexes the stored column. Use float16, which takes as much space in a collection."
        )
    if dimensions > kind.most_indexed:
        return None, (
            f"pgvector indexes {kind.name} vectors of at most {kind.most_indexed:,} dimensions, but these have "
            f"{dimensions:,}. Use fewer dimensions, or the vector type binary."
        )
    operator_class = f"{kind.column}_{kind.distances[similarity].name}_ops"
    return operator_class, f"Searches of {kind.name} vectors compare by {operator_class}."


def estimate_graph_bytes(num_rows: int, vector_bytes: float, m: int) -> int:
    """Estimate the memory of the HNSW graph while it is built, in bytes; a vector has `vector_bytes` of numbers."""
    value_bytes = math.ceil((8 + vector_bytes) / 8) * 8
    return num_rows * (value_bytes + 2 * m * 16 + ELEMENT_BYTES)


def plan_index(
    num_rows: int,
    dimensions: int,
    vector_type: VectorType,
    chosen: IndexSettings,
    capacity: ServerCapacity,
    *,
    similarity: str = COSINE,
    lacking: str = "",
    **limits: Unpack[BuildLimits],
) -> IndexPlan:
    """Plan the HNSW index of `num_rows` vectors: if there is to be one, its shape, and the resources of its build.

    Policy `auto` builds an index from `least_rows` on. The build may take `memory_share` of the server's free memory,
    or its maintenance_work_mem if that is more; on a live generation a quarter of the cores is left to searches.
    """
    if lacking:
        return _no_index(f"An HNSW index needs vectors, but the collection contains {lacking}.")
    operator_class, reason = find_operator_class(vector_type, dimensions, similarity)
    vector_bytes = vector_type.content_bytes(dimensions)
    return _plan_build(operator_class, reason, num_rows, vector_bytes, chosen, capacity, **limits)


def plan_sparse_index(
    num_rows: int,
    weights_bytes: float,
    chosen: IndexSettings,
    capacity: ServerCapacity,
    **limits: Unpack[BuildLimits],
) -> IndexPlan:
    """Plan the HNSW index of the sparse weights of `num_rows` rows, of which one has `weights_bytes` on average."""
    reason = (
        f"Searches of sparse weights compare by {SPARSE_CLASS}; rows of more than {MOST_INDEXED_WEIGHTS:,} weights, "
        "which pgvector cannot index, are compared exactly."
    )
    return _plan_build(SPARSE_CLASS, reason, num_rows, weights_bytes, chosen, capacity, **limits)


def _plan_build(
    operator_class: str | None,
    reason: str,
    num_rows: int,
    vector_bytes: float,
    chosen: IndexSettings,
    capacity: ServerCapacity,
    *,
    is_live: bool,
    least_rows: int,
    memory_share: float,
) -> IndexPlan:
    """Plan an index with this operator class, for the given reason; None is for vectors that cannot be indexed."""
    if chosen.policy == NO_INDEX:
        return _no_index("The collection's policy is none: every search reads all rows.")
    if operator_class is None:
        return _no_index(reason)
    if chosen.policy == AUTO and num_rows < least_rows:
        return _no_index(
            f"{num_rows:,} rows: an exact search reads them all in a few milliseconds; policy auto builds an index "
            f"from {least_rows:,} rows on (VECTORMILL_INDEX_ROWS)."
        )
    reasons = [reason]
    m, ef_construction = _choose_shape(num_rows, chosen, reasons)
    graph_bytes = estimate_graph_bytes(num_rows, vector_bytes, m)
    memory_bytes = _choose_memory(graph_bytes, chosen, capacity, memory_share, reasons)
    num_workers = _choose_workers(memory_bytes, chosen, capacity, is_live, reasons)
    return IndexPlan(
        operator_class, m, ef_construction, num_workers, memory_bytes, graph_bytes, tuple(reasons)
    )


def _no_index(reason: str) -> IndexPlan:
    return IndexPlan(None, 0, 0, 0, 0, 0, (reason,))


def _choose_shape(num_rows: int, chosen: IndexSettings, reasons: list[str]) -> tuple[int, int]:
    least, m, ef_construction = max(shape for shape in SHAPES if shape[0] <= num_rows)
    m = chosen.m or m
    ef_construction = chosen.ef_construction or max(ef_construction, 2 * m)
    m = min(m, ef_construction // 2)
    is_asked = chosen.m is not None or chosen.ef_construction is not None
    because = "as requested" if is_asked else f"for {num_rows:,} rows"
    if not is_asked and least:
        because += f", which is at least {least:,}"
    reasons.append(f"m = {m} and ef_construction = {ef_construction}, {because}.")
    return m, ef_construction


def _choose_memory(
    graph_bytes: int, chosen: IndexSettings, capacity: ServerCapacity, share: float, reasons: list[str]
) -> int:
    wanted = math.ceil(graph_bytes * (1 + SPARE_SHARE) / KIB) * KIB + SPARE_BYTES
    if chosen.memory_bytes is not None:
        memory, because = chosen.memory_bytes, "as requested"
    else:
        most = max(int(capacity.free_bytes * share), capacity.maintenance_bytes)
        memory = min(max(wanted, 2 * WORKER_BYTES), most, MOST_MEMORY_BYTES)
        because = f"at most {share:.0%} of {_mib(capacity.free_bytes)} ({capacity.source})"
    memory = max(memory // KIB * KIB, LEAST_MEMORY_BYTES)
    fits = "fits" if wanted <= memory else "does not fit, so the rest is built on disk, many times slower"
    reasons.append(
        f"The graph takes about {_mib(graph_bytes)} and {fits}: maintenance_work_mem = {_mib(memory)}, {because}."
    )
    return memory


def _choose_workers(
    memory_bytes: int, chosen: IndexSettings, capacity: ServerCapacity, is_live: bool, reasons: list[str]
) -> int:
    if chosen.workers is not None:
        num, because = chosen.workers, "as requested"
    elif capacity.num_cores is None:
        num, because = (
            capacity.num_workers,
            "the server's own setting, because its number of cores is unknown",
        )
    else:
        left = capacity.num_cores // 4 if is_live else 0
        num = min(capacity.num_cores - left - 1, capacity.most_workers)
        because = f"{capacity.num_cores} cores" + (
            ", a quarter of them reserved for searches" if left else ""
        )
    by_memory = max(0, memory_bytes // WORKER_BYTES - 1)
    if by_memory < num:
        num, because = by_memory, f"Postgres needs {_mib(WORKER_BYTES)} for each process of a build"
    reasons.append(
        f"max_parallel_maintenance_workers = {num}: {because}; Postgres starts fewer for a small table."
    )
    return num


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB"


# The limit of indexed metadata fields of one collection, since every insert of a row writes to all of these indexes.
MOST_FILTERS: Final = 32
MOST_FIELD_CHARS: Final = 500
MOST_FIELD_PARTS: Final = 8
# A name up to a dot that another one follows, or to the end.
FIELD_PART: Final = re.compile(r'(?:"((?:[^"]|"")*)"|([^".][^.]*))(?:\.(?!\Z)|\Z)')


def split_field(field: str) -> tuple[str, ...]:
    """Return the names that lead to a metadata field: what stands between dots, or in double quotes.

    Raise ValueError, with the reason, for a field that is none.
    """
    parts: list[str] = []
    end = 0
    while len(field) <= MOST_FIELD_CHARS and (end < len(field) or not parts):
        found = FIELD_PART.match(field, end)
        if found is None:
            raise ValueError(
                "a field name must not be empty before, after or between its dots; one that has a dot or begins with a "
                'quotation mark stands in double quotes, such as "file.name", in which "" is a quotation mark'
            )
        quoted, plain = found.groups()
        parts.append(quoted.replace('""', '"') if plain is None else plain)
        end = found.end()
    if not 0 < len(parts) <= MOST_FIELD_PARTS:
        raise ValueError(
            f"a field name may have at most {MOST_FIELD_CHARS} characters and {MOST_FIELD_PARTS} parts between dots"
        )
    if not is_storable(field):
        raise ValueError(
            "contains a NUL character or half of a UTF-16 surrogate pair, which Postgres cannot store"
        )
    return tuple(parts)


def is_storable(text: str) -> bool:
    """Return whether Postgres can store the text."""
    return "\0" not in text and (text.isascii() or not any("\ud800" <= each <= "\udfff" for each in text))


def check_fields(fields: Sequence[str]) -> list[str]:
    """Return the metadata fields to be indexed, without duplicates. Raise InvalidOption for a bad or surplus field."""
    if len(fields) > MOST_FILTERS:
        raise InvalidOption(f"At most {MOST_FILTERS} metadata fields can be indexed; got {len(fields)}.")
    for field in fields:
        try:
            split_field(field)
        except ValueError as error:
            raise InvalidOption(f"Invalid field {field[:60]!a}: {error}.") from None
    return list(dict.fromkeys(fields))
