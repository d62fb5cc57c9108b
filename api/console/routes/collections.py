"""The console's collections: a list, and for each its contents, how it is built, and a search box."""

import time
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from api.console.console import Console, ConsoleDependency, VisitorDependency
from api.console.facts.collections import CollectionLine, hide_credentials
from api.console.facts.searching import MOST_CHARS, SearchForm, SearchOutcome, describe_hit
from api.console.live import LiveStream, Rendered
from api.cursors import After, decode_cursor, encode_cursor
from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.problems import Problem
from api.routes.collections.searches import find_embeddings, make_one_search, open_generation
from vectormill.collections.collection import VECTORS, find_kind
from vectormill.collections.descriptions import (
    CollectionDescription,
    describe_collection,
    list_collection_rows,
)
from vectormill.collections.indexes.builds import BuildProgress
from vectormill.collections.standings import OpenRun, find_index_progress, list_open_runs, list_standings
from vectormill.domain.errors import CollectionNotFound, VectormillError

router = APIRouter(include_in_schema=False)

PAGE_SIZE: Final = 100

Text = Annotated[str, Query(max_length=MOST_CHARS)]


@dataclass(frozen=True, slots=True)
class CollectionView:
    """A collection whole. `builds` are where index builds are, by generation."""

    found: CollectionDescription
    open_runs: list[OpenRun]
    builds: dict[int, BuildProgress]
    source_options: dict[str, str]

    @property
    def kind(self) -> str:
        return find_kind(self.found.row.spec)

    def run_of(self, generation_id: int) -> OpenRun | None:
        """Return the run that builds this generation."""
        return next((run for run in self.open_runs if run.generation_id == generation_id), None)


def render_list(resources: Resources, console: Console, after: str | None) -> Rendered:
    with resources.engine.connect() as connection:
        found = list_collection_rows(connection, after=decode_cursor(after), limit=PAGE_SIZE + 1)
        page = found[:PAGE_SIZE]
        standings = list_standings(connection, [row.id for row in page])
    lines = [CollectionLine(row, standings[row.id]) for row in page if row.id in standings]
    more = encode_cursor(page[-1].id) if len(found) > len(page) else None
    return Rendered(console.render("collections/list.html", None, lines=lines, next=more))


def load_collection(resources: Resources, name: str) -> CollectionView:
    """Load all that the page shows. Raise CollectionNotFound."""
    with resources.engine.connect() as connection:
        found = describe_collection(connection, name)
        building = [
            generation.id
            for generation in found.generations
            if any(index.state == "building" for index in generation.indexes)
        ]
        return CollectionView(
            found=found,
            open_runs=list_open_runs(connection, found.row.id),
            builds=find_index_progress(connection, building),
            source_options=hide_credentials(found.source_options or {}),
        )


def render_one(resources: Resources, console: Console, name: str, *, can_write: bool) -> Rendered:
    """Render a collection; one that was deleted meanwhile is shown as gone."""
    try:
        view = load_collection(resources, name)
    except CollectionNotFound:
        return Rendered(console.render("collections/gone.html", None, collection=name), is_last=True)
    return Rendered(console.render("collections/one.html", None, view=view, can_write=can_write))


async def search(resources: Resources, name: str, form: SearchForm, *, has_texts: bool) -> SearchOutcome:
    """Return what POST /v1/collections/{name}/search answers to the query; a refusal is shown in place of the hits."""
    start = time.perf_counter()
    try:
        with resources.gates.searches.enter():
            query = form.to_query(has_texts=has_texts)
            wanted = make_one_search(query, "", resources)
            generation = await open_generation(resources, name, [query])
            (embedding,) = await find_embeddings([query], [wanted], generation, resources)
            (nearest,) = await resources.searches.find(generation, [(wanted, embedding)])
    except VectormillError as error:
        return SearchOutcome([], time.perf_counter() - start, refusal=str(error))
    except Problem as problem:
        return SearchOutcome([], time.perf_counter() - start, refusal=problem.detail)
    note = None
    if nearest.num_rows_read:
        note = f"No index served: all of about {nearest.num_rows_read:,} rows were read."
    if nearest.repeated_because is not None:
        note = f"Searched again exactly, for {nearest.repeated_because}."
    hits = [describe_hit(place, match) for place, match in enumerate(nearest.matches, 1)]
    return SearchOutcome(hits, time.perf_counter() - start, note)


@router.get("/console/collections")
async def get_collections(
    request: Request, resources: ResourcesDependency, console: ConsoleDependency, after: After = None
) -> HTMLResponse:
    part = await run_in_threadpool(render_list, resources, console, after)
    return console.page(request, "collections/page.html", part=part.html, after=after)


@router.get("/console/live/collections")
async def get_live_collections(
    resources: ResourcesDependency, console: ConsoleDependency, after: After = None
) -> LiveStream:
    return LiveStream(
        resources, console.views, f"collections {after}", lambda: render_list(resources, console, after)
    )


@router.get("/console/collections/{name}")
async def get_collection(
    request: Request,
    name: CollectionName,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
    q: Text = "",
    like: Text = "",
    mode: Text = "vector",
    filters: Annotated[str, Query(alias="filter", max_length=MOST_CHARS)] = "",
    limit: int = 10,
) -> HTMLResponse:
    """Return the page of a collection; with `q` or `like`, with the hits of a search."""
    view = await run_in_threadpool(load_collection, resources, name)
    form = SearchForm(q, like, mode, filters, limit)
    outcome = None
    if form.is_asked and view.kind == VECTORS:
        outcome = await search(resources, name, form, has_texts=view.found.row.keep_text)
    values: dict[str, Any] = {
        "view": view,
        "form": form,
        "outcome": outcome,
        "can_write": visitor.can_write,
    }
    return console.page(request, "collections/detail.html", collection=name, **values)


@router.get("/console/live/collections/{name}")
async def get_live_collection(
    name: CollectionName,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    visitor: VisitorDependency,
) -> LiveStream:
    can_write = visitor.can_write
    return LiveStream(
        resources,
        console.views,
        f"collection {name} {can_write}",
        lambda: render_one(resources, console, name, can_write=can_write),
    )
