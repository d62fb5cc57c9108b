"""Jobs over HTTP: submit, look, wait, steer, and the vectors that they made."""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, Unpack

import msgspec

from vectormill.client.transport import Json, Transport, given, make_path
from vectormill.domain.encoding import RequestedArguments
from vectormill.domain.jobs.job import TERMINAL_JOB_STATES
from vectormill.domain.tasks.task import EMBED, RECORD, RESULT_ROUTES, SCORE, TASKS, VECTOR
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.files.ndjson import ItemJson, compress_parts, encode_parts, split_lines
from vectormill.files.replacement import open_replacement
from vectormill.problems import ApiUnreachable, WaitTimeout

EXPORT_FORMATS: Final = tuple(OUTPUT_FORMATS)


class JobCalls(Transport):
    """Of jobs and their exports."""

    def submit(
        self,
        items: Iterable[ItemJson],
        *,
        model: str | None = None,
        collection: str | None = None,
        priority: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        gzip: bool = False,
        idempotency_key: str | None = None,
        **options: Unpack[RequestedArguments],
    ) -> Json:
        """Streams the items as NDJSON and returns the new job. What `options` are and do: docs/CONFIGURATION.md.

        When `items` can be iterated again (a list or a file reader, not a generator), a lost connection is
        survived: the upload is repeated under the same Idempotency-Key, so there is never a second job.
        """
        parameters = {
            "model": model,
            "collection": collection,
            "priority": priority,
            "metadata": json.dumps(dict(metadata)) if metadata is not None else None,
            **options,
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

        return self.call(
            "POST",
            "/v1/jobs",
            params=given(parameters),
            headers=headers,
            content=body,
            timeout=self.long_timeout,
            is_repeatable=iter(items) is not items,
        )

    def job(self, job_id: str) -> Json:
        return self.call("GET", make_path("/v1/jobs", job_id))

    def jobs(self, state: str | None = None) -> Iterator[Json]:
        """All jobs, newest first, page by page."""
        return self.pages("/v1/jobs", {"state": state})

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
            self.pause_for(poll_seconds)

    def cancel(self, job_id: str) -> Json:
        return self.call("POST", make_path("/v1/jobs", job_id, "cancel"))

    def pause(self, job_id: str) -> Json:
        """Keeps back what no worker holds yet; what a worker has is finished."""
        return self.call("POST", make_path("/v1/jobs", job_id, "pause"))

    def resume(self, job_id: str) -> Json:
        """Lets a paused job go on."""
        return self.call("POST", make_path("/v1/jobs", job_id, "resume"))

    def retry(self, job_id: str) -> Json:
        """Encodes the job's failed items again; the others stay as they are."""
        return self.call("POST", make_path("/v1/jobs", job_id, "retry"), is_repeatable=False)

    def delete(self, job_id: str) -> None:
        """Removes an ended job with its texts, errors, and vectors that are in no collection; rows in collections stay.

        A job that has not ended is refused (ApiError 409): cancel it first.
        """
        self.call("DELETE", make_path("/v1/jobs", job_id))

    def errors(self, job_id: str) -> Iterator[Json]:
        """Every failed item as `{"key", "code", "detail"}`, page by page."""
        return self.pages(make_path("/v1/jobs", job_id, "errors"), {})

    def truncated(self, job_id: str) -> Iterator[Json]:
        """Every item that was cut because it was too long, as `{"key"}`, page by page."""
        return self.pages(make_path("/v1/jobs", job_id, "truncated"), {})

    def export(
        self, job_id: str, target: str | Path | BinaryIO, format: str = "ndjson", *, partial: bool = False
    ) -> int:
        """Streams the job's vectors into a file, or its other results, and returns the number of bytes.

        A path gets the whole export or is left as it was; a file object gets what came until an error.
        """
        if isinstance(target, str | Path):
            with open_replacement(Path(target)) as file:
                return self.export(job_id, file, format, partial=partial)
        num_bytes = 0
        for part in self._export_parts(job_id, self._find_route(job_id), format, partial):
            target.write(part)
            num_bytes += len(part)
        return num_bytes

    def vectors(self, job_id: str, *, partial: bool = False) -> Iterator[Json]:
        """Every vector as `{"key", "embedding"}`, in constant memory."""
        yield from self._lines(job_id, RESULT_ROUTES[VECTOR], partial)

    def scores(self, job_id: str, *, partial: bool = False) -> Iterator[Json]:
        """Every score as `{"key", "score", "label", "probabilities"}`, in constant memory."""
        yield from self._lines(job_id, RESULT_ROUTES[SCORE], partial)

    def records(self, job_id: str, *, partial: bool = False) -> Iterator[Json]:
        """Every record as `{"key", "output"}`, in constant memory."""
        yield from self._lines(job_id, RESULT_ROUTES[RECORD], partial)

    def results(self, job_id: str, *, partial: bool = False) -> Iterator[Json]:
        """Every result of a job of whatever task, as a row of its kind, in constant memory."""
        yield from self._lines(job_id, self._find_route(job_id), partial)

    def _lines(self, job_id: str, route: str, partial: bool) -> Iterator[Json]:
        for line in split_lines(self._export_parts(job_id, route, "ndjson", partial)):
            yield msgspec.json.decode(line)

    def _find_route(self, job_id: str) -> str:
        """Where the job's results are: an API of a release without tasks has vectors alone."""
        task = self.job(job_id)["options"].get("task", EMBED)
        return RESULT_ROUTES[TASKS[task].result]

    def _export_parts(self, job_id: str, route: str, format: str, partial: bool) -> Iterator[bytes]:
        parameters = {"format": format, "partial": True if partial else None}
        path = make_path("/v1/jobs", job_id, route)
        has_begun = False
        try:
            with self.answered("GET", path, params=given(parameters), timeout=self.long_timeout) as response:
                has_begun = True
                yield from response.iter_bytes()
        except ApiUnreachable as error:
            if not has_begun:
                raise
            raise ApiUnreachable(
                f"The export of job {job_id} broke off, and what came is not whole: the API ended, the connection was "
                "lost, or the job was removed meanwhile. `vectormill status JOB` tells whether it is there still."
            ) from error
