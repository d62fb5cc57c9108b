"""Indexes of a collection as the API takes and answers them."""

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from vectormill.collections.collection import INDEX_POLICIES, Generation
from vectormill.collections.indexes.builds import BuildProgress
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
from vectormill.collections.indexes.indexes import FoundIndex
from vectormill.collections.indexes.plans import Outlook
from vectormill.domain.errors import InvalidOption
from vectormill.moments import in_utc


class IndexRequest(BaseModel):
    """What a collection is to have. What is left out stays as it is; all but `rebuild` and `drop` is kept."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"policy": "auto", "filters": ["lang", "year"]}}
    )

    policy: Literal["auto", "hnsw", "none"] | None = Field(
        default=None, description="An HNSW index from VECTORMILL_INDEX_ROWS on, always, or never."
    )
    m: int | None = Field(
        default=None, ge=LEAST_M, le=MOST_M, description="Neighbours of a row in the graph."
    )
    ef_construction: int | None = Field(
        default=None,
        ge=LEAST_EF_CONSTRUCTION,
        le=MOST_EF_CONSTRUCTION,
        description="Candidates looked at for a row; at least twice m.",
    )
    workers: int | None = Field(
        default=None, ge=0, le=MOST_WORKERS, description="Processes that help with a build."
    )
    memory_bytes: int | None = Field(
        default=None,
        ge=LEAST_MEMORY_BYTES,
        le=MOST_MEMORY_BYTES,
        description="maintenance_work_mem of a build.",
    )
    filters: list[str] | None = Field(
        default=None,
        max_length=MOST_FILTERS,
        description=f"All fields of the metadata that have an index, of at most {MOST_FIELD_CHARS} characters; a dot "
        "leads into an object, and * is one index over everything.",
    )
    rebuild: bool = Field(default=False, description="Build the vector index anew, though it serves.")
    drop: bool = Field(default=False, description="Drop the vector index; the policy becomes none.")

    def choose_policy(self) -> str | None:
        """Raises InvalidOption for what contradicts itself."""
        if not self.drop:
            return self.policy
        if self.rebuild or self.policy in ("auto", "hnsw"):
            raise InvalidOption("An index cannot be dropped and wanted at once: drop means the policy none.")
        return "none"

    def shape(self) -> dict[str, int]:
        """What is kept as the collection's index options."""
        return self.model_dump(include={"m", "ef_construction", "workers", "memory_bytes"}, exclude_none=True)

    def fields(self) -> list[str] | None:
        """Raises InvalidOption."""
        return None if self.filters is None else check_fields(self.filters)

    def run_options(self) -> dict[str, Any]:
        return {"rebuild": True} if self.rebuild else {}


class OneIndexBody(BaseModel):
    """An index that is there."""

    name: str
    method: str
    operator_class: str
    is_valid: bool = Field(description="False while it is being built, and when a build was ended.")
    is_ours: bool = Field(description="False of one that somebody made by hand, which stays as it is.")
    options: dict[str, int]
    num_bytes: int
    last_used_at: datetime | None

    @classmethod
    def from_index(cls, index: FoundIndex) -> Self:
        return cls(
            name=index.name,
            method=index.method,
            operator_class=index.operator_class,
            is_valid=index.is_valid,
            is_ours=index.is_ours,
            options=dict(index.options),
            num_bytes=index.num_bytes,
            last_used_at=in_utc(index.last_used_at),
        )


class IndexPlanBody(BaseModel):
    """What would be built now, and why so."""

    method: str | None = Field(description="hnsw, or null for none.")
    operator_class: str | None
    m: int
    ef_construction: int
    workers: int
    memory_bytes: int
    graph_bytes: int
    reasons: list[str]


class BuildProgressBody(BaseModel):
    """A build that goes on, by pg_stat_progress_create_index."""

    phase: str
    share: float | None = Field(description="Of the phase, 0 to 1; null while it cannot be told.")
    tuples_done: int
    tuples_total: int
    blocks_done: int
    blocks_total: int

    @classmethod
    def from_progress(cls, progress: BuildProgress | None) -> Self | None:
        if progress is None:
            return None
        told = {name: value for name, value in progress.to_json().items() if name != "num_waiting"}
        return cls(**told, share=progress.share)


class IndexBody(BaseModel):
    """The indexes of a collection's live generation."""

    collection: str
    generation: int
    policy: str = Field(json_schema_extra={"enum": list(INDEX_POLICIES)})
    options: dict[str, Any] = Field(description="What was asked for of the shape, kept for every build.")
    filters: list[str]
    num_rows: int = Field(description="Of a large collection about.")
    changed_share: float = Field(
        description="Rows deleted or replaced since the build, of those it was built of."
    )
    indexes: list[OneIndexBody]
    plan: IndexPlanBody
    built: dict[str, Any] = Field(
        description="What the vector index was built of, and why; empty without one."
    )
    progress: BuildProgressBody | None

    @classmethod
    def of(
        cls,
        generation: Generation,
        outlook: Outlook,
        indexes: list[FoundIndex],
        progress: BuildProgress | None,
    ) -> Self:
        return cls(
            collection=generation.collection,
            generation=generation.id,
            policy=outlook.kept.policy,
            options=dict(outlook.kept.options),
            filters=list(outlook.kept.filters),
            num_rows=outlook.num_rows,
            changed_share=outlook.worn,
            indexes=[OneIndexBody.from_index(index) for index in indexes],
            plan=IndexPlanBody(**outlook.plan.to_json()),
            built=dict(outlook.record),
            progress=BuildProgressBody.from_progress(progress),
        )
