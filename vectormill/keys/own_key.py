"""The own key of a stack: a file that only the user of `vectormill up` can read, for where users cannot be told apart.

It is valid on the loopback alone, and only while the database has no keys.
"""

import hashlib
import hmac
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from vectormill.files.outputs import open_replacement
from vectormill.keys.api_key import SECRET, make_secret

OWN_KEY_FILE: Final = "api.key"
# The id of the own key, which no key of the database has.
OWN_KEY: Final = 0
OPEN_TO_ALL: Final = (
    "every user of this machine, and whoever a proxy on it lets through, may do everything without a key, and read and "
    "write files as the user who runs the API; `vectormill keys create NAME` closes it"
)
# How long a ticket signs a browser in.
TICKET_SECONDS: Final = 600


def read_own_key(data_dir: Path) -> str | None:
    """Return the key in the file; None if there is none, or if another user could have written or read it."""
    with suppress(OSError, ValueError):
        descriptor = os.open(data_dir / OWN_KEY_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, encoding="ascii") as file:
            status = os.fstat(descriptor)
            secret = file.read(1024).strip()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077 and SECRET.fullmatch(secret):
            return secret
    return None


def make_own_key(data_dir: Path) -> str:
    """Return the key in the file, which is made if there is none."""
    secret = read_own_key(data_dir)
    if secret is None:
        secret = make_secret()
        with open_replacement(data_dir / OWN_KEY_FILE, is_private=True, follows_links=False) as file:
            file.write(f"{secret}\n".encode())
    return secret


def make_ticket(secret: str, now: int) -> str:
    """Return what signs one browser in, within TICKET_SECONDS of `now` (seconds since 1970)."""
    return f"{now}.{hmac.digest(secret.encode(), f'vectormill ticket {now}'.encode(), hashlib.sha256).hex()}"
