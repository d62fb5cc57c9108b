"""Calls for jobs: submit, watch, pause, cancel, and fetch results as rows, files or tables."""

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final, Unpack, cast

from vectormill.client.aio import flow
from vectormill.client.aio.exports import AsyncResults, ExportTransport
from vectormill.client.answers import EventReader
from vectormill.client.frames import choose_columns
from vectormill.client.progress import showing
from vectormill.client.requests import (
    NDJSON_HEADERS,
    Export,
    describe_objects,
    fill_path,
    given,
    make_key_header,
    nest,
)
from vectormill.domain.encoding import find_result
from vectormill.domain.task import RECORD, RESULTS, SCORE, VECTOR
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.jobs import operations
from vectormill.jobs.job import TERMINAL_JOB_STATES, JobArguments
from vectormill.jobs.operations import (
    ItemErrorBody,
    JobBody,
    QuoteBody,
    RecordRow,
    ScoreRow,
    SuspectChunkBody,
    TruncatedItemBody,
    VectorRow,
)
from vectormill.moments import format_moment
from vectormill.problems import ApiError, ApiUnreachable
from vectormill.rows.columns import Columns
from vectormill.sources import operations as source_operations

EXPORT_FORMATS: Final = tuple(OUTPUT_FORMATS)


class JobCalls(ExportTransport):
    """Calls for jobs and their results. `partial` includes results of a job that has not ended."""

    async def submit(
        self,
        items: AsyncIterable[Any] | Iterable[Any],
        *,
        text: str | None = None,
        key: str | None = None,
        pair: str | None = None,
        metadata: Mapping[str, Any] | Sequence[str] | None = None,
        gzip: bool = False,
        idempotency_key: str | None = None,
        progress: bool = False,
        **options: Unpack[JobArguments],
    ) -> JobBody:
        """Stream the items as NDJSON and return the new job. For `options` see docs/CONFIGURATION.md.

        Items are `{"key", "text"}` dictionaries, texts alone, or the rows of a table: a DataFrame of pandas
        or polars, a table or RecordBatchReader of pyarrow. `text`, `key` and `pair` name columns; the
        defaults are `text`, and `key` or `id`. A list as `metadata` names the columns to keep as metadata of
        each item; an object is metadata of the job. `progress` waits for the job's end and shows a progress
        bar in a terminal or a notebook.

        With `to`, an empty folder of an object store such as s3://bucket/vectors, the results go there as Parquet
        instead of into Postgres; read them with `vectormill.read_table`.

        If `items` can be iterated again (a list, a table or a file reader, not a generator), the upload is
        repeated after a lost connection under the same Idempotency-Key, so there is never a second job.

        A job is refused if every live worker of its model has failed to load it, unless `wait_for_worker` is set.
        """
        own = json.dumps(dict(metadata)) if isinstance(metadata, Mapping) else None
        columns, headers = choose_columns(text, key, pair, metadata), make_key_header(idempotency_key)
        job: JobBody = await self._send(items, columns, {"metadata": own, **options}, headers, gzip=gzip)
        return await self.wait(job["id"], progress=True) if progress else job

    async def _send(
        self,
        items: AsyncIterable[Any] | Iterable[Any],
        columns: Columns | None,
        parameters: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        gzip: bool,
    ) -> Any:
        """Stream the items as NDJSON and return the answer."""
        sent = flow.prepare_items(items, columns)
        return await self.ask(
            operations.SUBMIT,
            params=parameters,
            headers=NDJSON_HEADERS | dict(headers) | ({"Content-Encoding": "gzip"} if gzip else {}),
            make_body=lambda: flow.encode_body(sent, gzip=gzip),
            is_repeatable=flow.can_repeat(sent),
        )

    async def quote(
        self,
        items: AsyncIterable[Any] | Iterable[Any],
        *,
        text: str | None = None,
        key: str | None = None,
        pair: str | None = None,
        metadata: Sequence[str] | None = None,
        gzip: bool = False,
        **options: Unpack[JobArguments],
    ) -> QuoteBody:
        """Return what a job of these items would take, in tokens, time and disk; see docs/SIZING.md.

        The items are sent and checked as by `submit`, of which the arguments are, and nothing is stored.
        """
        columns = choose_columns(text, key, pair, metadata)
        return cast(
            QuoteBody, await self._send(items, columns, {"dry_run": "true", **options}, {}, gzip=gzip)
        )

    async def submit_objects(
        self,
        urls: str | Sequence[str],
        *,
        text: str | None = None,
        key: str | None = None,
        pair: str | None = None,
        metadata: Mapping[str, Any] | Sequence[str] | None = None,
        format: str | None = None,
        unique: bool = False,
        idempotency_key: str | None = None,
        progress: bool = False,
        **options: Unpack[JobArguments],
    ) -> JobBody:
        """Submit the rows of objects in a store as a job, without sending them, and return the new job.

        `urls` are objects or patterns: s3://bucket/articles/*.parquet, gs://, az:// or file://, of Parquet, JSON
        Lines or CSV. The service and its workers read them with credentials of their own. `text`, `key` and
        `pair` name columns; without `key` an item is named by its object and position. A list as `metadata`
        names the columns to keep with each result; an object is metadata of the job. `options` are as for `submit`.
        With `unique` the service reads all keys first, and refuses the job if two are equal. What takes longer than
        some seconds is read after the answer: the job is `uploading` meanwhile, and `failed` if it is refused.
        """
        body = {
            "input": describe_objects(urls, text, key, pair, metadata, format, unique=unique),
            "metadata": dict(metadata) if isinstance(metadata, Mapping) else None,
            **nest(options, "options"),
        }
        job = await self.ask(operations.SUBMIT, body=body, headers=make_key_header(idempotency_key))
        return await self.wait(job["id"], progress=True) if progress else job

    async def quote_objects(
        self,
        urls: str | Sequence[str],
        *,
        text: str | None = None,
        key: str | None = None,
        pair: str | None = None,
        metadata: Sequence[str] | None = None,
        format: str | None = None,
        **options: Unpack[JobArguments],
    ) -> QuoteBody:
        """Return what `submit_objects` with these arguments would take. Of many bytes only parts are read."""
        wanted = describe_objects(urls, text, key, pair, metadata, format)
        body = {"input": wanted, "dry_run": True, **nest(options, "options")}
        quote: Any = await self.ask(operations.SUBMIT, body=body)
        return cast(QuoteBody, quote)

    async def quote_source(
        self,
        kind: str,
        options: Mapping[str, Any],
        *,
        split: Mapping[str, Any] | None = None,
        **job: Unpack[JobArguments],
    ) -> QuoteBody:
        """Return what a job of the rows of a source would take; `kind`, `options`, `split` as for `set_source`."""
        source = {"kind": kind, "options": dict(options), "split": dict(split or {})}
        return await self.ask(source_operations.QUOTE, body=source | nest(job, "encoding"))

    async def job(self, job_id: str) -> JobBody:
        """Return the job in its current state."""
        return await self.ask(operations.SHOW, job_id)

    def jobs(
        self,
        state: str | None = None,
        *,
        collection: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> AsyncIterator[JobBody]:
        """Yield jobs, newest first, page by page.

        They are in this state, write to this collection, and were submitted from `since` on and before `until`;
        None selects by none of these. Both times must have a time zone.
        """
        days = {"since": format_moment(since), "until": format_moment(until)}
        return self.pages(JobBody, operations.LIST, state=state, collection=collection, **days)

    async def wait(
        self,
        job_id: str,
        on_poll: Callable[[JobBody], None] | None = None,
        *,
        progress: bool = False,
        poll_seconds: float = 0.5,
        timeout_seconds: float | None = None,
    ) -> JobBody:
        """Poll until the job ends and return it. `on_poll` is called with every answer, including the last.

        `progress` shows a bar in a terminal or a notebook, and nothing elsewhere. A paused job is waited for
        until it is resumed or cancelled. Raise WaitTimeout after `timeout_seconds`; the job itself continues.
        """
        with showing() if progress else nullcontext() as show:
            lookers = [look for look in (on_poll, show) if look is not None]
            return await self._poll(
                "Job", operations.SHOW, job_id, TERMINAL_JOB_STATES, lookers, poll_seconds, timeout_seconds
            )

    async def events(self, job_id: str) -> AsyncIterator[JobBody]:
        """Yield the job now and after each change, until it has ended.

        The API pushes the changes (Server-Sent Events). A lost connection is opened again as long as each
        connection brings news.
        """
        path = fill_path(operations.FOLLOW.path, job_id)
        pauses = self.retries.begin()
        last: JobBody | None = None
        while last is None or last["state"] not in TERMINAL_JOB_STATES:
            reader = EventReader()
            lost: ApiError | ApiUnreachable = ApiUnreachable(
                f"{self.base_url} closed the event stream of job {job_id} before the job ended."
            )
            try:
                async with self.answered("GET", path, timeout=self.long_timeout) as response:
                    async for line in flow.split_lines(response.aiter_bytes()):
                        job = reader.read(line)
                        if job is not None and job != last:
                            last, pauses = job, self.retries.begin()
                            yield job
            except (ApiError, ApiUnreachable) as error:
                lost = error
            if last is None or last["state"] not in TERMINAL_JOB_STATES:
                await self.pause_after(lost, pauses if self._has_answered else None)

    async def cancel(self, job_id: str) -> JobBody:
        """Cancel the job; results committed before that stay."""
        return await self.ask(operations.CANCEL, job_id)

    async def pause(self, job_id: str) -> JobBody:
        """Pause the job: no further chunks are handed out, and those already on workers finish."""
        return await self.ask(operations.PAUSE, job_id)

    async def resume(self, job_id: str) -> JobBody:
        """Resume a paused job."""
        return await self.ask(operations.RESUME, job_id)

    async def retry(self, job_id: str) -> JobBody:
        """Encode the job's failed items again; the others stay as they are."""
        return await self.ask(operations.RETRY, job_id)

    async def delete(self, job_id: str) -> None:
        """Delete an ended job with its texts, errors, and vectors that are in no collection.

        Rows in collections stay. The API refuses to delete a job that has not ended (ApiError 409): cancel it
        first.
        """
        await self.ask(operations.DELETE, job_id)

    def errors(self, job_id: str) -> AsyncIterator[ItemErrorBody]:
        """Yield every failed item of a job as `{"key", "code", "detail"}`, page by page."""
        return self.pages(ItemErrorBody, operations.LIST_ERRORS, job_id)

    def suspects(self) -> AsyncIterator[SuspectChunkBody]:
        """Yield the chunks of all jobs that a faulty worker computed and that cannot be encoded again, page by page."""
        return self.pages(SuspectChunkBody, operations.LIST_SUSPECT)

    def truncated(self, job_id: str) -> AsyncIterator[TruncatedItemBody]:
        """Yield every item of a job whose text was truncated, as `{"key"}`, page by page."""
        return self.pages(TruncatedItemBody, operations.LIST_TRUNCATED, job_id)

    async def export(
        self, job_id: str, target: str | Path | BinaryIO, format: str = "ndjson", *, partial: bool = False
    ) -> int:
        """Stream the job's results to a file, and return the number of bytes.

        A path gets the whole export or stays unchanged; a file object keeps the bytes received before an
        error. After a lost connection, NDJSON continues after the last line; another format starts again.
        """
        described = await self._describe_export(job_id, None, format, partial)
        return await self.write_export(described, target)

    async def certificate(self, job_id: str, target: str | Path | BinaryIO) -> int:
        """Write the certificate of an ended job to a file, as lines of JSON, and return the number of bytes.

        A path gets the whole certificate or stays unchanged.
        """
        broken = (
            f"The certificate of job {job_id} is incomplete: the API stopped, or the connection was lost."
        )
        return await self.write_export(
            Export(fill_path(operations.CERTIFY.path, job_id), {}, "", broken=broken), target
        )

    def vectors(self, job_id: str, *, partial: bool = False) -> AsyncResults[VectorRow]:
        """Return a job's vectors as `{"key", "embedding"}`, row by row in constant memory or all as a table.

        `.to_numpy()`, `.to_arrow()`, `.to_pandas()` and `.to_polars()` of the answer fetch all vectors at
        once.
        """
        return self._results(job_id, RESULTS[VECTOR].route, partial)

    def scores(self, job_id: str, *, partial: bool = False) -> AsyncResults[ScoreRow]:
        """Return a job's scores as `{"key", "score", "label", "probabilities"}`, row by row or as a table."""
        return self._results(job_id, RESULTS[SCORE].route, partial)

    def records(self, job_id: str, *, partial: bool = False) -> AsyncResults[RecordRow]:
        """Return a job's extracted records as `{"key", "output"}`, row by row or as a table."""
        return self._results(job_id, RESULTS[RECORD].route, partial)

    def results(self, job_id: str, *, partial: bool = False) -> AsyncResults[dict[str, Any]]:
        """Return the results of a job of any task, as rows of that task."""
        return self._results(job_id, None, partial)

    def _results(self, job_id: str, route: str | None, partial: bool) -> AsyncResults[Any]:
        async def describe(format: str) -> Export:
            return await self._describe_export(job_id, route, format, partial)

        return AsyncResults(self, describe)

    async def _describe_export(self, job_id: str, route: str | None, format: str, partial: bool) -> Export:
        if route is None:  # it is that of the job's task
            route = RESULTS[find_result((await self.job(job_id))["options"])].route
        return Export(
            fill_path(f"{operations.ONE}/{route}", job_id),
            given({"partial": True if partial else None}),
            format,
            broken=f"The export of job {job_id} is incomplete: the API stopped, the connection was lost, or "
            "the job was removed meanwhile. `vectormill status JOB` shows whether it still exists.",
        )
