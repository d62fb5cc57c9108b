"""Collections as the API answers them: one line of a list, and the page of one."""

from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

from pydantic import BaseModel, Field

from vectormill.collections.collection import GENERATION_STATES, KINDS, find_kind
from vectormill.collections.descriptions import (
    CollectionDescription,
    CollectionRow,
    Coverage,
    GenerationDescription,
    RunSummary,
    ScheduleSummary,
)
from vectormill.moments import in_utc
from vectormill.sources.source import hide_files


class CollectionBody(BaseModel):
    """A collection in a list; its page has the same fields and more."""

    name: str
    kind: str = Field(
        description="Kind of result in its rows.", json_schema_extra={"enum": list(KINDS.values())}
    )
    model: str
    dimensions: int = Field(description="Length of a vector; for scores the number of labels, for records 0.")
    options: dict[str, Any] = Field(description="The EncodingSpec of its live generation.")
    num_rows: int = Field(description="About how many rows it has, as Postgres estimates.")
    num_bytes: int = Field(description="On disk: of every generation, with its indexes and attributes.")
    num_generations: int
    keep_text: bool = Field(description="True if texts are kept beside their results.")
    language: str = Field(
        description="In which full text search reads kept texts; a configuration of Postgres."
    )
    created_at: datetime
    synced_at: datetime | None = Field(description="When the last successful re-index ended.")
    stale_seconds: float | None = Field(description="Since then; null when there was none.")

    @classmethod
    def fields_of(cls, row: CollectionRow) -> dict[str, Any]:
        return {
            "name": row.name,
            "kind": find_kind(row.spec),
            "model": row.spec.model,
            "dimensions": row.spec.dimensions,
            "options": row.spec.describe(),
            "num_rows": row.num_rows,
            "num_bytes": row.num_bytes,
            "num_generations": row.num_generations,
            "keep_text": row.keep_text,
            "language": row.language,
            "created_at": row.created_at.astimezone(UTC),
            "synced_at": in_utc(row.synced_at),
            "stale_seconds": row.stale_seconds,
        }

    @classmethod
    def from_row(cls, row: CollectionRow) -> Self:
        return cls(**cls.fields_of(row))


class CollectionPage(BaseModel):
    data: list[CollectionBody]
    next: str | None = Field(description="Hand it back as `after`; null on the last page.")


class CollectionIndexBody(BaseModel):
    name: str
    method: str
    state: str = Field(json_schema_extra={"enum": ["ready", "building", "invalid"]})
    definition: str = Field(description="The statement that would make it.")
    num_bytes: int


class GenerationBody(BaseModel):
    id: int
    state: str = Field(json_schema_extra={"enum": list(GENERATION_STATES)})
    fingerprint: str = Field(description="Sixteen hex digits that name the vector space.")
    model: str
    options: dict[str, Any]
    table: str = Field(
        description="Its table, for SQL of your own; the view of the collection reads the live one."
    )
    num_rows: int = Field(description="About how many, as Postgres estimates.")
    table_bytes: int
    index_bytes: int
    attribute_bytes: int = Field(description="Bytes of metadata and kept texts, with their indexes.")
    indexes: list[CollectionIndexBody]
    report: dict[str, Any] = Field(
        description="Findings of its canary and choices for its index, with reasons."
    )
    created_at: datetime
    live_at: datetime | None
    retired_at: datetime | None

    @classmethod
    def from_generation(cls, found: GenerationDescription) -> Self:
        return cls(
            id=found.id,
            state=found.state,
            fingerprint=found.fingerprint,
            model=found.spec.model,
            options=found.spec.describe(),
            table=f"vectormill.generation_{found.id}",
            num_rows=found.num_rows,
            table_bytes=found.table_bytes,
            index_bytes=found.index_bytes,
            attribute_bytes=found.attribute_bytes,
            indexes=[
                CollectionIndexBody(
                    name=index.name,
                    method=index.method,
                    state=index.state,
                    definition=index.definition,
                    num_bytes=index.num_bytes,
                )
                for index in found.indexes
            ],
            report=dict(found.report),
            created_at=found.created_at.astimezone(UTC),
            live_at=in_utc(found.live_at),
            retired_at=in_utc(found.retired_at),
        )


class CoverageBody(BaseModel):
    """Coverage as of the last re-index that completed."""

    run_id: UUID
    at: datetime
    num_seen: int = Field(description="Rows that the source had.")
    num_failed: int = Field(description="Those of them that could not be encoded.")
    share: float = Field(description="Share of the source's rows that have a vector, 0 to 1.")
    failed_keys: list[str] = Field(
        description="Some of the failed; all: `/v1/jobs/{job}/errors` of the run's job."
    )

    @classmethod
    def from_coverage(cls, coverage: Coverage) -> Self:
        return cls(
            run_id=coverage.run_id,
            at=coverage.at.astimezone(UTC),
            num_seen=coverage.num_seen,
            num_failed=coverage.num_failed,
            share=coverage.share,
            failed_keys=coverage.failed_keys,
        )


class StalenessBody(BaseModel):
    synced_at: datetime | None
    stale_seconds: float | None
    num_waiting_changes: int = Field(
        description="Changes that triggers have told and nobody has encoded yet."
    )
    oldest_change_at: datetime | None


class OpenJobBody(BaseModel):
    id: UUID
    state: str
    num_items: int
    num_done: int
    num_failed: int


class RunLine(BaseModel):
    """A run in one line; `/v1/runs/{id}` has it whole."""

    id: UUID
    kind: str
    state: str
    phase: str | None
    num_seen: int
    num_failed: int
    error: str | None
    created_at: datetime
    finished_at: datetime | None

    @classmethod
    def from_summary(cls, run: RunSummary) -> Self:
        return cls(
            id=run.id,
            kind=run.kind,
            state=run.state,
            phase=run.phase,
            num_seen=run.num_seen,
            num_failed=run.num_failed,
            error=run.error,
            created_at=run.created_at.astimezone(UTC),
            finished_at=in_utc(run.finished_at),
        )


class SourceLine(BaseModel):
    kind: str
    options: dict[str, Any]
    split: dict[str, Any]


class ScheduleLine(BaseModel):
    """A schedule in one line; `/v1/schedules/{name}` has it whole."""

    name: str
    cron: str
    timezone: str
    next_due_at: datetime | None
    is_paused: bool

    @classmethod
    def from_summary(cls, schedule: ScheduleSummary) -> Self:
        return cls(
            name=schedule.name,
            cron=schedule.cron,
            timezone=schedule.timezone,
            next_due_at=in_utc(schedule.next_due_at),
            is_paused=schedule.is_paused,
        )


class CollectionDetail(CollectionBody):
    """A collection whole."""

    exact_rows: int | None = Field(description="Counted one by one; null unless `exact` asked for it.")
    fingerprint: str
    index_policy: str
    index_options: dict[str, Any]
    filters: list[Any] = Field(description="Fields of the metadata that have an index.")
    generations: list[GenerationBody] = Field(description="Newest first.")
    coverage: CoverageBody | None = Field(description="Null while no re-index has ended.")
    staleness: StalenessBody
    open_jobs: list[OpenJobBody] = Field(description="That write into it; some of them when there are many.")
    runs: list[RunLine] = Field(description="The newest.")
    source: SourceLine | None
    schedules: list[ScheduleLine]

    @classmethod
    def from_description(cls, found: CollectionDescription) -> Self:
        return cls(
            **cls.fields_of(found.row),
            exact_rows=found.exact_rows,
            fingerprint=found.live.fingerprint,
            index_policy=found.index_policy,
            index_options=dict(found.index_options),
            filters=found.filters,
            generations=[GenerationBody.from_generation(each) for each in found.generations],
            coverage=CoverageBody.from_coverage(found.coverage) if found.coverage else None,
            staleness=StalenessBody(
                synced_at=in_utc(found.row.synced_at),
                stale_seconds=found.row.stale_seconds,
                num_waiting_changes=found.num_waiting_changes,
                oldest_change_at=in_utc(found.oldest_change_at),
            ),
            open_jobs=[
                OpenJobBody(
                    id=job.id,
                    state=job.state,
                    num_items=job.num_items,
                    num_done=job.num_done,
                    num_failed=job.num_failed,
                )
                for job in found.open_jobs
            ],
            runs=[RunLine.from_summary(run) for run in found.runs],
            source=SourceLine(
                kind=found.source_kind,
                options=hide_files(found.source_options or {}),
                split=dict(found.source_split or {}),
            )
            if found.source_kind
            else None,
            schedules=[ScheduleLine.from_summary(schedule) for schedule in found.schedules],
        )
