"""Build requests of the client, explain their failures, and decide when to retry them. Sends none itself."""

import json
import random
import re
import ssl
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from vectormill.addresses import is_loopback_host
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.domain.options import list_options
from vectormill.jobs.job import RequestedJob
from vectormill.problems import ApiError, ApiUnreachable
from vectormill.settings import read_api_key, read_data_dir

DEFAULT_URL: Final = "http://127.0.0.1:8000"
# While the server commits a large upload it may send nothing for minutes, which is not a failure.
LONG_SILENCE_SECONDS: Final = 600.0
JSON_HEADERS: Final = {"Content-Type": "application/json"}
NDJSON_HEADERS: Final = {"Content-Type": "application/x-ndjson"}

Json = dict[str, Any]


class Keyed(msgspec.Struct):
    """A line of NDJSON of which only the key is decoded; other fields are skipped."""

    key: str


def find_last_key(lines: bytes) -> str:
    """Return the key of the last of these complete NDJSON lines."""
    return msgspec.json.decode(lines.rpartition(b"\n")[2], type=Keyed).key


def find_timeout(seconds: float, *, silence: float = 0.0) -> httpx.Timeout:
    """Return a time-out for each single wait for the server, not for the whole transfer."""
    return httpx.Timeout(max(seconds, silence), connect=min(seconds, 10.0))


def describe_connection(base_url: str, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of an httpx client. Without a key it is that of the environment or of the own stack.

    Raise VectormillError if the API key cannot be sent in a header.
    """
    return {
        "base_url": base_url,
        "headers": _authorization(api_key or read_api_key() or find_stack_key(base_url)),
        # Reading the system's certificates takes 0.1 s and plain HTTP needs none. Redirects are not
        # followed, and without certificates no TLS server would be trusted.
        "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if base_url.startswith("http:") else True,
        # A proxy named in the environment cannot reach this machine's loopback.
        "trust_env": not is_loopback(base_url),
    }


def explain(error: httpx.HTTPError, base_url: str, method: str, path: str) -> VectormillError:
    """Convert an httpx error to an error of this package, whose sentence says what to do."""
    if isinstance(error, httpx.ConnectError):
        return ApiUnreachable(
            f"No Vectormill API answers at {base_url}. Start one with `vectormill up`, or name another with --api-url "
            "or VECTORMILL_API_URL."
        )
    if isinstance(error, httpx.TimeoutException):
        return ApiUnreachable(f"{base_url} did not answer {method} {path} in time.")
    if isinstance(error, httpx.UnsupportedProtocol):
        return VectormillError(f"{base_url!r} is not a URL: it must start with http:// or https://.")
    return ApiUnreachable(f"The connection to {base_url} broke during {method} {path}: {error}.")


def _authorization(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable():
        raise VectormillError("The API key contains invalid characters. Was it copied completely?")
    return {"Authorization": f"Bearer {api_key.strip()}"}


def write_json(value: Any) -> bytes:
    """Encode a value as JSON. Raise InvalidOption if JSON cannot express the value.

    A lone surrogate is sent escaped, so that the server can say where it is.
    """
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidOption(f"The request cannot be encoded as JSON: {error}.") from error
    try:
        return written.encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def is_loopback(url: str) -> bool:
    """Return whether the URL's host is a loopback address."""
    return is_loopback_host(httpx.URL(url).host)


def find_stack_key(url: str) -> str | None:
    """Return the own key of the stack on the data directory, if its API has this address and needs one."""
    path = read_data_dir()
    with suppress(OSError, ValueError):
        if '"api_key"' in (path / "stack.json").read_text(encoding="utf-8"):
            from vectormill.embedded.data_dir import find_running  # imported late, since few need it

            stack = find_running(path)
            return stack.api_key if stack is not None and stack.api_url == url else None
    return None


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def nest(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the options of a job as a body has them: those of its encoding are an object of their own, `name`."""
    known, said = {option.name for option in list_options(RequestedJob)}, given(options)
    inner = {each: said.pop(each) for each in set(said) - known}
    return {**said, name: inner}


def describe_objects(
    urls: str | Sequence[str],
    text: str | None,
    key: str | None,
    pair: str | None,
    metadata: Mapping[str, Any] | Sequence[str] | None,
    format: str | None,
    *,
    unique: bool = False,
) -> dict[str, Any]:
    """Return the input of a job that names objects and their columns."""
    return given(
        {
            "urls": [urls] if isinstance(urls, str) else list(urls),
            "text": text,
            "key": key,
            "text_pair": pair,
            "metadata": None if metadata is None or isinstance(metadata, Mapping) else list(metadata),
            "format": format,
            "unique": unique or None,
        }
    )


@dataclass(slots=True)
class Export:
    """A response body to fetch: its path, parameters and format, and why it broke off, if it did.

    `answered` keeps the status of the first answers and the generation that they named.
    """

    path: str
    parameters: Mapping[str, Any]
    format: str
    broken: str | None = None
    answered: dict[str, str] = field(default_factory=dict)


def make_key_header(idempotency_key: str | None) -> dict[str, str]:
    """Return an Idempotency-Key header, which makes a request safe to repeat.

    A key is generated if none is given.
    """
    return {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}


def fill_path(path: str, *places: object) -> str:
    """Return the operation's path with these values, percent-encoded, in place of its names in braces."""
    return re.sub(r"{[^}]+}", "{}", path).format(*map(quote_segment, places))


def quote_segment(place: object) -> str:
    """Percent-encode a segment of a path. "." and ".." are encoded too, because they would name a folder."""
    part = str(place)
    return part.replace(".", "%2E") if part in (".", "..") else quote(part, safe="")


# The limit for the sum of a call's pauses is longer than `vectormill up` needs to restart its API.
DEFAULT_SECONDS: Final = 6.0
FIRST_SECONDS: Final = 0.2
LONGEST_SECONDS: Final = 30.0
# The share of a pause that is added at random, so that clients refused together do not retry together.
JITTER_SHARE: Final = 0.25
RETRIED_STATUS: Final = (429, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Retries:
    """The retry policy of a client.

    `most_seconds` bounds the sum of a call's pauses; `chance` returns a random number from 0 to 1.
    """

    most_seconds: float = DEFAULT_SECONDS
    chance: Callable[[], float] = random.random

    def begin(self) -> "Pauses":
        """Return a new sequence of pauses, for one call or for a retry after progress was made."""
        return Pauses(self)


class Pauses:
    """The backoff of one call: each pause is twice as long as the one before, and at least `Retry-After`."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self._next = FIRST_SECONDS
        self._left = retries.most_seconds

    def before_next(self, error: ApiError | ApiUnreachable) -> float | None:
        """Return the seconds to wait before the next attempt; None if a retry is useless or too late."""
        if isinstance(error, ApiError) and error.status not in RETRIED_STATUS:
            return None
        asked = (error.retry_after or 0.0) if isinstance(error, ApiError) else 0.0
        if self._left <= 0 or asked > self._left:
            return None
        pause = max(self._next, asked) * (1 + JITTER_SHARE * self._retries.chance())
        pause = min(pause, self._left)
        self._left -= pause
        self._next = min(2 * self._next, LONGEST_SECONDS)
        return pause
