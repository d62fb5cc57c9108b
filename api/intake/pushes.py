"""Pushes: a request's body becomes a run of the collection. Parsed and written in threads, block by block.

Leaving early, for an error or because the client left, fails the run and removes what was written.
"""

from collections.abc import Sequence
from uuid import UUID

from fastapi import Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool

from api.bodies.sources.sources import PushBody
from api.dependencies import Resources
from api.door.media_types import read_media_type, unsupported_media_type
from api.intake.intake import Intake
from api.intake.submissions import NDJSON_TYPES, make_inflater, read_blocks
from api.streams.ndjson import ItemReader
from vectormill.collections.collections import find_generation
from vectormill.jobs.item import Item
from vectormill.sources.fitting import takes_pairs
from vectormill.sources.pushes import PushWriter
from vectormill.sources.rows import encode_metadata
from vectormill.sources.sources import find_source


async def receive_push(
    request: Request, name: str, resources: Resources, *, is_complete: bool, idempotency_key: str | None
) -> PushBody:
    """Receive a push, commit it and return its body. Raise Problem and the errors of a push."""
    media_type = read_media_type(request)
    if media_type not in NDJSON_TYPES:
        raise unsupported_media_type(media_type, NDJSON_TYPES[0])
    settings = resources.settings
    reader = ItemReader(
        max_line_bytes=settings.max_line_bytes,
        max_key_bytes=settings.max_key_bytes,
        reads_pairs=await run_in_threadpool(find_whether_pairs, name, resources),
    )
    inflater = make_inflater(request, settings)
    intake = Intake(settings)

    def store(block: bytes, writer: PushWriter) -> None:
        for piece in inflater.feed(block) if inflater else (block,):
            intake.take_bytes(len(piece))
            write(writer, reader.read(piece), intake)

    def store_rest(writer: PushWriter) -> UUID:
        if inflater:
            inflater.finish()
        write(writer, reader.finish(), intake)
        return writer.finish()

    writer = PushWriter(resources.engine, name, {"is_complete": is_complete}, idempotency_key=idempotency_key)
    with resources.gates.uploads.enter():
        async with contextmanager_in_threadpool(writer):
            await run_in_threadpool(intake.look, resources.engine)
            async for block in read_blocks(request):
                await run_in_threadpool(store, block, writer)
            run = await run_in_threadpool(store_rest, writer)
    return PushBody(run=run, collection=name, num_items=writer.num_items, is_complete=is_complete)


def find_whether_pairs(name: str, resources: Resources) -> bool:
    """Return whether rows of the collection may have a second text. Raise CollectionNotFound and
    SourceNotFound.
    """
    with resources.engine.connect() as connection:
        source = find_source(connection, name).source
        return takes_pairs(source, find_generation(connection, name).spec)


def write(writer: PushWriter, items: Sequence[Item], intake: Intake) -> None:
    """With the keys of metadata in order, as other sources have them: equal metadata are equal bytes."""
    intake.take_items(len(items))
    for item in items:
        if item.metadata:
            item = Item(item.key, item.text, encode_metadata(item.metadata))
        writer.add(item)
