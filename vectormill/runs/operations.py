"""Operations on runs."""

from typing import Final

from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import Operation, PageQuery
from vectormill.quotes.bodies import QuoteBody
from vectormill.runs.bodies import RunBody, RunPage, RunRequest

ONE: Final = "/v1/runs/{id}"
ALL_OF: Final = "/v1/collections/{name}/runs"

START: Final = Operation(
    "POST", ALL_OF, WRITE, RunBody, RunRequest, status=202, location=ONE, other_status=200, other_answer=QuoteBody,
    example={"kind": "reindex", "options": {"confirm": False}},
)  # fmt: skip
LIST: Final = Operation("GET", "/v1/runs", READ, RunPage, query=PageQuery)
LIST_OF: Final = Operation("GET", ALL_OF, READ, RunPage, query=PageQuery)
SHOW: Final = Operation("GET", "/v1/runs/{run_id}", READ, RunBody)
CANCEL: Final = Operation("POST", "/v1/runs/{run_id}/cancel", WRITE, RunBody)
CONFIRM: Final = Operation("POST", "/v1/runs/{run_id}/confirm", WRITE, RunBody, is_repeatable=False)
