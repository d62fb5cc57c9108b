"""Cursors: the opaque `next` of a page. Clients hand it back as `after` and never look inside."""

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.problems import Place, Problem
from vectormill.operation import CURSOR

After = Annotated[
    str | None,
    Field(
        description="The `next` of the page before.",
        # Not pydantic's own check, whose message would not say what a cursor is.
        json_schema_extra={"anyOf": [{"type": "string", "pattern": f"^{CURSOR}$"}, {"type": "null"}]},
    ),
]


class PageFilter(BaseModel):
    """The page of a list that a client asks for."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(default=50, ge=1, le=200)
    after: After = None


def encode_cursor(position: int) -> str:
    return f"{position:016x}"


def decode_cursor(cursor: str | None) -> int | None:
    """The position behind which the page starts; None is the first page. Raises Problem."""
    if cursor is None:
        return None
    if not re.fullmatch(CURSOR, cursor):
        detail = "after must be the next of an earlier page, unchanged."
        raise Problem(422, "invalid-cursor", detail, errors=[Place(detail, parameter="after")])
    return int(cursor, 16)
