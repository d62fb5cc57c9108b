"""The header Idempotency-Key, for routes whose requests clients may safely retry."""

import re
from typing import Annotated, Final

from fastapi import Depends, Header, Request

from api.door.keys import find_key_id
from api.problems import refuse
from vectormill.db.idempotency import own_idempotency_key

SENDABLE: Final = re.compile(r"[\x20-\x7e]{1,255}")
# A key has 1 to 255 visible ASCII characters, with spaces between them.
KEY_PATTERN: Final = "^[!-~]([ -~]{0,253}[!-~])?$"


async def read_idempotency_key(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            description="Repeating a request with the same key and content returns what the first one "
            "created, and never creates a second.",
            json_schema_extra={"anyOf": [{"type": "string", "pattern": KEY_PATTERN}, {"type": "null"}]},
        ),
    ] = None,
) -> str | None:
    """Return the Idempotency-Key as stored, distinct for each API key, or None. Raise Problem if it is malformed."""
    if idempotency_key is None:
        return None
    if not SENDABLE.fullmatch(idempotency_key):
        reason = "Idempotency-Key must have 1 to 255 visible ASCII characters."
        raise refuse(reason, header="Idempotency-Key")
    return own_idempotency_key(idempotency_key, find_key_id(request))


IdempotencyKey = Annotated[str | None, Depends(read_idempotency_key)]
