"""Indexes of a collection as the API takes and answers them, and as the client returns them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta, Struct

from vectormill.collections.collection import AUTO, HNSW, INDEX_POLICIES, NO_INDEX
from vectormill.collections.indexes.index_plan import (
    LEAST_EF_CONSTRUCTION,
    LEAST_M,
    LEAST_MEMORY_BYTES,
    MOST_EF_CONSTRUCTION,
    MOST_FIELD_CHARS,
    MOST_FILTERS,
    MOST_M,
    MOST_MEMORY_BYTES,
    MOST_WORKERS,
    check_fields,
)
from vectormill.domain.errors import InvalidOption
from vectormill.moments import Moment
from vectormill.operation import one_of

Policy = Annotated[Literal["auto", "hnsw", "none"], one_of(INDEX_POLICIES)]


class IndexRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Index settings to change; those left out stay. All but `rebuild` and `drop` are kept."""

    policy: Annotated[
        Policy | None, Meta(description="An HNSW index from VECTORMILL_INDEX_ROWS on, always, or never.")
    ] = None
    m: Annotated[
        Annotated[int, Meta(ge=LEAST_M, le=MOST_M)] | None,
        Meta(description="Neighbours of a row in the graph."),
    ] = None
    ef_construction: Annotated[
        Annotated[int, Meta(ge=LEAST_EF_CONSTRUCTION, le=MOST_EF_CONSTRUCTION)] | None,
        Meta(description="Candidates looked at for a row; at least twice m."),
    ] = None
    workers: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_WORKERS)] | None,
        Meta(description="Processes that help with a build."),
    ] = None
    memory_bytes: Annotated[
        Annotated[int, Meta(ge=LEAST_MEMORY_BYTES, le=MOST_MEMORY_BYTES)] | None,
        Meta(description="maintenance_work_mem of a build."),
    ] = None
    filters: Annotated[
        Annotated[Sequence[str], Meta(max_length=MOST_FILTERS)] | None,
        Meta(
            description=f"All fields of the metadata that have an index, of at most {MOST_FIELD_CHARS} characters; a "
            "dot leads into an object, and * is one index over everything."
        ),
    ] = None
    rebuild: Annotated[bool, Meta(description="Build the vector index anew, though it serves.")] = False
    drop: Annotated[bool, Meta(description="Drop the vector index; the policy becomes none.")] = False

    def choose_policy(self) -> str | None:
        """Return the policy that is wanted. Raises InvalidOption for what contradicts itself."""
        if not self.drop:
            return self.policy
        if self.rebuild or self.policy in (AUTO, HNSW):
            raise InvalidOption("An index cannot be dropped and wanted at once: drop means the policy none.")
        return NO_INDEX

    def shape(self) -> dict[str, int]:
        """Return what is kept as the collection's index options."""
        names = ("m", "ef_construction", "workers", "memory_bytes")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def fields(self) -> list[str] | None:
        """Return the fields that are to have an index, each once. Raises InvalidOption."""
        return None if self.filters is None else check_fields(self.filters)


class OneIndexBody(TypedDict):
    """An index that is there."""

    name: str
    method: str
    operator_class: str
    is_valid: Annotated[bool, Meta(description="False while it is being built, and when a build was ended.")]
    is_ours: Annotated[
        bool, Meta(description="False of one that somebody made by hand, which stays as it is.")
    ]
    options: dict[str, int]
    num_bytes: int
    last_used_at: Moment | None


class IndexPlanBody(TypedDict):
    """The index that would be built now, with reasons."""

    method: Annotated[str | None, Meta(description="hnsw, or null for none.")]
    operator_class: str | None
    m: int
    ef_construction: int
    workers: int
    memory_bytes: int
    graph_bytes: int
    reasons: list[str]


class BuildProgressBody(TypedDict):
    """A build that goes on, by pg_stat_progress_create_index."""

    phase: str
    share: Annotated[
        float | None, Meta(description="Completed share of the phase, 0 to 1; null while unknown.")
    ]
    tuples_done: int
    tuples_total: int
    blocks_done: int
    blocks_total: int


class IndexBody(TypedDict):
    """The indexes of a collection's live generation."""

    collection: str
    generation: int
    policy: Annotated[str, one_of(INDEX_POLICIES)]
    options: Annotated[dict[str, Any], Meta(description="Requested shape, kept for every build.")]
    filters: list[str]
    num_rows: Annotated[int, Meta(description="An estimate for a large collection.")]
    changed_share: Annotated[
        float, Meta(description="Rows deleted or replaced since the build, of those it was built of.")
    ]
    indexes: list[OneIndexBody]
    plan: IndexPlanBody
    built: Annotated[
        dict[str, Any], Meta(description="Facts and reasons of the vector index's build; empty without one.")
    ]
    progress: BuildProgressBody | None
