"""Operations on jobs and their results."""

from typing import Final

from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.jobs.bodies import (
    LINES_EXAMPLE,
    ItemBody,
    ItemErrorPage,
    ItemQuery,
    JobBody,
    JobPage,
    JobQuery,
    JobRequest,
    ResultQuery,
    SubmissionQuery,
    SuspectChunkPage,
    TruncatedItemPage,
    VectorQuery,
)
from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import NO_CONTENT, Nothing, Operation, PageQuery
from vectormill.quotes.bodies import QuoteBody

ALL: Final = "/v1/jobs"
ONE: Final = "/v1/jobs/{job_id}"

SUBMIT: Final = Operation(
    "POST", ALL, WRITE, JobBody, JobRequest, SubmissionQuery, ItemBody, status=202, location="/v1/jobs/{id}",
    other_status=200, other_answer=QuoteBody,
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
