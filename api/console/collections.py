"""Pages of collections: the list, and for each its contents, its index builds, and a search form."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse
from sqlalchemy import Connection

from api.console.console import Console, ConsoleDependency, Page
from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.problems import Problem
from api.searches import read_query
from api.serving import cut_page, decode_cursor
from vectormill.collections.collection import find_kind
from vectormill.collections.descriptions import (
    CollectionDescription,
    CollectionRow,
    CollectionSummary,
    OpenRun,
    describe_collection,
    list_collection_rows,
    list_open_runs,
    list_summaries,
)
from vectormill.collections.indexes import BuildProgress, find_progress
from vectormill.domain.credentials import hide_in_options
from vectormill.domain.errors import VectormillError
from vectormill.domain.task import VECTORS
from vectormill.search.filter import read_filters
from vectormill.search.operations import MatchBody, SearchQuery, list_notes
from vectormill.search.search import BY_VECTOR, METADATA, TEXT

router = APIRouter(include_in_schema=False)

PAGE_SIZE: Final = 100
MOST_RESULTS: Final = 100
# Some search fields could hold more, but proxies refuse longer query strings.
MOST_CHARS: Final = 2000

Text = Annotated[str, Query(max_length=MOST_CHARS)]
Mode = Literal["vector", "text", "hybrid"]


@dataclass(frozen=True, slots=True)
class CollectionLine:
    """A collection in a list. `lag_seconds` is the age of the oldest change that is not yet encoded."""

    row: CollectionRow
    standing: CollectionSummary

    @property
    def index(self) -> str:
        """Return the state of the vector index: `none` if searches read all rows, `–` if none is possible."""
        return self.standing.index_state or ("none" if find_kind(self.row.spec) == VECTORS else "–")

    @property
    def lag_seconds(self) -> float | None:
        oldest = self.standing.oldest_change_at
        return None if oldest is None else max(0.0, (self.row.now - oldest).total_seconds())

    @property
    def doing(self) -> str:
        """Return the open run with its phase, such as `reindex: encoding`; empty if there is none."""
        standing = self.standing
        if standing.run_kind is None:
            return ""
        is_working = standing.run_state == "running" and standing.run_phase
        return f"{standing.run_kind}: {standing.run_phase if is_working else standing.run_state}"


@dataclass(frozen=True, slots=True)
class CollectionsView:
    """One page of the list of collections; `next` is the cursor of the next page, None on the last."""

    lines: list[CollectionLine]
    next: str | None


@dataclass(frozen=True, slots=True)
class CollectionView:
    """A collection with its open runs, its source's options, and the index builds by generation id."""

    found: CollectionDescription
    open_runs: list[OpenRun]
    builds: dict[int, BuildProgress]
    source_options: dict[str, Any]

    def run_of(self, generation_id: int) -> OpenRun | None:
        """Return the open run that builds this generation, or None."""
        return next((run for run in self.open_runs if run.generation_id == generation_id), None)


def read_collections(connection: Connection, console: Console, after: str | None = None) -> CollectionsView:
    found = list_collection_rows(connection, after=decode_cursor(after), limit=PAGE_SIZE + 1)
    page, following = cut_page(found, PAGE_SIZE, lambda row: row.id)
    standings = list_summaries(connection, [row.id for row in page])
    lines = [CollectionLine(row, standings[row.id]) for row in page if row.id in standings]
    return CollectionsView(lines, following)


def read_collection(connection: Connection, console: Console, name: CollectionName) -> CollectionView:
    """Return all that the page of a collection shows. Raise CollectionNotFound."""
    found = describe_collection(connection, name)
    builds = {
        generation.id: progress
        for generation in found.generations
        if any(index.state == "building" for index in generation.indexes)
        and (progress := find_progress(connection, generation.id)) is not None
    }
    return CollectionView(
        found=found,
        open_runs=list_open_runs(connection, found.row.id),
        builds=builds,
        source_options=hide_in_options(found.source.options) if found.source else {},
    )


PAGES: Final = (
    Page(
        path="/console/collections",
        title="Collections",
        lead="What each collection contains, how much of its source it covers, and how far it lags behind.",
        template="collections.html",
        read=read_collections,
    ),
    Page(
        path="/console/collections/{name}",
        title="Collection {name}",
        template="collection.html",
        above="search_form.html",
        read=read_collection,
    ),
)


@dataclass(frozen=True, slots=True)
class SearchForm:
    """The fields of the search form.

    A match must satisfy every line of `filters`. `like` is a row's key to search for similar rows, or empty.
    """

    text: str = ""
    like: str = ""
    mode: Mode = BY_VECTOR
    filters: str = ""
    limit: int = 10

    def to_query(self, *, has_texts: bool) -> SearchQuery:
        """Return the form as a search query of the HTTP API. Raise InvalidOption for an invalid filter."""
        lines = [line.strip() for line in self.filters.splitlines()]
        return SearchQuery(
            text=None if self.like else self.text.strip(),
            more_like=self.like or None,
            limit=max(1, min(self.limit, MOST_RESULTS)),
            filter=read_filters([line for line in lines if line], told_as="filter"),
            mode=BY_VECTOR if self.like else self.mode,
            include=[METADATA, TEXT] if has_texts else [METADATA],
        )


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The result of a search, or in `refusal` why it failed; `note` says how the rows were found."""

    matches: Sequence[MatchBody]
    seconds: float
    note: str = ""
    refusal: str | None = None


@router.get("/console/collections/{name}/search")
async def get_search(
    request: Request,
    name: CollectionName,
    resources: ResourcesDependency,
    console: ConsoleDependency,
    q: Text = "",
    like: Text = "",
    mode: Mode = "vector",
    filters: Annotated[str, Query(alias="filter", max_length=MOST_CHARS)] = "",
    limit: int = 10,
) -> HTMLResponse:
    """Return the page with the hits of a search in a collection. Raise CollectionNotFound."""

    def load() -> CollectionDescription:
        with resources.engine.connect() as connection:
            return describe_collection(connection, name)

    found = await run_in_threadpool(load)
    form = SearchForm(q, like, mode, filters, limit)
    outcome = await search(resources, name, form, has_texts=found.row.keep_text)
    return console.page(request, "search.html", found=found, form=form, outcome=outcome)


async def search(resources: Resources, name: str, form: SearchForm, *, has_texts: bool) -> SearchOutcome:
    """Search as POST /v1/collections/{name}/search does, but return an error as a refusal."""
    start = time.perf_counter()
    try:
        with resources.gates.searches.enter():
            query = form.to_query(has_texts=has_texts)
            asked = [read_query(query, resources.settings)]
            (answer,) = await resources.searches.search(name, asked, is_small=True)
    except (VectormillError, Problem) as error:
        return SearchOutcome([], time.perf_counter() - start, refusal=str(error))
    note = " ".join(list_notes(answer, name))
    return SearchOutcome(answer["data"], time.perf_counter() - start, note)
