"""Sources over HTTP: set, checked, quoted, shown and deleted; following of their tables, and pushing of rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from sqlalchemy import Connection

from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.intake.bodies import NDJSON_TYPES, make_inflater, read_blocks
from api.intake.intake import Intake
from api.intake.requests import IdempotencyKey, UnreadableItem
from api.intake.requests import encode_metadata as check_values
from api.intake.submissions import LineStore, make_job
from api.problems import read_media_type, refuse, unsupported_media_type
from api.serving import serve
from vectormill.collections.collections import find_generation
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.errors import InvalidOption, SourceFailed
from vectormill.files.roots import Roots
from vectormill.jobs.job import NewJob
from vectormill.jobs.operations import QuoteBody
from vectormill.quotes.quote import make_quote
from vectormill.quotes.sampling import sample_source
from vectormill.settings import Settings
from vectormill.sources import operations
from vectormill.sources.following import describe_following, follow_table, unfollow_table
from vectormill.sources.opening import check_source
from vectormill.sources.operations import (
    FollowingBody,
    FollowRequest,
    PushBody,
    PushQuery,
    QuoteRequest,
    SourceBody,
    SourceCheckBody,
    SourceQuery,
    SourceRequest,
    describe_source,
)
from vectormill.sources.parsing import NONE, parse_options, parse_split, refuse_unfit
from vectormill.sources.pushes import PushWriter
from vectormill.sources.reader import SourcePlace
from vectormill.sources.source import Source
from vectormill.sources.sources import delete_source, find_source, save_source

router = APIRouter(tags=["sources"])

# A request waits at most this long for transactions that write the table to be followed.
PATIENCE_SECONDS: Final = 10.0


@serve(router, operations.SET)
async def put_source(
    name: CollectionName,
    resources: ResourcesDependency,
    body: SourceRequest,
    query: SourceQuery,
) -> SourceBody:
    """Set the source of a collection's texts, after checking its first rows. Nothing is imported yet."""
    source = make_source(body, resources.settings)

    def save() -> SourceBody:
        report = look(source, name, resources) if query.check else None
        with resources.engine.begin() as connection:
            refuse_unfit(source, find_generation(connection, name).spec)
            return describe_source(save_source(connection, name, source), report)

    with resources.gates.uploads.enter():
        return await run_in_threadpool(save)


def make_source(body: SourceRequest, settings: Settings) -> Source:
    """Return the source that the body describes, checked but not read. Raise InvalidOption."""
    for values in (body.options, body.split):
        try:
            check_values(values)
        except UnreadableItem as error:
            raise InvalidOption(f"The source cannot be stored: {error.reason}.") from error
    source = Source(body.kind, body.options, body.split)
    roots = Roots.of(settings, "source_root")
    for name in parse_options(source).local_files():
        roots.find(Path(name))
    parse_split(source)
    return source


def look(source: Source, name: str, resources: Resources) -> SourceCheckBody:
    """Read and check the first rows of a source. Raise Problem."""
    place = SourcePlace(resources.engine, resources.settings, resources.registry, collection=name)
    with refusing_failed():
        return check_source(source, place)


@contextmanager
def refusing_failed() -> Iterator[None]:
    """Raise Problem with the source's own error if it cannot be read as described."""
    try:
        yield
    except SourceFailed as error:
        raise refuse(str(error), code=SourceFailed.code, detail=str(error), pointer="/options") from None


@serve(router, operations.SHOW)
def get_source(name: CollectionName, connection: Connection) -> SourceBody:
    """Show the source of the collection's texts."""
    return describe_source(find_source(connection, name))


@serve(router, operations.DELETE)
def remove_source(name: CollectionName, connection: Connection) -> None:
    """Delete the source of a collection; its rows stay."""
    delete_source(connection, name)


@serve(router, operations.CHECK)
def post_check(name: CollectionName, resources: ResourcesDependency) -> SourceCheckBody:
    """Check the stored source by reading its first rows; nothing is changed."""
    with resources.engine.connect() as connection:
        saved = find_source(connection, name)
    return look(saved.source, name, resources)


@serve(router, operations.FOLLOWING)
def get_following(name: CollectionName, connection: Connection) -> FollowingBody:
    """Show the table that the collection follows, and how many of its changes are waiting."""
    return describe_following(connection, name)


@serve(router, operations.FOLLOW)
def post_follow(name: CollectionName, body: FollowRequest, resources: ResourcesDependency) -> FollowingBody:
    """Follow the table of the collection's SQL source: changes are encoded within seconds.

    Only changes from now on are followed; a re-index picks up earlier ones. The key is taken from the query
    if that names a column.
    """
    for value in (body.table, body.key_column):
        if value is not None and not value.isprintable():
            raise InvalidOption(
                f"{value!r} is not a valid name: it contains characters that cannot be printed."
            )

    def follow(connection: Connection) -> object:
        reader_url = resources.settings.reader_url
        return follow_table(
            connection, name, table=body.table, key_column=body.key_column, reader_url=reader_url
        )

    return change_following(resources, name, follow)


@serve(router, operations.UNFOLLOW)
def post_unfollow(name: CollectionName, resources: ResourcesDependency) -> FollowingBody:
    """Stop following: remove the triggers and the waiting changes. Rows of the collection stay."""
    return change_following(resources, name, lambda connection: unfollow_table(connection, name))


def change_following(resources: Resources, name: str, act: Callable[[Connection], object]) -> FollowingBody:
    act_in_short_locks(resources.engine, act, patience_seconds=PATIENCE_SECONDS)
    with resources.engine.connect() as connection:
        return describe_following(connection, name)


@serve(router, operations.PUSH)
async def post_push(
    request: Request,
    name: CollectionName,
    resources: ResourcesDependency,
    query: PushQuery,
    idempotency_key: IdempotencyKey,
) -> PushBody:
    """Push rows as a stream of NDJSON (gzip accepted) to a run that follows them: all of them, or none.

    They are parsed and written in threads, block by block. If the push fails or the client disconnects, the
    run fails and what was written is removed.
    """
    media_type = read_media_type(request)
    if media_type not in NDJSON_TYPES:
        raise unsupported_media_type(media_type, NDJSON_TYPES[0])
    settings = resources.settings
    reads_pairs = await run_in_threadpool(find_whether_pairs, name, resources)
    inflater = make_inflater(request, settings)
    intake = Intake(settings)
    options: dict[str, object] = {"is_complete": query.complete}
    writer = PushWriter(resources.engine, name, options, idempotency_key=idempotency_key)
    lines = LineStore(writer, reads_pairs, intake, settings, inflater)
    with resources.gates.uploads.enter():
        async with contextmanager_in_threadpool(writer):
            await run_in_threadpool(intake.look, resources.engine)
            async for block in read_blocks(request):
                await run_in_threadpool(lines.store, block)
            await run_in_threadpool(lines.store_rest)
            run = await run_in_threadpool(writer.finish)
    return PushBody(run=str(run), collection=name, num_items=writer.num_items, is_complete=query.complete)


def find_whether_pairs(name: str, resources: Resources) -> bool:
    """Return True if pushed rows may have a second text.

    Raise CollectionNotFound and SourceNotFound.
    """
    with resources.engine.connect() as connection:
        source = find_source(connection, name).source
        reads_pairs = find_generation(connection, name).spec.reads_pairs
        return reads_pairs and parse_split(source).by == NONE


quote_router = APIRouter(tags=["quotes"])


@serve(quote_router, operations.QUOTE)
async def post_quote(resources: ResourcesDependency, body: QuoteRequest) -> QuoteBody:
    """Read a sample of a source's rows, and return what a job of them would take. Nothing is stored."""
    job = make_job(body, body.encoding, None, resources, idempotency_key=None)
    with resources.gates.quotes.enter():
        return await run_in_threadpool(quote_source, resources, make_source(body, resources.settings), job)


def quote_source(resources: Resources, source: Source, job: NewJob, *, skips_kept: bool = False) -> QuoteBody:
    """Return the quote of a job of a source's rows. Raise Problem if the source cannot be read as described."""
    engine, settings, registry = resources.engine, resources.settings, resources.registry
    place = SourcePlace(engine, settings, registry, collection=job.collection or "", spec=job.spec)
    with refusing_failed():
        sample = sample_source(source, place)
    with engine.connect() as connection:
        return make_quote(connection, registry.card(job.spec.model), job, sample, skips_kept=skips_kept)
