"""Runs as the API takes and answers them."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final, Literal, Self
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field

from api.intake.options import StorableText, model_of
from api.schemas import describe_spec
from vectormill.domain.encoding import EncodingOptions
from vectormill.jobs.job import DEFAULT_PRIORITY, LEAST_URGENT_PRIORITY, MOST_URGENT_PRIORITY, Job
from vectormill.moments import in_utc
from vectormill.runs.run import DEFAULT_MAX_CHANGE_SHARE, RUN_KINDS, RUN_PHASES, RUN_STATES, Run

# Options that a run's phases know by the same names.
LIMITS: Final = {
    "max_change_share",
    "least_recall",
    "least_cosine",
    "canary_sample",
    "most_failed_share",
    "sample",
}


class RunOptionsBody(model_of(EncodingOptions)):  # type: ignore[misc]  # of its fields
    """How a run goes about it, and, if any of the others is given, which vectors it is to make.

    What is left out of these stays as in the live generation, or is the habit of the model if another one is named. If
    that means another vector space, a new generation is built beside the live one, and takes its place in the end.
    """

    model_config = ConfigDict(extra="forbid")

    max_change_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Of the rows that are there, so many may be encoded again or deleted; the run is held if it "
        f"would be more. {DEFAULT_MAX_CHANGE_SHARE:g} unless it is given.",
    )
    confirm: bool = Field(default=False, description="Whatever the share, it is not held.")
    sample: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="Of a check: so many texts are encoded again; 200 unless given.",
    )
    priority: int = Field(default=DEFAULT_PRIORITY, ge=MOST_URGENT_PRIORITY, le=LEAST_URGENT_PRIORITY)
    least_recall: float | None = Field(
        default=None, ge=0, le=1, description="Of the index of a new generation; less fails its canary."
    )
    least_cosine: float | None = Field(
        default=None, ge=-1, le=1, description="Of a new generation's texts that are encoded again."
    )
    canary_sample: int | None = Field(
        default=None, ge=0, le=10_000, description="So many of a new generation's texts are encoded again."
    )
    most_failed_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Of a new generation's rows that may fail through no fault of their text.",
    )
    model: StorableText = Field(default=None, description="A name of GET /v1/models.")

    def to_options(self) -> dict[str, Any]:
        """What is kept with the run; the others become its spec."""
        options: dict[str, Any] = {"priority": self.priority}
        if self.confirm:
            options["confirm"] = True
        limits = self.model_dump(include=LIMITS)
        return options | {name: value for name, value in limits.items() if value is not None}

    def of_spec(self) -> dict[str, Any]:
        """What was said of the vectors."""
        own = {*LIMITS, "confirm", "priority"}
        return {name: value for name, value in self.model_dump(exclude=own).items() if value is not None}


class RunRequest(BaseModel):
    """A run of a collection: `reindex` follows its source, `index` sees to its vector index, `check` measures."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"kind": "reindex", "options": {"confirm": False}}}
    )

    kind: Literal["reindex", "index", "check"] = "reindex"
    options: RunOptionsBody = Field(default_factory=RunOptionsBody)


class EncodingBody(BaseModel):
    """How far the job of a run is."""

    num_items: int
    num_done: int
    num_failed: int
    items_per_second: float
    eta_seconds: float | None

    @classmethod
    def from_job(cls, job: Job) -> Self:
        return cls(
            num_items=job.num_items,
            num_done=job.num_done,
            num_failed=job.num_failed,
            items_per_second=job.items_per_second,
            eta_seconds=job.eta_seconds,
        )


class RunBody(BaseModel):
    """A run, in the same shape wherever it is answered."""

    id: UUID
    collection: str
    kind: str = Field(json_schema_extra={"enum": list(RUN_KINDS)})
    state: str = Field(json_schema_extra={"enum": list(RUN_STATES)})
    phase: str | None = Field(
        description="Where it is, or was at its end; null before an indexer took it.",
        json_schema_extra={"enum": [*RUN_PHASES, None]},
    )
    counts: dict[str, int] = Field(description="Rows of the source by what became of them.")
    job_id: UUID | None = Field(description="The job that encodes for it.")
    encoding: EncodingBody | None = Field(
        description="How far that job is, of a single run in its phase encoding; null elsewhere."
    )
    spec: dict[str, Any] | None = Field(
        description="The EncodingSpec it was asked for; null for the live one."
    )
    options: dict[str, Any]
    report: dict[str, Any] = Field(description="What each phase found.")
    error: str | None = Field(
        description="Why it failed, is held or was skipped; else the error of its last attempt."
    )
    due_at: datetime | None = Field(description="Of its schedule; null for one that a client asked for.")
    attempt: int = Field(description="Claims by an indexer since it came to its phase.")
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    elapsed_seconds: float = Field(description="Since an indexer took it, until its end or now.")

    @classmethod
    def from_run(cls, run: Run, job: Job | None = None) -> Self:
        until = run.finished_at or run.now
        return cls(
            id=run.id,
            collection=run.collection,
            kind=run.kind,
            state=run.state,
            phase=run.phase,
            counts=asdict(run.counts),
            job_id=run.job_id,
            encoding=None if job is None else EncodingBody.from_job(job),
            spec=None if run.spec is None else describe_spec(run.spec),
            options=dict(run.options),
            report=dict(run.report),
            error=run.error,
            due_at=in_utc(run.due_at),
            attempt=run.attempt,
            created_at=run.created_at.astimezone(UTC),
            started_at=in_utc(run.started_at),
            finished_at=in_utc(run.finished_at),
            elapsed_seconds=(until - run.started_at).total_seconds() if run.started_at else 0.0,
        )


class RunPage(BaseModel):
    data: list[RunBody]
    next: str | None = Field(description="Given as `after` for the next page; null on the last.")
