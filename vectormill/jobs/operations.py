"""Operations on jobs and their results, with the bodies that API and client exchange, and that of a quote."""

from datetime import datetime
from typing import Annotated, Any, Final, TypedDict

import msgspec
from msgspec import Meta, Struct

from vectormill.domain.encoding import RequestedOptions
from vectormill.domain.options import read_options
from vectormill.files.formats import OUTPUT_FORMATS, InputName, OutputName, RowsName
from vectormill.jobs.job import JOB_STATES, PAUSED, Job, RequestedJob
from vectormill.keys.api_key import READ, WRITE
from vectormill.moments import Moment, format_moment
from vectormill.operation import (
    NO_CONTENT,
    Identifier,
    NextCursor,
    Nothing,
    Operation,
    PageQuery,
    describe,
    one_of,
    struct_of,
)
from vectormill.rows.columns import Columns

MOST_URLS: Final = 1000


class InputBody(Struct, forbid_unknown_fields=True):
    """Objects of a store whose rows are the items of a job. Workers read them; no text goes through the API."""

    urls: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=2000)]],
        Meta(
            min_length=1,
            max_length=MOST_URLS,
            description="Objects, or patterns with `*`, `?` and `**`: s3://, gs://, az:// or file://.",
            examples=[["s3://bucket/articles/*.parquet"]],
        ),
    ]
    text: Annotated[str, Meta(description="The column with the text.")] = "text"
    key: Annotated[
        str | None,
        Meta(description="The column with the key. Without it an item is named by its object and position."),
    ] = None
    text_pair: Annotated[str | None, Meta(description="The column with the second text of a pair.")] = None
    metadata: Annotated[list[str], Meta(description="Columns that are kept with each result.")] = []
    unique: Annotated[
        bool,
        Meta(description="Read all keys first, and refuse the job if two are equal."),
    ] = False
    format: Annotated[InputName | None, Meta(description="Null: by the name of each object.")] = None

    @property
    def columns(self) -> Columns:
        return Columns(self.text, self.key, self.text_pair, tuple(self.metadata))


class InputProgressBody(TypedDict):
    """The objects of a job that an indexer reads, because that takes longer than a request should."""

    state: Annotated[str, Meta(description="waiting, reading, read, failed or cancelled.")]
    num_items: Annotated[int, Meta(description="Rows that were found so far.")]
    num_compared: Annotated[int, Meta(description="Rows whose keys were compared so far, with `unique`.")]
    error: Annotated[
        str | None, Meta(description="Why the objects cannot become a job, or why the last try failed.")
    ]


class OutputBody(TypedDict):
    """The place of a job's results instead of Postgres: a folder, or a table of Iceberg.

    From the state `closed` on the folder has its manifest, or the table the parts.
    """

    url: str
    state: Annotated[str, Meta(description="open, ended, closing, closed, sweeping or swept.")]
    table: Annotated[str | None, Meta(description="The table of Iceberg that gets the results at the end.")]
    error: Annotated[str | None, Meta(description="Why the last try to close or sweep it failed.")]


# Postgres cannot store NUL, nor compare with it.
Storable = Annotated[str, Meta(pattern=r"^[^\u0000]*$")]
DryRun = Annotated[
    bool,
    Meta(
        description="Check everything and answer a quote of what the job would take, with 200; store nothing."
    ),
]
LINES_EXAMPLE: Final = (
    '{"key": "a", "text": "A text."}\n{"key": "b", "text": "Another.", "metadata": {"p": 2}}\n'
)


class ItemBody(Struct, forbid_unknown_fields=True, gc=False):
    """One item: a line of NDJSON, or an entry of `items`."""

    key: Annotated[str, Meta(description="Your own key; unique within the job.", examples=["a"])]
    text: Annotated[
        str | None,
        Meta(
            description="A missing text makes this item fail, and no other.", examples=["A text to encode."]
        ),
    ] = None
    metadata: Annotated[
        dict[str, Any] | None,
        Meta(description="Stored alongside the vector in the collection.", examples=[{"page": 1}]),
    ] = None
    text_pair: Annotated[
        str | None,
        Meta(
            description="The text that `text` is compared with, in a job of the task `score`.",
            examples=["Another text."],
        ),
    ] = None


class OptionsBody(struct_of(RequestedOptions)):  # type: ignore[misc]  # of its fields
    """Encoding options. Options that are left out default to the model's."""

    def requested(self) -> RequestedOptions:
        return RequestedOptions(**read_options(RequestedOptions, self))


class JobRequest(struct_of(RequestedJob)):  # type: ignore[misc]  # of its fields
    """A new job, with all its items or with the objects that have them."""

    items: list[ItemBody] | msgspec.UnsetType = msgspec.UNSET
    input: InputBody | None = None
    options: OptionsBody = msgspec.field(default_factory=OptionsBody)
    metadata: dict[str, Any] | None = None
    dry_run: DryRun = False


class SubmissionQuery(struct_of(RequestedJob, OptionsBody)):  # type: ignore[misc]  # of its fields
    """Query parameters of an NDJSON stream. With a JSON body, they take precedence over it."""

    metadata: Annotated[
        str | None,
        Meta(description="A JSON object to keep with the job.", examples=['{"source":"wiki"}']),
    ] = None
    dry_run: DryRun = False


class JobQuery(PageQuery, kw_only=True):
    """The page of jobs that a client requests."""

    state: Annotated[str | None, Meta(extra_json_schema={"enum": list(JOB_STATES)})] = None
    collection: Annotated[Storable | None, Meta(description="Only jobs that write to this collection.")] = (
        None
    )
    since: Annotated[datetime, Meta(tz=True, description="Only jobs submitted from then on.")] | None = None
    until: Annotated[datetime, Meta(tz=True, description="Only jobs submitted before then.")] | None = None


class ItemQuery(PageQuery, kw_only=True):
    """The page of items that a client requests."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class ExportQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The part of a job's results that a client requests."""

    partial: Annotated[
        bool, Meta(description="Export the available results even if the job has not ended.")
    ] = False
    after: Annotated[
        Annotated[Storable, Meta(max_length=10_000)] | None,
        Meta(
            description="Export only the items after the one with this key, to resume an interrupted ndjson export."
        ),
    ] = None


class VectorQuery(ExportQuery, kw_only=True):
    """The format in which a client requests vectors."""

    format: OutputName = "ndjson"


class ResultQuery(ExportQuery, kw_only=True):
    """The format in which a client requests results other than vectors."""

    format: RowsName = "ndjson"


class StageBody(TypedDict):
    """The time that a job spent in one stage."""

    seconds: Annotated[
        float, Meta(description="Busy time of all workers and threads; for `wait`, waiting time.")
    ]
    share: Annotated[
        float,
        Meta(
            description="Busy time as a share of the time in which a worker held chunks of the job: of the device "
            "for `run`, and of one thread for the others, which may use several."
        ),
    ]


class BottleneckBody(TypedDict):
    """The stage that bounded a job, and how that is known."""

    value: str
    reason: str


class JobBody(TypedDict):
    """A job, in the same shape wherever the API returns it."""

    id: Identifier
    state: Annotated[str, one_of(JOB_STATES)]
    waiting_because: Annotated[
        str | None,
        Meta(
            description="Why the job makes no progress, in a sentence; null while it does and after it has ended."
        ),
    ]
    model: str
    collection: str | None
    priority: int
    num_items: int
    num_done: int
    num_failed: int
    num_chunks: int
    num_retried_chunks: int
    num_tokens: int
    truncated_items: Annotated[int, Meta(description="Items with more than max_tokens that were truncated.")]
    num_passages: Annotated[
        int, Meta(description="Passages into which longer items were split instead of being truncated.")
    ]
    num_reused: Annotated[int, Meta(description="Items or passages that reused the vector of an equal one.")]
    num_repeated: Annotated[
        int,
        Meta(
            description="Items whose row in the collection a later one of the chunk, of equal key, replaced."
        ),
    ]
    created_at: Moment
    started_at: Moment | None
    finished_at: Moment | None
    paused_at: Annotated[Moment | None, Meta(description="Null unless the job is paused.")]
    items_per_second: Annotated[float, Meta(description="The mean since the job started, without pauses.")]
    tokens_per_second: float
    eta_seconds: Annotated[
        float | None,
        Meta(description="At the rate of the last minutes; null while unknown and while the job is paused."),
    ]
    padding_waste: Annotated[
        float, Meta(description="Share of the computed tokens that were padding, 0 to 1.")
    ]
    stages: Annotated[dict[str, StageBody], Meta(description="By stage, in processing order.")]
    bound_by: Annotated[
        BottleneckBody | None,
        Meta(description="The stage that bounded the job, or `queue`; null until its first chunk is done."),
    ]
    stage_seconds: Annotated[
        dict[str, float],
        Meta(
            description="The stored values: the seconds of each stage, and `held` and `device`, on which the shares "
            "are based."
        ),
    ]
    options: Annotated[
        dict[str, Any], Meta(description="The EncodingSpec: everything that determines the vectors.")
    ]
    metadata: dict[str, Any]
    twin_of: Annotated[
        Identifier | None,
        Meta(
            description="The job whose items it encodes again, for a generation built alongside the live one."
        ),
    ]
    input: Annotated[
        InputProgressBody | None,
        Meta(
            description="The objects that an indexer reads into the job; null if the submission has read all."
        ),
    ]
    output: Annotated[
        OutputBody | None, Meta(description="Where the results are in object storage; null if in Postgres.")
    ]


class JobPage(TypedDict):
    """A page of jobs."""

    data: list[JobBody]
    next: NextCursor


class ItemErrorBody(TypedDict):
    """An item that failed, and why."""

    key: str
    code: str
    detail: str


class ItemErrorPage(TypedDict):
    """A page of items that failed."""

    data: list[ItemErrorBody]
    next: NextCursor


class TruncatedItemBody(TypedDict):
    """An item that was truncated."""

    key: str


class TruncatedItemPage(TypedDict):
    """A page of items that were truncated."""

    data: list[TruncatedItemBody]
    next: NextCursor


class SuspectChunkBody(TypedDict):
    """Consecutive items of a job whose results a faulty worker computed, and which cannot be encoded again."""

    id: int
    job_id: Identifier
    collection: str | None
    first_item: Annotated[int, Meta(description="The position in the job of its first item, from 0.")]
    num_items: int
    worker: str | None
    failed_at: Annotated[
        Moment | None, Meta(description="When the worker's proof failed; null if forgotten since.")
    ]
    reason: str | None


class SuspectChunkPage(TypedDict):
    """A page of suspect chunks."""

    data: list[SuspectChunkBody]
    next: NextCursor


class VectorRow(TypedDict):
    """A line of the vectors of a job. The numbers are those of its vector type."""

    key: str
    embedding: list[float]


class ScoreRow(TypedDict):
    """A line of the results of a job that scores.

    `label` is null if the model returns a single number; `probabilities` are keyed by label.
    """

    key: str
    score: float
    label: str | None
    probabilities: dict[str, float]


class RecordRow(TypedDict):
    """A line of the results of a job that extracts."""

    key: str
    output: list[Any]


def describe_job(job: Job, waiting_because: str | None = None) -> JobBody:
    """Return the job as the API returns it, with the reason why it waits, if it does."""
    bottleneck = job.bottleneck
    return describe(
        JobBody,
        job,
        waiting_because=waiting_because,
        model=job.spec.model,
        truncated_items=job.num_truncated,
        paused_at=format_moment(job.paused_at) if job.state == PAUSED else None,
        stages={
            stage: StageBody(seconds=job.stage_seconds[stage], share=share)
            for stage, share in job.stage_shares.items()
        },
        bound_by=None if bottleneck is None else describe(BottleneckBody, bottleneck),
        options=job.spec.describe(),
        input=None
        if job.input_state is None
        else InputProgressBody(
            state=job.input_state,
            num_items=job.input_items or 0,
            num_compared=job.input_compared or 0,
            error=job.input_error,
        ),
        output=None
        if job.output_url is None
        else OutputBody(
            url=job.output_url, state=str(job.output_state), table=job.output_table, error=job.output_error
        ),
    )


class FigureBody(TypedDict):
    """A likely value, and the interval in which it is expected."""

    value: float
    least: float
    most: float


class QuoteBody(TypedDict):
    """A quote says what a job or a re-index would take. Times are null if no live worker has measured its rate."""

    model: str
    rows: FigureBody
    num_sampled: Annotated[int, Meta(description="Rows whose tokens were counted.")]
    tokens_per_row: Annotated[FigureBody, Meta(description="What the model reads of a row, on average.")]
    truncated: Annotated[
        FigureBody, Meta(description="Share of the rows that have more tokens than the model reads at once.")
    ]
    repeated: Annotated[FigureBody, Meta(description="Share of the rows whose text another row has.")]
    kept: Annotated[
        FigureBody | None,
        Meta(
            description="Share of the rows that the collection has with the same text and model. A re-index does not "
            "encode them, a job does. Null without a collection of this model."
        ),
    ]
    tokens: Annotated[FigureBody, Meta(description="Tokens of all rows that would be encoded.")]
    tokens_per_second: Annotated[FigureBody | None, Meta(description="Of all workers together.")]
    seconds: Annotated[FigureBody | None, Meta(description="Until the end, if no other job waits.")]
    queue_seconds: Annotated[FigureBody | None, Meta(description="Of jobs that come before or take turns.")]
    ends_at: Annotated[
        list[Moment] | None,
        Meta(description="When the job would end: likely, at the earliest, at the latest."),
    ]
    host_cores: Annotated[
        FigureBody | None, Meta(description="Cores that tokenize and commit, besides the devices.")
    ]
    rows_bytes: Annotated[FigureBody, Meta(description="Disk for the rows in Postgres.")]
    texts_bytes: Annotated[
        FigureBody, Meta(description="Disk for the job's texts in Postgres until its end.")
    ]
    index_bytes: Annotated[
        FigureBody | None, Meta(description="Memory of the index and of its build, and its disk.")
    ]
    index_seconds: FigureBody | None
    index_reason: Annotated[str, Meta(description="Why there is no index; empty if there is one.")]
    notes: Annotated[list[str], Meta(description="How the figures were found, in sentences.")]


ALL: Final = "/v1/jobs"
ONE: Final = "/v1/jobs/{job_id}"

SUBMIT: Final = Operation(
    "POST", ALL, WRITE, JobBody, JobRequest, SubmissionQuery, ItemBody, status=202, location="/v1/jobs/{id}",
    other_status=200, other_answer=QuoteBody, is_slow=True,
    example={
        "items": [{"key": "a", "text": "A text to encode."}, {"key": "b", "text": "Another one."}],
        "collection": "docs",
        "priority": 5,
        "options": {"long_texts": "truncate"},
    },
    line_example=LINES_EXAMPLE,
)  # fmt: skip
LIST: Final = Operation("GET", ALL, READ, JobPage, query=JobQuery)
SHOW: Final = Operation("GET", ONE, READ, JobBody)
DELETE: Final = Operation("DELETE", ONE, WRITE, Nothing, status=NO_CONTENT)
CANCEL: Final = Operation("POST", ONE + "/cancel", WRITE, JobBody)
PAUSE: Final = Operation("POST", ONE + "/pause", WRITE, JobBody)
RESUME: Final = Operation("POST", ONE + "/resume", WRITE, JobBody)
RETRY: Final = Operation("POST", ONE + "/retry", WRITE, JobBody, is_repeatable=False)
FOLLOW: Final = Operation("GET", ONE + "/events", READ, bytes, media_types=("text/event-stream",))
LIST_ERRORS: Final = Operation("GET", ONE + "/errors", READ, ItemErrorPage, query=ItemQuery)
LIST_TRUNCATED: Final = Operation("GET", ONE + "/truncated", READ, TruncatedItemPage, query=ItemQuery)
EXPORT_VECTORS: Final = Operation(
    "GET", ONE + "/vectors", READ, bytes, query=VectorQuery,
    media_types=tuple(each.media_type for each in OUTPUT_FORMATS.values()),
)  # fmt: skip
EXPORT_RESULTS: Final = Operation(
    "GET", ONE + "/results", READ, bytes, query=ResultQuery,
    media_types=tuple(each.media_type for each in OUTPUT_FORMATS.values() if each.has_keys),
)  # fmt: skip
LIST_SUSPECT: Final = Operation("GET", "/v1/suspect-chunks", READ, SuspectChunkPage, query=PageQuery)
CERTIFY: Final = Operation("GET", ONE + "/certificate", READ, bytes, media_types=("application/x-ndjson",))
