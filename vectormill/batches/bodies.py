"""Bodies of batches and of their files, in OpenAI's shape."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, Self
from uuid import UUID

import msgspec
from msgspec import Meta
from pydantic import BaseModel, ConfigDict, Field

from vectormill.batches.request_batch import (
    BATCH_STATES,
    ENDPOINTS,
    PURPOSES,
    WINDOW,
    RequestBatch,
    RequestFile,
    name_file,
)

MOST_PAIRS: Final = 16
LARGEST_PAGE: Final = 100
LARGEST_PAGE_OF_FILES: Final = 10_000
MOST_LIFETIME_SECONDS: Final = 10 * 365 * 86400

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """The lifetime of files."""

    seconds: Annotated[int, Meta(ge=1, le=MOST_LIFETIME_SECONDS)]
    anchor: Literal["created_at"] = "created_at"


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/batches."""

    input_file_id: Annotated[
        str,
        Meta(
            description="The id that POST /v1/files answered.",
            examples=["file-0123456789abcdef0123456789abcdef"],
        ),
    ]
    endpoint: Literal["/v1/embeddings", "/v1/rerank"]
    completion_window: Annotated[
        str,
        Meta(
            pattern=f"^{WINDOW.pattern}$",
            description="After that the batch expires, with the answers that are there: minutes, hours or days.",
            examples=["24h"],
        ),
    ]
    metadata: (
        Annotated[
            dict[MetadataKey, MetadataValue],
            Meta(max_length=MOST_PAIRS, description=f"Yours; {MOST_PAIRS} pairs at the most."),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


BATCH_DECODER: Final = msgspec.json.Decoder(BatchRequest)
BATCH_DOCS: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/BatchRequest"},
                "example": {
                    "input_file_id": "file-0123456789abcdef0123456789abcdef",
                    "endpoint": "/v1/embeddings",
                    "completion_window": "24h",
                },
            }
        },
    }
}


class CountsBody(BaseModel):
    total: int = Field(description="Lines; 0 while they are being read.")
    completed: int
    failed: int


class FaultBody(BaseModel):
    code: str
    message: str
    line: int | None
    param: str | None


class FaultList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FaultBody]


class BatchUsage(BaseModel):
    input_tokens: int
    output_tokens: int = 0
    total_tokens: int
    input_tokens_details: dict[str, int] = Field(default_factory=lambda: {"cached_tokens": 0})
    output_tokens_details: dict[str, int] = Field(default_factory=lambda: {"reasoning_tokens": 0})


class BatchBody(BaseModel):
    """A batch, in the same shape wherever it is answered."""

    id: str = Field(examples=["batch_0123456789abcdef0123456789abcdef"])
    object: Literal["batch"] = "batch"
    endpoint: str = Field(json_schema_extra={"enum": list(ENDPOINTS)})
    model: str | None
    errors: FaultList | None = Field(description="Why a batch failed; single lines are in its error file.")
    input_file_id: str
    completion_window: str
    status: str = Field(json_schema_extra={"enum": list(BATCH_STATES)})
    output_file_id: str | None
    error_file_id: str | None
    created_at: int = Field(description="In seconds since 1970, as all times here.")
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: CountsBody
    usage: BatchUsage
    metadata: dict[str, str] | None
    job_id: UUID | None = Field(description="Its job, which `/v1/jobs` shows.")
    job_state: str | None

    @classmethod
    def from_batch(cls, batch: RequestBatch) -> Self:
        num_completed, num_failed = batch.count_lines()
        num_tokens = batch.num_tokens if batch.is_ended else batch.job_tokens or 0
        faults = [FaultBody(**fault) for fault in batch.errors]
        return cls(
            id=batch.name,
            endpoint=batch.endpoint,
            model=batch.model,
            errors=FaultList(data=faults) if faults else None,
            input_file_id=name_file(batch.input_file_id),
            completion_window=batch.completion_window,
            status=batch.state,
            output_file_id=None if batch.output_file_id is None else name_file(batch.output_file_id),
            error_file_id=None if batch.error_file_id is None else name_file(batch.error_file_id),
            **{name: _to_seconds(getattr(batch, name)) for name in MOMENTS},
            request_counts=CountsBody(total=batch.num_lines, completed=num_completed, failed=num_failed),
            usage=BatchUsage(input_tokens=num_tokens, total_tokens=num_tokens),
            metadata=batch.metadata,
            job_id=batch.job_id if batch.job_state is not None else None,
            job_state=batch.job_state,
        )


MOMENTS: Final = (
    "created_at",
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def _to_seconds(moment: datetime | None) -> Any:
    return None if moment is None else int(moment.timestamp())


class BatchPage(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchBody]
    first_id: str | None
    last_id: str | None = Field(description="Hand it back as `after` while `has_more` is true.")
    has_more: bool


class BatchFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=20, ge=1, le=LARGEST_PAGE)
    after: str | None = Field(default=None, description="The id of the last batch of the page before.")


FILE_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {
                            "type": "string",
                            "format": "binary",
                            "description": "Lines of JSON, each a request of a batch. Read as a stream.",
                        },
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": 315_360_000,
                            "description": "So long the file is kept; else VECTORMILL_FILE_RETENTION_DAYS.",
                        },
                    },
                }
            }
        },
    }
}


class FileBody(BaseModel):
    """A file, in the same shape wherever it is answered."""

    id: str = Field(examples=["file-0123456789abcdef0123456789abcdef"])
    object: Literal["file"] = "file"
    bytes: int
    created_at: int = Field(description="In seconds since 1970, as all times here.")
    expires_at: int | None = Field(description="When it will be removed; null: never by itself.")
    filename: str
    purpose: str = Field(json_schema_extra={"enum": list(PURPOSES)})
    status: Literal["processed"] = "processed"
    status_details: str | None = None

    @classmethod
    def from_file(cls, file: RequestFile) -> Self:
        return cls(
            id=file.name,
            bytes=file.num_bytes,
            created_at=int(file.created_at.timestamp()),
            expires_at=None if file.expires_at is None else int(file.expires_at.timestamp()),
            filename=file.filename,
            purpose=file.purpose,
        )


class FilePage(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileBody]
    first_id: str | None
    last_id: str | None = Field(description="Hand it back as `after` while `has_more` is true.")
    has_more: bool


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileFilter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    purpose: str | None = Field(default=None, json_schema_extra={"enum": [*PURPOSES, None]})
    limit: int = Field(default=LARGEST_PAGE_OF_FILES, ge=1, le=LARGEST_PAGE_OF_FILES)
    order: Annotated[Literal["asc", "desc"], Field(description="By the time of creation.")] = "desc"
    after: str | None = Field(default=None, description="The id of the last file of the page before.")
