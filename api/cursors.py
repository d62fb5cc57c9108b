"""Cursors: the opaque `next` of a page. Clients hand it back as `after` and never look inside."""

import base64
import binascii

from api.problems import Place, Problem


def encode_cursor(position: int) -> str:
    return base64.urlsafe_b64encode(b"%d" % position).decode().rstrip("=")


def decode_cursor(cursor: str | None) -> int | None:
    """The position behind which the page starts; None is the first page. Raises Problem."""
    if cursor is None:
        return None
    try:
        position = int(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        position = -1
    if not 0 <= position < 2**63:
        detail = "after must be the next of an earlier page, unchanged."
        raise Problem(422, "invalid-cursor", detail, errors=[Place(detail, parameter="after")])
    return position
