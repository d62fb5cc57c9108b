"""Machine: the users of the machine that an API on the loopback runs on, who share its addresses.

Linux tells which user has opened the other end of a connection; it is asked once for each connection. Elsewhere, and
through a proxy, it is not known, and the key that `vectormill up` has made for itself takes its place.
"""

import hmac
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from starlette.types import Scope

from api.problems import Problem
from vectormill.addresses import is_loopback_host
from vectormill.keys.api_key import ADMIN, hash_secret
from vectormill.keys.api_keys import CachedKey
from vectormill.keys.own_key import OWN_KEY, TICKET_SECONDS, make_ticket, read_own_key
from vectormill.settings import Settings

# The entry of a request's ASGI scope that holds the user at the other end of its connection, or None.
USER: Final = "vectormill.user"
# A request with one of these headers was forwarded by a proxy, so that its connection says nothing about its sender.
FORWARDED: Final = frozenset(
    (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip")
)

# Linux, sock_diag(7): the request names one socket by its addresses, and the answer describes it.
ASK: Final = struct.Struct("=IHHII BBBxI 2s2s 16s16s III")
ANY_STATE, ANY_INTERFACE, ANY_COOKIE = 0xFFFFFFFF, 0, (0xFFFFFFFF, 0xFFFFFFFF)
SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, TCP_CLOSE = 4, 20, 1, 7
ANSWER: Final = struct.Struct("=IHHII BBBB 48x III I I")
# One of a user of another namespace has this user. A socket that was closed may have the user 0, but has no inode.
OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")


def find_user(own: Any, peer_address: Sequence[Any], own_address: Sequence[Any]) -> int | None:
    """Return the user who has opened the other end of this connection; None if that is not known.

    `own` is the socket of this end.
    """
    if sys.platform != "linux":
        return None
    ends = (peer_address, own_address)
    try:
        request = ASK.pack(
            ASK.size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0, own.family, socket.IPPROTO_TCP, 0, ANY_STATE,
            *(each[1].to_bytes(2) for each in ends), *(socket.inet_pton(own.family, each[0]) for each in ends),
            ANY_INTERFACE, *ANY_COOKIE,
        )  # fmt: skip
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, SOCK_DIAG) as asking:
            asking.setblocking(False)  # the kernel answers within the call
            asking.send(request)
            answer = asking.recv(4096)
        _, kind, *_, uid, inode = ANSWER.unpack_from(answer)
        # While this end is open, no other socket can have taken the other one's place.
        is_open = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_CLOSE
        if kind != SOCK_DIAG_BY_FAMILY or not inode or not is_open or uid == int(OVERFLOW_UID.read_bytes()):
            return None
        return int(uid)
    except (OSError, ValueError, struct.error):
        return None


class MachineUsers:
    """The users who need no key of the database while none exists: whoever runs this API, and root.

    There are none unless only this machine can connect, as `is_local` says.
    """

    def __init__(self, settings: Settings) -> None:
        self.is_local = is_loopback_host(settings.api_host)
        self._is_open = settings.open_loopback
        self._began = time.time()
        # The key that `vectormill up` has made, if there is one; empty otherwise.
        self.secret = (read_own_key(settings.data_dir.expanduser()) if self.is_local else None) or ""
        own = CachedKey(OWN_KEY, "up", hash_secret(self.secret), ADMIN, is_expired=False, is_use_due=False)
        self.keys: Sequence[CachedKey] = (own,) if self.secret else ()
        self._redeemed: set[str] = set()

    def admits(self, scope: Scope) -> bool:
        """Return whether a request comes from the user who runs this API, or from root."""
        if not self.is_local or self._is_open:
            return self.is_local
        return find_uid(scope) in (os.geteuid(), 0)

    def describe_refusal(self, scope: Scope) -> Problem:
        """Return the problem of a request that is not admitted."""
        uid = find_uid(scope)
        whose = (
            "and cannot tell whose request this is (a proxy forwarded it, or the system does not say)"
            if uid is None
            else f"and this request comes from another one (uid {uid})"
        )
        own = "can send the key in the file api.key of the data directory, " if self.keys else ""
        return Problem(
            401,
            "other-user",
            f"This API has no keys yet and serves only the user who runs it, {whose}. That user {own}can create a key "
            "for others with `vectormill keys create NAME`, or can let in every user of the machine with "
            "`vectormill up --open`.",
            headers={"WWW-Authenticate": 'Bearer realm="vectormill"'},
        )

    def redeem(self, ticket: str) -> bool:
        """Return True, once, for a ticket that `vectormill up` has printed within the last minutes."""
        written = ticket.partition(".")[0]
        if not self.keys or not (written.isdecimal() and len(written) < 12) or ticket in self._redeemed:
            return False
        is_fresh = max(self._began - 1, time.time() - TICKET_SECONDS) < int(written)
        is_own = hmac.compare_digest(ticket.encode(), make_ticket(self.secret, int(written)).encode())
        if is_fresh and is_own:
            self._redeemed.add(ticket)
        return is_fresh and is_own


def find_uid(scope: Scope) -> int | None:
    """Return the user who sent a request; None if that is not known, or somebody forwarded it."""
    return None if any(name in FORWARDED for name, _ in scope["headers"]) else scope.get(USER)
