"""Submissions: make a job of a request's body. Threads parse and write the body, block by block.

The event loop only receives bytes. If the submission fails or the client disconnects, the written part is removed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from anyio import from_thread
from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from msgspec import UNSET
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from api.dependencies import Resources
from api.door.keys import check_scope, may
from api.intake.bodies import NDJSON_TYPES, make_inflater, read_blocks, read_body
from api.intake.intake import Intake
from api.intake.requests import (
    DECODING_ERRORS,
    JOB_DECODER,
    OBJECT_DECODER,
    UnreadableItem,
    decode_body,
    decode_json,
    encode_metadata,
    make_item,
    make_items,
    split_path,
)
from api.problems import (
    JSON_TYPE,
    Problem,
    read_media_type,
    refuse,
    unsupported_media_type,
)
from api.streams.ndjson import Inflater, ItemReader
from vectormill.collections.collection import check_collection_name
from vectormill.collections.index_plan import is_storable
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import DiskFull, InvalidOption
from vectormill.domain.options import read_options
from vectormill.files.roots import Roots
from vectormill.jobs.item import Items
from vectormill.jobs.job import Job, JobOptions, NewJob
from vectormill.jobs.operations import (
    InputBody,
    JobBody,
    JobRequest,
    OptionsBody,
    QuoteBody,
    SubmissionQuery,
    describe_job,
)
from vectormill.jobs.submission import JobWriter
from vectormill.jobs.wait_reasons import make_job_body, refuse_unserved
from vectormill.keys.api_key import ADMIN, SOURCES
from vectormill.models.registry import make_spec
from vectormill.models.suggestions import find_need
from vectormill.objects.iceberg import SCHEME, check_table_url
from vectormill.objects.reading import add_objects, find_inputs, refuse_unfit_columns
from vectormill.objects.store import normalize, refuse_outside
from vectormill.quotes.dry_run import DryRunWriter
from vectormill.quotes.sampling import WHOLE_BYTES, sample_objects, sample_whole
from vectormill.settings import Settings
from vectormill.sources.operations import QuoteRequest
from vectormill.sources.pushes import PushWriter

# A request reads objects for at most this long; then it leaves them to an indexer. Proxies give an answer 30 to 60
# seconds, of which a list of the objects or the last step may need some.
READING_SECONDS: Final = 5.0
OUTPUT_NOT_NAMED: Final = (
    "{url} is below no place to which keys without the scope admin may write: name it, or a folder above it, in "
    "VECTORMILL_OUTPUT_PREFIXES of the API, and restart the API."
)

# A dry run is answered by a quote.
Submitted = JobBody | QuoteBody
AnyWriter = JobWriter | DryRunWriter


async def receive_job(
    request: Request, resources: Resources, idempotency_key: str | None, query: SubmissionQuery
) -> Submitted:
    """Create the job of a request and return it, committed. Raise Problem and the errors of a submission."""
    media_type = read_media_type(request)
    with resources.gates.uploads.enter():
        if media_type in NDJSON_TYPES:
            return await receive_stream(request, resources, idempotency_key, query)
        if media_type == JSON_TYPE:
            return await receive_document(request, resources, idempotency_key, query)
        raise unsupported_media_type(media_type, JSON_TYPE, NDJSON_TYPES[0])


async def receive_document(
    request: Request, resources: Resources, idempotency_key: str | None, query: SubmissionQuery
) -> Submitted:
    """Create a job from a JSON body that contains all items, and return it, committed."""
    with resources.gates.json_bytes.hold() as hold, resources.gates.quotes.hold() as quoting:
        body = await read_body(request, resources.settings, hold)

        def submit() -> Submitted:
            """Check and make the job in two transactions, and return its body as of the second one."""
            document = decode_body(body, JOB_DECODER)
            override(document, query, request.query_params)
            if document.input is not None:
                check_scope(request, SOURCES)
            check_output(request, document.to, resources.settings)
            if (document.items is UNSET) == (document.input is None):
                raise InvalidOption("A job needs either `items` or `input`.")
            intake = Intake(resources.settings)
            new_job = make_job(
                document, document.options, document.metadata, resources, idempotency_key=idempotency_key
            )
            if document.input is not None:
                if document.dry_run:
                    from_thread.run_sync(quoting.take, 1)
                    return quote_objects(document.input, new_job, resources, intake)
                return read_objects(document.input, new_job, resources, intake)
            items = read_items(document, new_job, resources.settings.max_key_bytes)
            with open_any(new_job, resources, intake, is_dry=document.dry_run) as writer:
                intake.take_items(len(items))
                writer.add_all(items)
                return finish(writer, resources)

        return await run_in_threadpool(submit)


async def receive_stream(
    request: Request, resources: Resources, idempotency_key: str | None, query: SubmissionQuery
) -> Submitted:
    """Create a job from an NDJSON body, one item per line, in constant memory, and return it, committed."""
    check_output(request, query.to, resources.settings)
    inflater = make_inflater(request, resources.settings)
    opened = storing_lines(query, resources, idempotency_key, inflater)
    async with contextmanager_in_threadpool(opened) as (lines, end):
        async for block in read_blocks(request):
            await run_in_threadpool(lines.store, block)
        return await run_in_threadpool(end)


def submit_lines(blocks: Iterable[bytes], query: SubmissionQuery, resources: Resources) -> Submitted:
    """Create a job from blocks of NDJSON as from those of a request, and return it, committed."""
    with storing_lines(query, resources) as (lines, end):
        for block in blocks:
            lines.store(block)
        return end()


@contextmanager
def storing_lines(
    query: SubmissionQuery,
    resources: Resources,
    idempotency_key: str | None = None,
    inflater: Inflater | None = None,
) -> Iterator[tuple["LineStore", Callable[[], Submitted]]]:
    """Yield what stores the lines of a job, and the function that ends it and returns its body."""
    new_job = make_job(query, query, decode_metadata(query), resources, idempotency_key=idempotency_key)
    intake = Intake(resources.settings)
    with open_any(new_job, resources, intake, is_dry=query.dry_run) as writer:
        lines = LineStore(writer, new_job.spec.reads_pairs, intake, resources.settings, inflater)

        def end() -> Submitted:
            lines.store_rest()
            intake.look_again(resources.engine)
            return finish(writer, resources)

        yield lines, end


def check_output(request: Request, url: str | None, settings: Settings) -> None:
    """Raise Problem unless the request may write its results there, and InvalidOption for no URL of an object.

    A key of scope admin, and who needs none, may write wherever the credentials of the processes reach.
    """
    if url is None:
        return
    check_scope(request, SOURCES)
    place = url if url.startswith(SCHEME) else normalize(url)
    if may(request, ADMIN) or place.startswith("file://"):  # local folders have a setting of their own
        return
    prefixes = [each.strip().rstrip("/") for each in settings.output_prefixes.split(",") if each.strip()]
    # A namespace ends at the dot before its table.
    if not any(place == each or place.startswith((f"{each}/", f"{each}.")) for each in prefixes):
        raise Problem(403, "scope-missing", OUTPUT_NOT_NAMED.format(url=url))


class LineStore:
    """A job or a push that is written from blocks of NDJSON, perhaps compressed, within the limits of `intake`."""

    def __init__(
        self,
        writer: AnyWriter | PushWriter,
        reads_pairs: bool,
        intake: Intake,
        settings: Settings,
        inflater: Inflater | None = None,
    ) -> None:
        self._writer = writer
        self._intake = intake
        self._inflater = inflater
        self._reader = ItemReader(
            max_line_bytes=settings.max_line_bytes,
            max_key_bytes=settings.max_key_bytes,
            reads_pairs=reads_pairs,
        )

    def store(self, block: bytes) -> None:
        for piece in self._inflater.feed(block) if self._inflater else (block,):
            self._intake.take_bytes(len(piece))
            self._store(self._reader.read(piece))

    def store_rest(self) -> None:
        if self._inflater:
            self._inflater.finish()
        self._store(self._reader.finish())

    def _store(self, items: Items) -> None:
        self._intake.take_items(len(items))
        self._writer.add_all(items)


def admit_job(new_job: NewJob, intake: Intake, connection: Connection) -> None:
    """Raise the error of a limit that is reached, and ModelNotServed unless the job may wait for a worker."""
    intake.admit(connection)
    if not new_job.wait_for_worker:
        refuse_unserved(connection, new_job.spec)


def open_any(new_job: NewJob, resources: Resources, intake: Intake, *, is_dry: bool) -> AnyWriter:
    """Return the writer of a job, or a trial that stores nothing."""
    admit = partial(admit_job, new_job, intake)
    if is_dry:
        return DryRunWriter(resources.engine, new_job, resources.settings, resources.registry, admit)
    return JobWriter(resources.engine, new_job, resources.settings, admit=admit)


class OutOfTime(Exception):
    """Raised when a request has read objects for too long."""


def read_objects(wanted: InputBody, new_job: NewJob, resources: Resources, intake: Intake) -> Submitted:
    """Create the job of some objects, or leave them to an indexer if they take too long or need another disk."""
    until = time.monotonic() + READING_SECONDS

    def check() -> None:
        if time.monotonic() >= until:
            raise OutOfTime

    admit = partial(admit_job, new_job, intake)
    with JobWriter(resources.engine, new_job, resources.settings, admit=admit, check=check) as writer:
        try:
            add_objects(writer, wanted, new_job.spec, resources.settings, intake.take_items)
            made = writer.finish_with(make_job_body)
        except (OutOfTime, DiskFull):
            made = writer.hand_over(wanted, make_job_body)
        return describe_submitted(writer, resources, *made)


def quote_objects(wanted: InputBody, new_job: NewJob, resources: Resources, intake: Intake) -> QuoteBody:
    """Return the quote of the job of some objects: of all their rows if they are small, else of parts of them."""
    settings = resources.settings
    admit = partial(admit_job, new_job, intake)
    with DryRunWriter(resources.engine, new_job, settings, resources.registry, admit) as trial:
        until = time.monotonic() + READING_SECONDS

        def check() -> None:
            if time.monotonic() >= until:
                raise InvalidOption(
                    f"Listing the objects takes longer than {READING_SECONDS:g} s. Quote a part of them."
                )

        found = list(find_inputs(wanted, settings, check))
        if sum(each.num_bytes for each in found) <= WHOLE_BYTES:
            sample_whole(found, wanted, new_job.spec, settings, trial, until, intake.take_items)
        else:
            refuse_unfit_columns(wanted, new_job.spec)
            sample_objects(found, wanted, new_job.spec, settings, trial.sample, until)
            rows = trial.sample.num_all
            if rows.least == rows.most:
                intake.take_items(int(rows.value))
        return trial.finish()


def finish(writer: AnyWriter, resources: Resources) -> Submitted:
    """Commit the job, and return its body as of the same transaction, with the reason why it waits."""
    if isinstance(writer, DryRunWriter):
        return writer.finish()
    return describe_submitted(writer, resources, *writer.finish_with(make_job_body))


def describe_submitted(writer: JobWriter, resources: Resources, job: Job, body: JobBody | None) -> JobBody:
    """Count a committed job and return its body, even if it cannot be read from the database now."""
    if writer.existing is None:
        resources.metrics.submitted_jobs.inc()
        resources.metrics.submitted_items.inc(job.num_items)
    if body is not None:
        return body
    try:
        with resources.engine.connect() as connection:
            return make_job_body(connection, job)
    except SQLAlchemyError:
        return describe_job(job)


def read_items(request: JobRequest, new_job: NewJob, max_key_bytes: int) -> Items:
    """Return the items of a body. Raise Problem, which names the first one that cannot be stored."""
    assert request.items is not UNSET, "checked before"
    reads_pairs = new_job.spec.reads_pairs
    try:
        return make_items(request.items, max_key_bytes, reads_pairs=reads_pairs)
    except UnreadableItem:  # of any bad item; the first one is named
        items = []
        for position, body in enumerate(request.items):
            try:
                items.append(make_item(body, max_key_bytes, reads_pairs=reads_pairs))
            except UnreadableItem as error:
                place = f"items[{position}].{error.field}", f"/items/{position}/{error.field}"
                raise error.refuse(*place) from error
        return Items.of(items)


def decode_metadata(query: SubmissionQuery) -> dict[str, Any] | None:
    """Return the job's metadata from the query parameter, or None. Raise Problem if it is not a JSON object."""
    if query.metadata is None:
        return None
    try:
        return decode_json(query.metadata.encode(), OBJECT_DECODER)
    except DECODING_ERRORS as error:
        reason = f"metadata must be a JSON object: {split_path(str(error))[0]}"
        raise refuse(reason, code=InvalidOption.code, parameter="metadata") from error


def override(request: JobRequest, query: SubmissionQuery, names: Iterable[str]) -> None:
    """Overwrite fields of the body by the query parameters `names`."""
    for name in names:
        target = request if name in JobRequest.__struct_fields__ else request.options
        value = decode_metadata(query) if name == "metadata" else getattr(query, name)
        setattr(target, name, value)


def make_job(
    request: JobRequest | SubmissionQuery | QuoteRequest,
    options: OptionsBody,
    metadata: dict[str, Any] | None,
    resources: Resources,
    *,
    idempotency_key: str | None,
) -> NewJob:
    """Make the NewJob of a request, checked against its model. Raise UnknownModel and InvalidOption."""
    if request.collection is not None:
        check_collection_name(request.collection)
    if metadata is not None:
        try:
            encode_metadata(metadata)
        except UnreadableItem as error:
            raise InvalidOption(f"The job cannot be stored: {error.reason}.") from error
    spec = make_wanted_spec(request.model, options, resources)
    wanted = read_options(JobOptions, request)
    if request.to is not None:
        if request.collection is not None:
            raise InvalidOption(
                "The results go either into a collection or to a folder: leave out `collection` or `to`."
            )
        if request.to.startswith(SCHEME):
            wanted["to"] = check_table_url(request.to)
        else:
            wanted["to"] = normalize(request.to)
            refuse_outside(wanted["to"], Roots.of(resources.settings, "output_root"))
    return NewJob(spec, metadata=metadata, idempotency_key=idempotency_key, **wanted)


def make_wanted_spec(model: str, options: OptionsBody, resources: Resources) -> EncodingSpec:
    """Return the EncodingSpec of a model and options. Raise Problem, UnknownModel and InvalidOption."""
    if options.prompt is not None and not is_storable(options.prompt):
        raise InvalidOption("The prompt contains a NUL character or half of a UTF-16 surrogate pair.")
    try:
        wanted = options.requested().resolve()
    except ValueError as error:  # `truncate`, an older name of another option, contradicts that
        is_stream = isinstance(options, SubmissionQuery)
        place = {"parameter": "truncate"} if is_stream else {"pointer": "/options/truncate"}
        raise refuse(str(error), code=InvalidOption.code, **place) from error
    return make_spec(resources.registry.card(model, need=find_need(wanted)), wanted)
