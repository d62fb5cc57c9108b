# Made of the same file in `aio` by `python -m tools.client`: change that one.
"""Transport: requests to one API, retried where that is safe. httpx errors become errors of this package."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Self, TypeVar, cast

import httpx
import msgspec

from vectormill.client.requests import (
    DEFAULT_SECONDS,
    DEFAULT_URL,
    JSON_HEADERS,
    LONG_SILENCE_SECONDS,
    Pauses,
    Retries,
    describe_connection,
    explain,
    fill_path,
    find_last_key,
    find_timeout,
    given,
    quote_segment,
    write_json,
)
from vectormill.client.sync import flow
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.operation import CONFIRMATION, NO_CONTENT, Operation
from vectormill.problems import ApiError, ApiUnreachable, WaitTimeout, read_problem
from vectormill.settings import read_api_url

Answer = TypeVar("Answer")
# Takes the key of the last line received; yields the body that follows that line.
OpenParts = Callable[[str | None], Iterator[bytes]]


class Transport:
    """The connection that all methods of a client share. Contains no routes."""

    def __init__(
        self,
        base_url: str | None = None,
        timeout: float = 30.0,
        *,
        api_key: str | None = None,
        retry_seconds: float = DEFAULT_SECONDS,
        transport: flow.HttpTransport | None = None,
        pause: flow.Pause = flow.pause,
    ) -> None:
        self.base_url = (base_url or read_api_url() or DEFAULT_URL).rstrip("/")
        self.pause_for = pause
        self.retries = Retries(retry_seconds)
        self._has_answered = False
        self.short_timeout = find_timeout(timeout)
        self.long_timeout = find_timeout(timeout, silence=LONG_SILENCE_SECONDS)
        try:
            self._http = flow.make_http(
                transport,
                timeout=self.short_timeout,
                **describe_connection(self.base_url, api_key),
            )
        except httpx.InvalidURL as error:
            raise VectormillError(f"{self.base_url!r} is not a URL: {error}.") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def ask(
        self,
        operation: Operation[Answer],
        *places: object,
        body: msgspec.Struct | Mapping[str, Any] | None = None,
        make_body: Callable[[], Any] | None = None,
        params: Mapping[str, Any] | None = None,
        is_repeatable: bool | None = None,
        **request: Any,
    ) -> Answer:
        """Call an operation and return its answer.

        `places` fill the placeholders of its path, in their order. The body is `body` as JSON, or else what `make_body`
        returns; fields and parameters that are None are left out. Raise InvalidOption for a value that JSON cannot
        express.
        """
        if body is not None:
            written = write_json(
                msgspec.to_builtins(body) if isinstance(body, msgspec.Struct) else given(body)
            )
            make_body = lambda: written  # noqa: E731
            request["headers"] = JSON_HEADERS | dict(request.get("headers", {}))
        if operation.is_slow:
            request.setdefault("timeout", self.long_timeout)
        if operation.is_confirmed:
            request["headers"] = {CONFIRMATION: quote_segment(places[-1])}
        if is_repeatable is None:
            is_repeatable = operation.is_repeatable
        path, request["params"] = fill_path(operation.path, *places), given(params or {})
        pauses = self.retries.begin()
        while True:
            content = {} if make_body is None else {"content": make_body()}
            try:
                with self.answered(operation.method, path, **request, **content) as response:
                    response.read()
                    said: Answer = {} if response.status_code == NO_CONTENT else response.json()
                    return said
            except (ApiError, ApiUnreachable) as error:
                is_hopeful = self._has_answered or isinstance(error, ApiError)
                self.pause_after(error, pauses if is_repeatable and is_hopeful else None)
            except (UnicodeEncodeError, httpx.InvalidURL) as error:
                raise InvalidOption(f"The request cannot be written as a URL: {error}.") from error
            except ValueError as error:
                raise ApiUnreachable(
                    f"{self.base_url} did not answer with JSON. Is it a Vectormill API?"
                ) from error

    def _poll(
        self,
        noun: str,
        operation: Operation[Answer],
        identifier: str,
        ends: Sequence[str],
        lookers: Sequence[Callable[[Any], None]],
        poll_seconds: float,
        timeout_seconds: float | None,
    ) -> Answer:
        """Show a job or a run to the lookers until its state is among `ends`, and return it. Raise WaitTimeout."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            answer: Any = self.ask(operation, identifier)
            for look in lookers:
                look(answer)
            if answer["state"] in ends:
                return cast(Answer, answer)
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"{noun} {identifier} is still {answer['state']} after {timeout_seconds:g} s; it continues."
                )
            self.pause_for(poll_seconds)

    def pages(
        self, record: type[Answer], operation: Operation[Any], *places: object, **parameters: Any
    ) -> Iterator[Answer]:
        """Yield every record of a list, page by page."""
        cursor: str | None = None
        while True:
            page = self.ask(operation, *places, params={**parameters, "after": cursor})
            for each in page["data"]:
                yield each
            cursor = page.get("next")
            if cursor is None:
                return

    def resumed_parts(self, open_parts: OpenParts, after: str | None = None) -> Iterator[bytes]:
        """Yield parts of whole lines.

        After a lost connection, continue after the last line, as long as each connection brings more.
        """
        pauses = self.retries.begin()
        while True:
            rest = b""
            try:
                for part in open_parts(after):
                    whole, newline, rest = (rest + part).rpartition(b"\n")
                    if newline:
                        after, pauses = find_last_key(whole), self.retries.begin()
                        yield whole + newline
            except (ApiError, ApiUnreachable) as error:
                self.pause_after(error, pauses if self._has_answered else None)
            else:
                if rest:
                    yield rest
                return

    def pause_after(self, error: ApiError | ApiUnreachable, pauses: Pauses | None) -> None:
        """Wait until a request that failed so is to be sent again. Raise the error if it is not."""
        pause = None if pauses is None else pauses.before_next(error)
        if pause is None:
            raise error
        self.pause_for(pause)

    @contextmanager
    def answered(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
        """Yield the response to one request, its body unread. httpx errors become errors of this package."""
        try:
            with self._http.stream(method, path, **request) as response:
                self._has_answered = True
                if not response.is_success:
                    body = response.read()
                    raise read_problem(
                        response.status_code,
                        response.reason_phrase,
                        body,
                        headers=response.headers,
                        now=datetime.now(UTC),
                    )
                yield response
        except httpx.HTTPError as error:
            raise explain(error, self.base_url, method, path) from error
