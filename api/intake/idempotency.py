"""The header Idempotency-Key, for the routes whose requests may be made again."""

import re
from typing import Annotated, Final

from fastapi import Depends, Header, Request

from api.door.keys import KEY_ID
from api.problems import Place, Problem
from vectormill.db.idempotency import own_idempotency_key

SENDABLE: Final = re.compile(r"[\x20-\x7e]{1,255}")
# Visible ASCII characters, and spaces between them.
KEY_PATTERN: Final = "^[!-~]([ -~]{0,253}[!-~])?$"


async def read_idempotency_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="A repeated key with the same content answers what the first request has made, never a second.",
            json_schema_extra={"anyOf": [{"type": "string", "pattern": KEY_PATTERN}, {"type": "null"}]},
        ),
    ] = None,
) -> str | None:
    """Return the Idempotency-Key as it is kept, which tells the API keys apart. Raise Problem."""
    if idempotency_key is None:
        return None
    if not SENDABLE.fullmatch(idempotency_key):
        detail = "Idempotency-Key must have 1 to 255 visible ASCII characters."
        raise Problem(422, "invalid-request", detail, errors=[Place(detail, header="Idempotency-Key")])
    return own_idempotency_key(idempotency_key, request.scope.get(KEY_ID))


IdempotencyKey = Annotated[str | None, Depends(read_idempotency_key)]
