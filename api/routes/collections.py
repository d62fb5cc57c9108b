"""Collections over HTTP: created, listed, described, changed and deleted; generations, indexes and exports."""

import time
from dataclasses import asdict
from typing import Annotated, Any, Final

import anyio
import msgspec
from fastapi import APIRouter, Path
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from sqlalchemy import Connection

from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.intake.submissions import make_wanted_spec
from api.serving import cut_page, decode_cursor, serve
from api.streams.row_streams import ROW_FORMATS, PieceResponse, start_reading
from vectormill.collections import operations
from vectormill.collections.codebooks import check_codes
from vectormill.collections.collection import (
    HNSW,
    CollectionOptions,
    Generation,
    check_collection_name,
    find_kind,
    require_vectors,
)
from vectormill.collections.collections import (
    change_collection,
    create_collection,
    find_generation,
    find_generation_by_id,
)
from vectormill.collections.descriptions import (
    CollectionRow,
    describe_collection,
    list_collection_rows,
)
from vectormill.collections.exports import Inclusion, find_exported, read_pages
from vectormill.collections.generation_tables import attributes_name, table_name
from vectormill.collections.generations import count_newer_rows, discard_generation, roll_back
from vectormill.collections.index_plan import IndexSettings
from vectormill.collections.indexes import (
    find_index_settings,
    find_indexes,
    find_progress,
    plan_for,
    set_index_settings,
)
from vectormill.collections.operations import (
    BuildProgressBody,
    CollectionBody,
    CollectionChange,
    CollectionDetail,
    CollectionExportQuery,
    CollectionIndexBody,
    CollectionPage,
    CollectionRequest,
    CollectionsQuery,
    CoverageBody,
    DeletionQuery,
    DescriptionQuery,
    GenerationBody,
    IndexBody,
    IndexRequest,
    OneIndexBody,
    OpenJobBody,
    RollbackAnswer,
    RollbackQuery,
    RunLine,
    ScheduleLine,
    StalenessBody,
    describe_generation,
)
from vectormill.collections.removals import remove_collection, stop_work
from vectormill.db.locks import act_in_short_locks
from vectormill.domain.credentials import hide_in_options
from vectormill.domain.errors import CollectionInUse, GenerationNotFound, WrongKind
from vectormill.domain.task import RESULTS
from vectormill.files.formats import OUTPUT_FORMATS
from vectormill.models.registry import Registry, explain_reading
from vectormill.operation import describe
from vectormill.runs.operations import RunBody, describe_run
from vectormill.runs.run import INDEX
from vectormill.runs.runs import create_run

router = APIRouter(tags=["collections"])

# A deletion waits this long for transactions that hold the collection's lock.
DELETION_SECONDS: Final = 10.0
DELETION_PAUSE_SECONDS: Final = 0.2
# A rollback or the deletion of a generation waits this long for a lock; then the client may try again.
PATIENCE_SECONDS: Final = 10.0

GenerationId = Annotated[int, Path(ge=1, le=2**63 - 1, description="The generation's number.")]


@serve(router, operations.LIST)
def get_collections(
    connection: Connection, resources: ResourcesDependency, query: CollectionsQuery
) -> CollectionPage:
    """List collections by name, with the spec of their vectors."""
    after = decode_cursor(query.after)
    rows = list_collection_rows(connection, after=after, limit=query.limit + 1)
    page, following = cut_page(rows, query.limit, lambda row: row.id)
    return CollectionPage(
        data=[describe(CollectionBody, row, **list_facts(row, resources.registry)) for row in page],
        next=following,
    )


def list_facts(row: CollectionRow, registry: Registry) -> dict[str, Any]:
    """Return the fields of a collection's JSON body that its row in the database does not have."""
    spec = row.spec
    is_read = registry.is_read(spec.model)  # nobody waits here for the files of a model
    return {
        "kind": find_kind(spec),
        "model": spec.model,
        "dimensions": spec.dimensions,
        "options": spec.describe(),
        "note": explain_reading(registry, row.name, spec) if is_read else None,
    }


@serve(router, operations.SHOW)
def get_collection(
    resources: ResourcesDependency, name: CollectionName, query: DescriptionQuery
) -> CollectionDetail:
    """Describe a collection: rows, generations, indexes, coverage, staleness, and the work in progress."""
    return load_detail(resources, name, counts_rows=query.exact)


def load_detail(resources: Resources, name: str, *, counts_rows: bool = False) -> CollectionDetail:
    timeout_seconds = resources.settings.search_timeout_seconds
    with resources.engine.connect() as connection:
        found = describe_collection(
            connection, name, counts_rows=counts_rows, timeout_seconds=timeout_seconds
        )
    source = None
    if found.source is not None:
        options, split = hide_in_options(found.source.options), dict(found.source.split)
        source = {"kind": found.source.kind, "options": options, "split": split}
    row = describe(CollectionBody, found.row, **list_facts(found.row, resources.registry))
    return describe(
        CollectionDetail,
        found,
        **row,
        fingerprint=found.live.fingerprint,
        generations=[
            describe(
                GenerationBody,
                each,
                model=each.spec.model,
                options=each.spec.describe(),
                table=f"vectormill.{table_name(each.id)}",
                indexes=[describe(CollectionIndexBody, index) for index in each.indexes],
            )
            for each in found.generations
        ],
        coverage=None if found.coverage is None else describe(CoverageBody, found.coverage),
        staleness=describe(
            StalenessBody, found, synced_at=row["synced_at"], stale_seconds=row["stale_seconds"]
        ),
        open_jobs=[describe(OpenJobBody, job) for job in found.open_jobs],
        runs=[describe(RunLine, run, **asdict(run.counts)) for run in found.runs],
        source=source,
        schedules=[describe(ScheduleLine, schedule) for schedule in found.schedules],
    )


@serve(router, operations.CREATE)
def post_collection(resources: ResourcesDependency, body: CollectionRequest) -> CollectionDetail:
    """Create an empty collection. A collection that its first job creates does not store texts."""
    check_collection_name(body.name)
    spec = make_wanted_spec(body.model, body.options, resources)
    index_options = msgspec.to_builtins(body.index_options)
    IndexSettings.from_options(body.index_policy, index_options)
    asked = CollectionOptions(body.keep_text, body.language, body.index_policy, index_options)
    with resources.engine.begin() as connection:
        create_collection(connection, body.name, spec, asked, resources.settings.max_collections)
    return load_detail(resources, body.name)


@serve(router, operations.CHANGE)
def patch_collection(
    name: CollectionName, resources: ResourcesDependency, body: CollectionChange
) -> CollectionDetail:
    """Start or stop storing texts, or change the language in which stored texts are searched."""
    change_collection(resources.engine, name, keep_text=body.keep_text, language=body.language)
    return load_detail(resources, name)


@serve(router, operations.DELETE)
async def delete_collection(
    name: CollectionName, resources: ResourcesDependency, query: DeletionQuery
) -> None:
    """Delete a collection: view, vectors, metadata, texts, source, schedules, runs. Its jobs stay, without vectors."""
    if query.force:
        await run_in_threadpool(stop_work, resources.engine, name)
    deadline = time.monotonic() + DELETION_SECONDS
    while True:
        try:
            return await run_in_threadpool(remove_collection, resources.engine, name)
        except CollectionInUse as error:
            # A worker that commits a chunk, or a reader, holds the collection's lock for some seconds.
            if not error.is_passing or time.monotonic() >= deadline or resources.is_stopping():
                raise
        await anyio.sleep(DELETION_PAUSE_SECONDS)


# ---- generations


@serve(router, operations.ROLL_BACK)
def post_rollback(
    resources: ResourcesDependency, name: CollectionName, query: RollbackQuery
) -> RollbackAnswer:
    """Make the generation live again that was live before the last swap or rollback; a run copies later puts to it.

    409 if there is no such generation, if a run is working on the collection, if other objects depend on a
    view that would have to be created again, or if the texts of later puts are not stored and `allow_missing`
    is not set.
    """
    engine = resources.engine
    timeout_seconds = resources.settings.search_timeout_seconds
    with engine.connect() as connection:
        newer = count_newer_rows(connection, name, timeout_seconds=timeout_seconds)
    swap = act_in_short_locks(
        engine,
        lambda connection: roll_back(connection, name, newer=newer, allow_missing=query.allow_missing),
        patience_seconds=PATIENCE_SECONDS,
    )
    return RollbackAnswer(
        collection=swap.live.collection,
        live=describe_generation(swap.live),
        retired=describe_generation(swap.retired),
        num_newer_rows=newer.num_rows if newer else None,
        num_missing_rows=newer.num_missing if newer else None,
        run_id=str(swap.run_id),
    )


@serve(router, operations.DISCARD)
def delete_generation(
    resources: ResourcesDependency, name: CollectionName, generation_id: GenerationId
) -> None:
    """Discard a generation that is being built or is retired; there is no rollback to it any more.

    Its disk space is freed soon. 409 for the live generation.
    """
    engine = resources.engine
    with engine.connect() as connection:
        generation = find_generation_by_id(connection, generation_id)
    if generation is None or generation.collection != name:
        raise GenerationNotFound(f"Collection {name!r} has no generation {generation_id}.")
    act_in_short_locks(
        engine,
        lambda connection: discard_generation(connection, generation_id),
        patience_seconds=PATIENCE_SECONDS,
    )


# ---- indexes

index_router = APIRouter(tags=["indexes"])


@serve(index_router, operations.SHOW_INDEX)
def get_index(resources: ResourcesDependency, connection: Connection, name: CollectionName) -> IndexBody:
    """Return the existing indexes, what would be built now and why, and the progress of a build."""
    generation = find_generation(connection, name)
    outlook = plan_for(connection, generation, resources.settings, {})
    # The index on the documents of passages is made and dropped with its table, whatever the settings are.
    fixed = f"{attributes_name(generation.id)}_document"
    indexes = [index for index in find_indexes(connection, generation.id) if index.name != fixed]
    progress = find_progress(connection, generation.id)
    return describe(
        IndexBody,
        outlook,
        collection=name,
        generation=generation.id,
        policy=outlook.kept.policy,
        options=outlook.kept.options,
        filters=outlook.kept.filters,
        indexes=[describe(OneIndexBody, index) for index in indexes],
        plan=outlook.plan.to_json(),
        sparse_plan=None if outlook.sparse_plan is None else outlook.sparse_plan.to_json(),
        built=outlook.record,
        progress=None if progress is None else describe(BuildProgressBody, progress),
    )


@serve(index_router, operations.CHANGE_INDEX)
def put_index(connection: Connection, name: CollectionName, body: IndexRequest) -> RunBody:
    """Store what is wanted, and start a run that builds what is missing and drops what is not wanted."""
    policy, fields = body.choose_policy(), body.fields()
    generation = find_generation(connection, name)
    if policy == HNSW or body.shape() or body.rebuild:
        require_vectors(name, generation.kind, "An HNSW index needs")
    kept = find_index_settings(connection, generation.id)
    options = {**kept.options, **body.shape()}
    check_codes(name, generation.spec, body.shape())
    IndexSettings.from_options(policy or kept.policy, options)
    set_index_settings(connection, name, policy=policy, options=options, filters=fields)
    run = create_run(connection, name, INDEX, options={"rebuild": True} if body.rebuild else {})
    assert run is not None, "only a due time of a schedule can have a run already"
    return describe_run(run)


# ---- exports


@serve(router, operations.EXPORT)
def get_export(
    resources: ResourcesDependency, name: CollectionName, query: CollectionExportQuery
) -> Response:
    """Stream the rows in the order of their keys.

    `ndjson`: `{"key", "embedding", "metadata", "text"}` per line, as selected by `include`; for a collection
    of scores `score`, `label` and `probabilities` instead of `embedding`, for one of records `output`.
    `parquet`: columns with these names, metadata as JSON. To resume an interrupted export, pass `after`, the
    last key received, and `generation`, from the header Vectormill-Generation; then no vector of another
    space follows. The end of an export shows that it is complete: the last chunk of HTTP, the footer of
    Parquet.
    """
    with resources.engine.connect() as connection:
        generation = find_exported(connection, name, query.generation)
    inclusion = choose_inclusion(generation, query.include)
    pages = read_pages(resources.engine, generation, inclusion, after=query.after, limit=query.limit)
    headers = {
        "Content-Disposition": f'attachment; filename="{name}.{query.format}"',
        "Vectormill-Generation": str(generation.id),
        "Vectormill-Fingerprint": generation.spec.fingerprint(),
    }
    pieces = ROW_FORMATS[query.format](generation.spec, inclusion, start_reading(pages))
    return PieceResponse(pieces, OUTPUT_FORMATS[query.format].media_type, headers)


def choose_inclusion(generation: Generation, include: str | None) -> Inclusion:
    """Return what an export includes for each row.

    Raise WrongKind for results that the collection does not keep.
    """
    if include is None:
        return Inclusion()
    parts, own = set(include.split(",")), RESULTS[generation.spec.result].part
    foreign = parts - {own, "metadata", "text"}
    if foreign:
        raise WrongKind(
            f"Collection {generation.collection!r} contains {generation.kind}: include {own!r} instead of "
            f"{min(foreign)!r}."
        )
    return Inclusion(result=own in parts, metadata="metadata" in parts, text="text" in parts)
