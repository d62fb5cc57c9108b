"""Posting: one attempt to deliver a message over HTTP, to an address that is checked before connecting.

The host name is resolved once, its addresses are checked, and the connection goes to one of these; `Host` and
TLS use the name. So a name server that answers differently a moment later (DNS rebinding) changes nothing.
Independent of Postgres.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from functools import partial
from typing import Final

import httpx
from standardwebhooks import Webhook

from vectormill.problems import read_retry_after
from vectormill.webhooks.webhook import Posting, Reply, refuse_address

USER_AGENT: Final = "Vectormill-Webhooks/1"

# A function from a host and a port to IP addresses as text.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class TargetRefused(httpx.TransportError):
    """The webhook's URL resolves to an address to which nothing may be sent."""


_lock = threading.Lock()
_lookups: Final[dict[tuple[str, int], Future[Sequence[str]]]] = {}


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return all IP addresses of a host name, from the system's resolver. Raise OSError.

    A lookup cannot be cancelled and may hang, so each has a thread of its own, which no end of the process waits for.
    Whoever asks for a name that is being looked up waits for the same lookup: there are no more threads than names.
    """
    with _lock:
        lookup = _lookups.get((host, port))
        if lookup is None:
            lookup = _lookups[host, port] = Future()
            lookup.set_running_or_notify_cancel()  # so that nobody who stops waiting cancels it for the others
            threading.Thread(target=_look_up, args=(host, port, lookup), name="lookup", daemon=True).start()
    return await asyncio.wrap_future(lookup)


def _look_up(host: str, port: int, lookup: Future[Sequence[str]]) -> None:
    try:
        found = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except Exception as error:  # noqa: BLE001 - it is raised where the addresses are awaited
        end = partial(lookup.set_exception, error)
    else:
        end = partial(lookup.set_result, list(dict.fromkeys(str(entry[4][0]) for entry in found)))
    with _lock:
        del _lookups[host, port]
    end()


class CheckedTransport(httpx.AsyncBaseTransport):
    """An HTTP transport that connects only to addresses that it has checked.

    It pools no connections: an open connection to an address could serve another host name there.
    """

    def __init__(
        self, inner: httpx.AsyncBaseTransport, *, allows_private: bool, resolve: Resolve = resolve
    ) -> None:
        self._inner = inner
        self._allows_private = allows_private
        self._resolve = resolve

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(f"Cannot resolve host name {host!r}: {error}.") from error
        for address in addresses:
            reason = refuse_address(address, allows_private=self._allows_private)
            if reason is not None:
                raise TargetRefused(reason)
        request.extensions = {**request.extensions, "sni_hostname": host}
        failure: httpx.ConnectError | None = None
        for address in addresses:
            request.url = request.url.copy_with(host=address)
            try:
                return await self._inner.handle_async_request(request)
            except httpx.ConnectError as error:
                failure = error
        raise failure or httpx.ConnectError(f"Cannot resolve host name {host!r}: no addresses.")

    async def aclose(self) -> None:
        await self._inner.aclose()


class Poster:
    """A sender of webhook messages.

    Each attempt ends within `timeout_seconds` whatever the receiver does. The body of the reply is not read.
    """

    def __init__(self, timeout_seconds: float, *, allows_private: bool, resolve: Resolve = resolve) -> None:
        self._timeout_seconds = timeout_seconds
        self._allows_private = allows_private
        self._resolve = resolve
        self._certificates = ssl.create_default_context()

    async def post(self, posting: Posting) -> Reply:
        """Post a message and return the reply.

        A failed attempt is a reply with an error, and raises nothing.
        """
        now = datetime.now(UTC)  # a receiver refuses messages older than five minutes
        # One signature per secret, so that both work while a secret is rotated.
        signatures = [
            Webhook(secret).sign(posting.message_id, now, posting.payload) for secret in posting.secrets
        ]
        headers = {
            "content-type": "application/json",
            "user-agent": USER_AGENT,
            "webhook-id": posting.message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }
        transport = CheckedTransport(
            httpx.AsyncHTTPTransport(verify=self._certificates, trust_env=False),
            allows_private=self._allows_private,
            resolve=self._resolve,
        )
        try:
            async with (
                asyncio.timeout(self._timeout_seconds),
                httpx.AsyncClient(
                    transport=transport, timeout=self._timeout_seconds, trust_env=False
                ) as client,
                client.stream(
                    "POST",
                    posting.url,
                    content=posting.payload.encode(),
                    headers=headers,
                    follow_redirects=False,
                ) as response,
            ):
                asked = read_retry_after(response.headers, datetime.now(UTC))
                return Reply(response.status_code, retry_after=asked)
        except TimeoutError:
            return Reply(None, f"No answer within {self._timeout_seconds:g} s.")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Reply(None, str(error) or f"The connection failed ({type(error).__name__}).")
        except Exception as error:  # noqa: BLE001 - an odd failure of one receiver must not stop the others
            return Reply(None, f"The message could not be sent ({type(error).__name__}: {error}).")
