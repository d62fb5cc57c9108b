"""The API's operations on request batches and their files, and their bodies, in OpenAI's format."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal, TypedDict, TypeVar, cast

import msgspec
from msgspec import Meta

from vectormill.batches.endpoints import (
    EmbeddingsAnswer,
    EmbeddingsRequest,
    RerankAnswer,
    RerankRequest,
    VoyageRerankAnswer,
)
from vectormill.batches.request_batch import (
    BATCH,
    BATCH_STATES,
    ENDPOINTS,
    PURPOSES,
    WINDOW,
    RequestBatch,
    RequestFile,
    name_file,
)
from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import Identifier, Operation, describe, one_of

MOST_PAIRS: Final = 16
OCTETS: Final = "application/octet-stream"
LARGEST_PAGE: Final = 100
LARGEST_PAGE_OF_FILES: Final = 10_000
LEAST_LIFETIME_SECONDS: Final = 1
MOST_LIFETIME_SECONDS: Final = 10 * 365 * 86400
EXAMPLE_FILE: Final = "file-0123456789abcdef0123456789abcdef"

Seconds = Annotated[int, Meta(description="Unix time in seconds.")]
FileId = Annotated[str, Meta(examples=[EXAMPLE_FILE])]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """The field `expires_after` of a request: how many seconds after its creation a file expires."""

    seconds: Annotated[int, Meta(ge=LEAST_LIFETIME_SECONDS, le=MOST_LIFETIME_SECONDS)]
    anchor: Literal["created_at"] = "created_at"


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/batches."""

    input_file_id: Annotated[
        str, Meta(description="The file id that POST /v1/files returned.", examples=[EXAMPLE_FILE])
    ]
    endpoint: Literal["/v1/embeddings", "/v1/rerank"]
    completion_window: Annotated[
        str,
        Meta(
            pattern=f"^{WINDOW.pattern}$",
            description="Minutes, hours or days after which the batch expires, with the answers so far.",
            examples=["24h"],
        ),
    ]
    metadata: (
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MOST_PAIRS, description=f"Your own data; at most {MOST_PAIRS} pairs."),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


class FileQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The page of files that a client requests."""

    purpose: Literal["batch", "batch_output"] | None = None
    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE_OF_FILES)] = LARGEST_PAGE_OF_FILES
    order: Annotated[Literal["asc", "desc"], Meta(description="Sort order by creation time.")] = "desc"
    after: Annotated[str | None, Meta(description="The id of the last file of the previous page.")] = None


class BatchQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The page of batches that a client requests."""

    limit: Annotated[int, Meta(ge=1, le=LARGEST_PAGE)] = 20
    after: Annotated[str | None, Meta(description="The id of the last batch of the previous page.")] = None


# The fields of the form of POST /v1/files; the file's bytes are read as a stream.
FILE_FORM: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "JSON Lines with one request per line. Read as a stream.",
        },
        "purpose": {"type": "string", "enum": [BATCH]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": LEAST_LIFETIME_SECONDS,
            "maximum": MOST_LIFETIME_SECONDS,
            "description": "How long to keep the file; VECTORMILL_FILE_RETENTION_DAYS by default.",
        },
    },
}


class CountsBody(TypedDict):
    total: Annotated[int, Meta(description="The number of lines; 0 while they are being read.")]
    completed: int
    failed: int


class FaultBody(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


class FaultList(TypedDict):
    object: Literal["list"]
    data: list[FaultBody]


class BatchUsage(TypedDict):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class BatchBody(TypedDict):
    """A batch, in the same shape wherever the API returns it."""

    id: Annotated[str, Meta(examples=["batch_0123456789abcdef0123456789abcdef"])]
    object: Literal["batch"]
    endpoint: Annotated[str, one_of(ENDPOINTS)]
    model: str | None
    errors: Annotated[
        FaultList | None,
        Meta(description="Why the batch failed; errors of single lines are in its error file."),
    ]
    input_file_id: str
    completion_window: str
    status: Annotated[str, one_of(BATCH_STATES)]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Seconds
    in_progress_at: Seconds | None
    expires_at: Seconds
    finalizing_at: Seconds | None
    completed_at: Seconds | None
    failed_at: Seconds | None
    expired_at: Seconds | None
    cancelling_at: Seconds | None
    cancelled_at: Seconds | None
    request_counts: CountsBody
    usage: BatchUsage
    metadata: dict[str, str] | None
    job_id: Annotated[Identifier | None, Meta(description="Its job, as shown by `/v1/jobs`.")]
    job_state: str | None


def describe_batch(batch: RequestBatch) -> BatchBody:
    """Return the JSON body that describes the batch."""
    num_completed, num_failed = batch.count_lines()
    num_tokens = batch.num_tokens if batch.is_ended else batch.job_tokens or 0
    moments = {
        name: _to_seconds(getattr(batch, name)) for name in BatchBody.__annotations__ if name.endswith("_at")
    }
    return describe(
        BatchBody,
        batch,
        **moments,
        id=batch.name,
        object="batch",
        errors=FaultList(object="list", data=cast(list[FaultBody], batch.errors)) if batch.errors else None,
        input_file_id=name_file(batch.input_file_id),
        status=batch.state,
        output_file_id=None if batch.output_file_id is None else name_file(batch.output_file_id),
        error_file_id=None if batch.error_file_id is None else name_file(batch.error_file_id),
        request_counts=CountsBody(total=batch.num_lines, completed=num_completed, failed=num_failed),
        usage=BatchUsage(
            input_tokens=num_tokens,
            output_tokens=0,
            total_tokens=num_tokens,
            input_tokens_details={"cached_tokens": 0},
            output_tokens_details={"reasoning_tokens": 0},
        ),
        job_id=str(batch.job_id) if batch.job_state is not None else None,
    )


def _to_seconds(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())


class FileBody(TypedDict):
    """A file, in the same shape wherever the API returns it."""

    id: FileId
    object: Literal["file"]
    bytes: int
    created_at: Seconds
    expires_at: Annotated[
        Seconds | None, Meta(description="When it will be removed; null if it does not expire.")
    ]
    filename: str
    purpose: Annotated[str, one_of(PURPOSES)]
    status: Literal["processed"]
    status_details: str | None


def describe_file(file: RequestFile) -> FileBody:
    """Return the JSON body that describes the file."""
    return FileBody(
        id=file.name,
        object="file",
        bytes=file.num_bytes,
        created_at=int(file.created_at.timestamp()),
        expires_at=_to_seconds(file.expires_at),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
        status_details=None,
    )


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class ListPage(TypedDict):
    """A page of a list in OpenAI's format."""

    object: Literal["list"]
    first_id: str | None
    last_id: Annotated[str | None, Meta(description="Pass it as `after` while `has_more` is true.")]
    has_more: bool


class BatchPage(ListPage):
    data: list[BatchBody]


class FilePage(ListPage):
    data: list[FileBody]


Page = TypeVar("Page", BatchPage, FilePage)


def make_page(kind: type[Page], found: Sequence[Any], limit: int) -> Page:
    """Return a page of the first `limit` of the found bodies; a further one sets `has_more`."""
    data = found[:limit]
    page = {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }
    return cast(Page, page)


FILE: Final = "/v1/files/{file_id}"
ONE: Final = "/v1/batches/{batch_id}"

UPLOAD: Final = Operation("POST", "/v1/files", WRITE, FileBody, form=FILE_FORM)
LIST_FILES: Final = Operation("GET", "/v1/files", READ, FilePage, query=FileQuery)
SHOW_FILE: Final = Operation("GET", FILE, READ, FileBody)
READ_FILE: Final = Operation("GET", FILE + "/content", READ, bytes, media_types=(OCTETS,))
# OpenAI's clients cannot confirm it. Ids of files cannot be guessed.
DELETE_FILE: Final = Operation("DELETE", FILE, WRITE, DeletedFile, skips_confirmation=True)

CREATE: Final = Operation(
    "POST", "/v1/batches", WRITE, BatchBody, BatchRequest,
    example={"input_file_id": EXAMPLE_FILE, "endpoint": "/v1/embeddings", "completion_window": "24h"},
)  # fmt: skip
LIST: Final = Operation("GET", "/v1/batches", READ, BatchPage, query=BatchQuery)
SHOW: Final = Operation("GET", ONE, READ, BatchBody)
CANCEL: Final = Operation("POST", ONE + "/cancel", WRITE, BatchBody)

# A client does not retry these when no answer came, since the server itself waits for a worker.
EMBED: Final = Operation(
    "POST", "/v1/embeddings", READ, EmbeddingsAnswer, EmbeddingsRequest,
    example={"input": ["dates", "times"], "encoding_format": "base64"}, is_repeatable=False, is_slow=True,
    other_media_types=(OCTETS,),
)  # fmt: skip
RERANK: Final = Operation(
    "POST", "/v1/rerank", READ, RerankAnswer, RerankRequest, other_answer=VoyageRerankAnswer, is_repeatable=False,
    is_slow=True,
    example={
        "query": "how to parse a date",
        "documents": ["datetime.strptime reads a date.", "zlib compresses bytes."],
        "top_n": 1,
    },
)  # fmt: skip
