"""Transport: requests to one API, repeated where that does no harm; errors of httpx become errors of this package."""

import json
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from vectormill.addresses import is_loopback_host
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.problems import ApiError, ApiUnreachable, read_problem
from vectormill.settings import read_api_key

DEFAULT_URL: Final = "http://127.0.0.1:8000"
# A server may be silent for minutes while it commits a large upload: that is no failure.
LONG_SILENCE_SECONDS: Final = 600.0
# Waits before each new attempt: 6 s together, which is longer than `vectormill up` needs to restart its API.
RETRY_PAUSES: Final = (0.2, 0.4, 0.8, 1.6, 3.0)
RETRIED_STATUS: Final = (429, 502, 503, 504)
JSON_HEADERS: Final = {"Content-Type": "application/json"}

Json = dict[str, Any]


class Transport:
    """What the methods of a client share. Knows no route."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        timeout: float = 30.0,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.pause_for = pause
        self._has_answered = False
        self.short_timeout = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self.long_timeout = httpx.Timeout(max(timeout, LONG_SILENCE_SECONDS), connect=min(timeout, 10.0))
        try:
            # A proxy of the environment cannot reach this machine's own loopback.
            self._http = httpx.Client(
                base_url=self.base_url,
                timeout=self.short_timeout,
                headers=_authorization(api_key or read_api_key()),
                transport=transport,
                # Reading the system's certificates takes a tenth of a second, and plain HTTP needs none: redirects
                # are not followed, and without certificates no other server would be trusted.
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if self.base_url.startswith("http:") else True,
                trust_env=not is_loopback(self.base_url),
            )
        except httpx.InvalidURL as error:
            raise VectormillError(f"{base_url!r} is not a URL: {error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, *, is_repeatable: bool = True, **request: Any) -> Json:
        """The answer's object. `json` is sent as the body. Raises InvalidOption for what JSON cannot say."""
        make_body = request.pop("content", None)
        if "json" in request:
            body, make_body = write_json(request.pop("json")), lambda: body
            request["headers"] = JSON_HEADERS | request.get("headers", {})
        for pause in (*RETRY_PAUSES, None):
            content = {} if make_body is None else {"content": make_body()}
            try:
                with self.answered(method, path, **request, **content) as response:
                    response.read()
                    answer: Json = {} if response.status_code == 204 else response.json()
                    return answer
            except ApiError as error:
                if pause is None or not is_repeatable or error.status not in RETRIED_STATUS:
                    raise
            except ApiUnreachable:
                if pause is None or not is_repeatable or not self._has_answered:
                    raise
            except ValueError as error:
                raise ApiUnreachable(
                    f"{self.base_url} answered something that is not JSON; is it Vectormill?"
                ) from error
            self.pause_for(pause)
        raise AssertionError("the last attempt returns or raises")

    def pages(self, path: str, parameters: Mapping[str, Any]) -> Iterator[Json]:
        cursor = None
        while True:
            page = self.call("GET", path, params=given({**parameters, "after": cursor}))
            yield from page["data"]
            cursor = page.get("next")
            if cursor is None:
                return

    @contextmanager
    def answered(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        """The response to one request, its body unread. Errors of httpx become errors of this module."""
        try:
            with self._http.stream(method, path, **request) as response:
                self._has_answered = True
                if not response.is_success:
                    raise read_problem(response.status_code, response.reason_phrase, response.read())
                yield response
        except httpx.ConnectError as error:
            raise ApiUnreachable(
                f"No Vectormill API answers at {self.base_url}. Start one with `vectormill up`, or name "
                "another with --api-url or VECTORMILL_API_URL."
            ) from error
        except httpx.TimeoutException as error:
            raise ApiUnreachable(f"{self.base_url} did not answer {method} {path} in time.") from error
        except httpx.UnsupportedProtocol as error:
            raise VectormillError(
                f"{self.base_url!r} is not a URL: it must start with http:// or https://."
            ) from error
        except httpx.HTTPError as error:
            raise ApiUnreachable(
                f"The connection to {self.base_url} broke during {method} {path}: {error}."
            ) from error


def _authorization(api_key: str | None) -> dict[str, str]:
    """Raises VectormillError for a key that no header can carry."""
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise VectormillError("The API key has characters that no key has; was it copied whole?")
    return {"Authorization": f"Bearer {api_key.strip()}"}


def write_json(value: Any) -> bytes:
    """Half of a surrogate pair travels escaped, so that the server can say where it is. Raises InvalidOption."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return written.encode() if is_unicode(written) else json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"What is to be sent cannot be said in JSON: {error}.") from error


def is_unicode(written: str) -> bool:
    try:
        written.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_loopback(url: str) -> bool:
    """Whether the URL names this machine's own loopback."""
    return is_loopback_host(httpx.URL(url).host)


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def make_path(*parts: str) -> str:
    return parts[0] + "".join("/" + _quote(part) for part in parts[1:])


def _quote(part: str) -> str:
    """Percent-encoded; dots alone too, which would mean the place above."""
    return part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="")
