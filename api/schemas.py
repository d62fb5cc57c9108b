"""Schemas: the JSON that the API answers with; the names are those of the domain."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from vectormill.jobs.bottleneck import Bottleneck
from vectormill.jobs.job import JOB_STATES, PAUSED, Job
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import find_own_task
from vectormill.workers.workers import Worker

Moment = Annotated[datetime, AfterValidator(lambda moment: moment.astimezone(UTC))]


class StageBody(BaseModel):
    seconds: float = Field(description="Busy time, over all workers and threads; of `wait`, waiting time.")
    share: float = Field(
        description="Share of the time in which a worker held chunks of the job: of the device for "
        "`run`, of one thread for the others, which have several."
    )


class BottleneckBody(BaseModel):
    value: str
    reason: str

    @classmethod
    def from_bottleneck(cls, bottleneck: Bottleneck | None) -> Self | None:
        return cls(value=bottleneck.value, reason=bottleneck.reason) if bottleneck else None


class JobBody(BaseModel):
    """A job, in the same shape wherever it is answered."""

    id: UUID
    state: str = Field(json_schema_extra={"enum": list(JOB_STATES)})
    waiting_because: str | None = Field(
        description="Why it makes no progress, in a sentence; null while it does, and when it has ended."
    )
    model: str
    collection: str | None
    priority: int
    num_items: int
    num_done: int
    num_failed: int
    num_chunks: int
    num_retried_chunks: int
    num_tokens: int
    truncated_items: int = Field(description="Items of more than max_tokens that were cut.")
    num_passages: int = Field(description="Passages that longer items were read in instead of being cut.")
    num_reused: int = Field(description="Items, or passages of them, that got the vector of an equal one.")
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    paused_at: Moment | None = Field(description="Null unless the job is paused.")
    items_per_second: float = Field(description="The mean since its start, pauses left out.")
    tokens_per_second: float
    eta_seconds: float | None = Field(description="Null while nothing is known, and while the job is paused.")
    padding_waste: float = Field(description="Share of the computed tokens that were padding, 0 to 1.")
    stages: dict[str, StageBody] = Field(description="By stage, in the order of a text's way.")
    bound_by: BottleneckBody | None = Field(
        description="The stage that bounded the job, or `queue`; null until its first chunk is done."
    )
    stage_seconds: dict[str, float] = Field(
        description="As stored: the stages, and `held` and `device`, which their shares are of."
    )
    options: dict[str, Any] = Field(description="The EncodingSpec: all that decides the vectors.")
    metadata: dict[str, Any]
    twin_of: UUID | None = Field(
        description="The job whose items it encodes once more, for a generation that is built beside the live one."
    )

    @classmethod
    def from_job(cls, job: Job, waiting_because: str | None = None) -> Self:
        """Build the body of a job; fields not named here are the same in Job."""
        told = {
            "waiting_because": waiting_because,
            "model": job.spec.model,
            "truncated_items": job.num_truncated,
            "paused_at": job.paused_at if job.state == PAUSED else None,
            "stages": {
                stage: StageBody(seconds=job.stage_seconds[stage], share=share)
                for stage, share in job.stage_shares.items()
            },
            "bound_by": BottleneckBody.from_bottleneck(job.bottleneck),
            "options": job.spec.describe(),
        }
        same = {name: getattr(job, name) for name in cls.model_fields if name not in told}
        return cls(**told | same)


class JobPage(BaseModel):
    data: list[JobBody]
    next: str | None = Field(description="Hand it back as `after`; null on the last page.")


class ItemErrorBody(BaseModel):
    key: str
    code: str
    detail: str


class ItemErrorPage(BaseModel):
    data: list[ItemErrorBody]
    next: str | None


class TruncatedItemBody(BaseModel):
    key: str


class TruncatedItemPage(BaseModel):
    data: list[TruncatedItemBody]
    next: str | None = Field(description="Hand it back as `after`; null on the last page.")


class ModelBody(BaseModel):
    """A registered model. Its card's fields are null when its files cannot be read; `problem` says why."""

    id: str = Field(description="Its name, as OpenAI's clients call it.")
    object: Literal["model"] = "model"
    created: int = Field(default=0, description="When its files came to this machine, in seconds since 1970.")
    owned_by: Literal["vectormill"] = "vectormill"
    name: str
    task: str | None = Field(default=None, description="Default task of a job with this model.")
    dimension: int | None = Field(
        default=None, description="Length of a vector; for scores the number of labels, for records 0."
    )
    max_tokens: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    prompts: dict[str, str] = Field(default_factory=dict)
    revision: str | None = None
    workers: int = Field(description="Live workers that serve this model.")
    problem: str | None = None
    notes: list[str] = Field(
        default_factory=list, description="Notes on how the model differs from what its files alone say."
    )
    unprompted: str | None = Field(
        default=None, description="That of the notes which is true of jobs without a prompt alone."
    )

    @classmethod
    def from_card(cls, card: ModelCard, num_workers: int) -> Self:
        return cls(
            id=card.name,
            created=find_moment(card),
            name=card.name,
            task=find_own_task(card),
            dimension=card.dimension,
            max_tokens=card.max_tokens,
            pooling="+".join(card.pooling),
            normalize=card.normalize,
            prompts=card.prompts,
            revision=card.revision,
            workers=num_workers,
            notes=list(card.notes),
            unprompted=card.unprompted or None,
        )


def find_moment(card: ModelCard) -> int:
    """0 when the files have gone since they were read."""
    try:
        return int((card.path / "config.json").stat().st_mtime)
    except OSError:
        return 0


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelBody]


class WorkerBody(BaseModel):
    name: str
    incarnation: UUID
    model: str
    slots: int
    report: dict[str, Any]
    started_at: datetime
    heartbeat_at: datetime

    @classmethod
    def from_worker(cls, worker: Worker) -> Self:
        return cls(
            name=worker.name,
            incarnation=worker.incarnation,
            model=worker.model,
            slots=worker.slots,
            report=worker.report,
            started_at=worker.started_at.astimezone(UTC),
            heartbeat_at=worker.heartbeat_at.astimezone(UTC),
        )


class WorkerList(BaseModel):
    data: list[WorkerBody]


class Liveness(BaseModel):
    status: str


class ScheduleHealth(BaseModel):
    """Health of all schedules. It never makes the API unready."""

    schedules: int
    paused: int
    failing: int = Field(description="Whose newest run that ended by itself failed.")
    overdue: int = Field(description="Past their due time for a minute without a run: no scheduler looks.")


class Readiness(BaseModel):
    """`ok`, `degraded` (Redis is away: jobs are taken, and wait) or `unavailable` (Postgres is away)."""

    status: str
    postgres: bool
    redis: bool
    workers: int
    failing_workers: int = Field(
        description="Workers that run and cannot load their model; `workers` leaves them out."
    )
    scheduler: bool
    indexer: bool
    schedules: ScheduleHealth | None = Field(description="Null while Postgres is away.")


class PlaceBody(BaseModel):
    detail: str
    pointer: str | None = None
    line: int | None = None
    parameter: str | None = None
    header: str | None = None
    code: str | None = None


class LimitBody(BaseModel):
    setting: str
    value: float


class OpenAIErrorBody(BaseModel):
    """A refusal as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ProblemBody(BaseModel):
    """Problem details (RFC 9457); `type` is stable, `errors` names the places, `limit` the setting that was reached."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "https://vectormill.dev/problems/invalid-item",
                "title": "Invalid item",
                "status": 422,
                "detail": "Line 17: Object missing required field `text`.",
                "instance": "/v1/jobs",
                "errors": [{"detail": "Object missing required field `text`", "line": 17}],
            }
        }
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[PlaceBody] = Field(default_factory=list)
    limit: LimitBody | None = None
    error: OpenAIErrorBody | str | None = Field(
        default=None,
        description="The error in the shape of OpenAI's or text-embeddings-inference's clients, on their routes.",
    )
    error_type: str | None = Field(default=None, description="Beside it, for the latter.")
    message: str | None = Field(
        default=None, description="The error in the shape of Cohere's clients, on their routes."
    )
