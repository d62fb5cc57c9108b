"""Sessions: the sealed cookie that a browser keeps instead of a key, and CSRF tokens.

The server stores no sessions. The cookie holds the key, sealed under the key's own hash
(docs/decisions/0032). The cookie alone reveals no key; the table of hashes alone is not enough to forge a
cookie; and once the key is revoked and its hash deleted, the cookie is noise. A changed cookie does not
decrypt to a key.
"""

import hashlib
import hmac
import secrets
import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from collections.abc import Sequence
from typing import Final

from vectormill.keys.api_key import hash_secret
from vectormill.keys.api_keys import CachedKey

SESSION_COOKIE: Final = "vectormill_console"
# The key has to be entered again this long after a login.
SESSION_SECONDS: Final = 12 * 3600
NONCE_BYTES: Final = 16
# The key's id, the end of the session (seconds since 1970), and a nonce.
HEAD: Final = struct.Struct(f">QQ{NONCE_BYTES}s")
# A key has up to 132 letters, so a longer cookie is rejected before base64 is decoded.
MAX_LETTERS: Final = 400


def seal_session(key: CachedKey, secret: str, now: float) -> str:
    """Return the session cookie. `secret` is the secret of `key`; `now` is in seconds since 1970."""
    head = HEAD.pack(key.id, int(now) + SESSION_SECONDS, secrets.token_bytes(NONCE_BYTES))
    return urlsafe_b64encode(head + _mask(secret.encode(), key.hash, head)).decode()


def open_session(keys: Sequence[CachedKey], cookie: str, now: float) -> CachedKey | None:
    """Return the key with which the session began; None when it has expired, is invalid, or its key is gone."""
    if len(cookie) > MAX_LETTERS:
        return None
    try:
        sealed = urlsafe_b64decode(cookie.encode("ascii"))
    except (NotBase64, ValueError):
        return None
    if len(sealed) <= HEAD.size:
        return None
    head, rest = sealed[: HEAD.size], sealed[HEAD.size :]
    key_id, ends_at, _ = HEAD.unpack(head)
    key = next((key for key in keys if key.id == key_id), None)
    if key is None or key.is_expired or ends_at <= now:
        return None
    secret = _mask(rest, key.hash, head).decode("utf-8", "surrogateescape")
    return key if hmac.compare_digest(hash_secret(secret), key.hash) else None


def _mask(content: bytes, key_hash: bytes, head: bytes) -> bytes:
    """Return content XOR a keystream of HMAC-SHA-256 in counter mode. Applied twice, it returns the content.

    The keystream is derived from `key_hash` and `head`.
    """
    stream = b""
    while len(stream) < len(content):
        block = len(stream).to_bytes(4) + head
        stream += hmac.digest(key_hash, b"vectormill console session" + block, hashlib.sha256)
    return bytes(ours ^ theirs for ours, theirs in zip(content, stream, strict=False))


VISIT_COOKIE: Final = "vectormill_visit"


def make_csrf_token(cookie: str) -> str:
    """Return the CSRF token of a cookie. Only our pages know it, because no script can read the cookie."""
    return hmac.digest(cookie.encode(), b"vectormill console csrf", hashlib.sha256).hex()
