"""Operations on schedules."""

from typing import Final

from vectormill.keys.api_key import READ, WRITE
from vectormill.operation import NO_CONTENT, Nothing, Operation, PageQuery
from vectormill.schedules.bodies import (
    ScheduleBody,
    ScheduleChange,
    ScheduledRunBody,
    ScheduledRunPage,
    SchedulePage,
    ScheduleRequest,
)

ALL: Final = "/v1/schedules"
ONE: Final = "/v1/schedules/{name}"

# Creating a schedule is not retried, because the second attempt would conflict with the result of the first.
CREATE: Final = Operation(
    "POST", ALL, WRITE, ScheduleBody, ScheduleRequest, status=201, location=ONE, is_repeatable=False,
    example={"collection": "docs", "cron": "0 2 * * *", "timezone": "Europe/Berlin", "overlap": "skip"},
)  # fmt: skip
LIST: Final = Operation("GET", ALL, READ, SchedulePage, query=PageQuery)
SHOW: Final = Operation("GET", ONE, READ, ScheduleBody)
CHANGE: Final = Operation("PATCH", ONE, WRITE, ScheduleBody, ScheduleChange, example={"cron": "30 4 * * *"})
DELETE: Final = Operation("DELETE", ONE, WRITE, Nothing, status=NO_CONTENT)
PAUSE: Final = Operation("POST", ONE + "/pause", WRITE, ScheduleBody)
RESUME: Final = Operation("POST", ONE + "/resume", WRITE, ScheduleBody)
RUN: Final = Operation("POST", ONE + "/run", WRITE, ScheduledRunBody, status=202)
HISTORY: Final = Operation("GET", ONE + "/runs", READ, ScheduledRunPage, query=PageQuery)
