"""Client: Vectormill's HTTP interface as a Python object. Knows the routes, not how they are served.

Answers are the API's JSON objects, unchanged, as dictionaries. Items go out and vectors come in as
streams, in constant memory.

    with Client("http://127.0.0.1:8000") as client:
        job = client.submit([{"key": "a", "text": "A text."}], collection="docs")
        client.wait(job["id"])
        for vector in client.vectors(job["id"]):
            print(vector["key"], vector["embedding"][:3])
"""

import json
import ssl
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self
from urllib.parse import quote

import httpx
import msgspec

from vectormill.addresses import is_loopback_host
from vectormill.domain.errors import VectormillError
from vectormill.domain.job import TERMINAL_JOB_STATES
from vectormill.files.ndjson import ItemJson, compress_parts, encode_parts, split_lines
from vectormill.files.replacement import open_replacement
from vectormill.problems import ApiError, ApiUnreachable, WaitTimeout, read_problem
from vectormill.settings import read_api_key

DEFAULT_URL: Final = "http://127.0.0.1:8000"
EXPORT_FORMATS: Final = ("ndjson", "parquet", "npy")

# A server may be silent for minutes while it commits a large upload: that is no failure.
LONG_SILENCE_SECONDS: Final = 600.0
# Waits before each new attempt: 6 s together, which is longer than `vectormill up` needs to restart its API.
RETRY_PAUSES: Final = (0.2, 0.4, 0.8, 1.6, 3.0)
RETRIED_STATUS: Final = (429, 502, 503, 504)

Json = dict[str, Any]


class Matches(list[Json]):
    """What a search found, best first, as `{"key", "score", "metadata"}`.

    `num_rows_read` is None when an index was used; without one every row is read, and this is about how many there are.
    """

    num_rows_read: int | None = None


class Client:
    """Speaks to one Vectormill API.

    `api_key` is what `vectormill keys create` printed; else that of VECTORMILL_API_KEY is sent, if there is one.
    `timeout` is in seconds and bounds each wait for the server, not a whole transfer. `pause` is what
    waiting is done with. Every method raises ApiError when the API refuses, ApiFailure when it breaks and
    ApiUnreachable when no answer comes. A request that can be repeated without harm is repeated for about
    six seconds when the API is full (429) or away (502 to 504), or a connection that worked before is lost.
    """

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
        self._pause = pause
        self._has_answered = False
        self._short = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self._long = httpx.Timeout(max(timeout, LONG_SILENCE_SECONDS), connect=min(timeout, 10.0))
        try:
            # A proxy of the environment cannot reach this machine's own loopback.
            self._http = httpx.Client(
                base_url=self.base_url,
                timeout=self._short,
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

    # ---- jobs

    def submit(
        self,
        items: Iterable[ItemJson],
        *,
        model: str | None = None,
        collection: str | None = None,
        priority: int | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt: str | None = None,
        max_tokens: int | None = None,
        long_texts: str | None = None,
        passage_overlap: int | None = None,
        truncate: bool | None = None,
        vector_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        gzip: bool = False,
        idempotency_key: str | None = None,
    ) -> Json:
        """Streams the items as NDJSON and returns the new job.

        When `items` can be iterated again (a list or a file reader, not a generator), a lost connection is
        survived: the upload is repeated under the same Idempotency-Key, so there is never a second job.
        """
        parameters = {
            "model": model,
            "collection": collection,
            "priority": priority,
            "normalize": normalize,
            "dimensions": dimensions,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "long_texts": long_texts,
            "passage_overlap": passage_overlap,
            "truncate": truncate,
            "vector_type": vector_type,
            "metadata": json.dumps(dict(metadata)) if metadata is not None else None,
        }
        headers = {
            "Content-Type": "application/x-ndjson",
            "Idempotency-Key": idempotency_key or str(uuid.uuid4()),
        }
        if gzip:
            headers["Content-Encoding"] = "gzip"

        def body() -> Iterator[bytes]:
            parts = encode_parts(items)
            return compress_parts(parts) if gzip else parts

        return self._call(
            "POST",
            "/v1/jobs",
            params=_given(parameters),
            headers=headers,
            content=body,
            timeout=self._long,
            is_repeatable=iter(items) is not items,
        )

    def job(self, job_id: str) -> Json:
        return self._call("GET", _path("/v1/jobs", job_id))

    def jobs(self, state: str | None = None) -> Iterator[Json]:
        """All jobs, newest first, page by page."""
        return self._pages("/v1/jobs", {"state": state})

    def wait(
        self,
        job_id: str,
        on_poll: Callable[[Json], None] | None = None,
        *,
        poll_seconds: float = 0.5,
        timeout_seconds: float | None = None,
    ) -> Json:
        """Polls until the job ends and returns it; `on_poll` gets every answer, the last one too.

        A paused job is waited for until somebody resumes or cancels it. Raises WaitTimeout after `timeout_seconds`; the
        job itself goes on.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            job = self.job(job_id)
            if on_poll is not None:
                on_poll(job)
            if job["state"] in TERMINAL_JOB_STATES:
                return job
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"Job {job_id} is still {job['state']} after {timeout_seconds:g} s; it goes on."
                )
            self._pause(poll_seconds)

    def cancel(self, job_id: str) -> Json:
        return self._call("POST", _path("/v1/jobs", job_id, "cancel"))

    def pause(self, job_id: str) -> Json:
        """Keeps back what no worker holds yet; what a worker has is finished."""
        return self._call("POST", _path("/v1/jobs", job_id, "pause"))

    def resume(self, job_id: str) -> Json:
        """Lets a paused job go on."""
        return self._call("POST", _path("/v1/jobs", job_id, "resume"))

    def retry(self, job_id: str) -> Json:
        """Encodes the job's failed items again; the others stay as they are."""
        return self._call("POST", _path("/v1/jobs", job_id, "retry"), is_repeatable=False)

    def delete(self, job_id: str) -> None:
        """Removes an ended job with its texts, errors, and vectors that are in no collection; rows in collections stay.

        A job that has not ended is refused (ApiError 409): cancel it first.
        """
        self._call("DELETE", _path("/v1/jobs", job_id))

    def errors(self, job_id: str) -> Iterator[Json]:
        """Every failed item as `{"key", "code", "detail"}`, page by page."""
        return self._pages(_path("/v1/jobs", job_id, "errors"), {})

    def truncated(self, job_id: str) -> Iterator[Json]:
        """Every item that was cut because it was too long, as `{"key"}`, page by page."""
        return self._pages(_path("/v1/jobs", job_id, "truncated"), {})

    # ---- vectors

    def export(
        self, job_id: str, target: str | Path | BinaryIO, format: str = "ndjson", *, partial: bool = False
    ) -> int:
        """Streams the job's vectors into a file and returns the number of bytes.

        A path gets the whole export or is left as it was; a file object gets what came until an error.
        """
        if isinstance(target, str | Path):
            with open_replacement(Path(target)) as file:
                return self.export(job_id, file, format, partial=partial)
        num_bytes = 0
        for part in self._export_parts(job_id, format, partial):
            target.write(part)
            num_bytes += len(part)
        return num_bytes

    def vectors(self, job_id: str, *, partial: bool = False) -> Iterator[Json]:
        """Every vector as `{"key", "embedding"}`, in constant memory."""
        for line in split_lines(self._export_parts(job_id, "ndjson", partial)):
            yield msgspec.json.decode(line)

    def search(
        self,
        collection: str,
        text: str | None = None,
        *,
        embedding: Iterable[float] | None = None,
        limit: int = 10,
    ) -> Matches:
        """The nearest items, to a text or to a vector of the same space."""
        query = {
            "text": text,
            "embedding": list(embedding) if embedding is not None else None,
            "limit": limit,
        }
        path = _path("/v1/collections", collection, "search")
        # Not repeated: the server itself waits for a worker, for its VECTORMILL_SEARCH_TIMEOUT_SECONDS.
        answer = self._call("POST", path, json=_given(query), timeout=self._long, is_repeatable=False)
        matches = Matches(answer["data"])
        matches.num_rows_read = answer.get("num_rows_read")
        return matches

    # ---- the service

    def models(self) -> list[Json]:
        answer: list[Json] = self._call("GET", "/v1/models")["data"]
        return answer

    def workers(self) -> list[Json]:
        answer: list[Json] = self._call("GET", "/v1/workers")["data"]
        return answer

    # ---- requests

    def _call(self, method: str, path: str, *, is_repeatable: bool = True, **request: Any) -> Json:
        make_body = request.pop("content", None)
        for pause in (*RETRY_PAUSES, None):
            body = {} if make_body is None else {"content": make_body()}
            try:
                with self._answered(method, path, **request, **body) as response:
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
            self._pause(pause)
        raise AssertionError("the last attempt returns or raises")

    def _pages(self, path: str, parameters: Mapping[str, Any]) -> Iterator[Json]:
        cursor = None
        while True:
            page = self._call("GET", path, params=_given({**parameters, "after": cursor}))
            yield from page["data"]
            cursor = page.get("next")
            if cursor is None:
                return

    def _export_parts(self, job_id: str, format: str, partial: bool) -> Iterator[bytes]:
        parameters = {"format": format, "partial": True if partial else None}
        path = _path("/v1/jobs", job_id, "vectors")
        has_begun = False
        try:
            with self._answered("GET", path, params=_given(parameters), timeout=self._long) as response:
                has_begun = True
                yield from response.iter_bytes()
        except ApiUnreachable as error:
            if not has_begun:
                raise
            raise ApiUnreachable(
                f"The export of job {job_id} broke off, and what came is not whole: the API ended, the connection was "
                "lost, or the job was removed meanwhile. `vectormill status JOB` tells whether it is there still."
            ) from error

    @contextmanager
    def _answered(self, method: str, path: str, **request: Any) -> Iterator[httpx.Response]:
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


def is_loopback(url: str) -> bool:
    """Whether the URL names this machine's own loopback."""
    return is_loopback_host(httpx.URL(url).host)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _path(*parts: str) -> str:
    return parts[0] + "".join("/" + quote(part, safe="") for part in parts[1:])
