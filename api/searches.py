"""SearchPool: answers searches with connections and threads of its own, so that slow searches block nothing else.

A search is fitted to the live generation of its collection, its texts are encoded, and a statement finds the rows.
Concurrent searches that differ in little but their vectors are coalesced into one statement: for a few thousand rows,
the overhead of connection, thread, settings and plan is several times the cost of the search.
"""

import asyncio
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Final

import psycopg
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from api.intake.requests import check_text
from api.problems import Problem, name_parameter
from api.queries import QueryExchange
from vectormill.batches.endpoints import write_input
from vectormill.coalescer import CallNotStarted, Coalescer
from vectormill.collections.collection import Generation, require_vectors
from vectormill.collections.collections import find_generation, find_spec, fit_spec
from vectormill.db.session import driver_of
from vectormill.domain.errors import (
    Conflict,
    EncodingTimeout,
    InvalidOption,
    InvalidSubmission,
    ItemNotFound,
    ModelError,
    NotFound,
    QueryLost,
    SearchTimeout,
    SpecMismatch,
    UnknownModel,
)
from vectormill.models.registry import Registry
from vectormill.models.specs import settle_spec
from vectormill.rows.values import find_key_fault
from vectormill.search.matches import MAX_BATCH_SEARCHES, SearchWithVector, find_batch_key, find_matches
from vectormill.search.operations import SearchAnswer, SearchQuery, list_given, make_search
from vectormill.search.query_vectors import read_own_vectors
from vectormill.search.search import Deadline, Search, fit_outputs
from vectormill.settings import Settings

# This many searches run at once. Fewer would already keep two cores of Postgres busy.
SEARCH_CONNECTIONS: Final = 3
# Coalesced searches should take at most this long in all, since the first waits for the last. If single searches take
# longer, each call takes an equal share of the waiting ones.
BATCH_SECONDS: Final = 0.02
MOST_GENERATIONS: Final = 100
# Cancelling a statement is a message to the server.
CANCEL_SECONDS: Final = 5.0
# Errors of which a generation that is no longer live may be the reason.
STALE: Final = (InvalidSubmission, NotFound, Conflict, ModelError, EncodingTimeout, QueryLost)
# A collection may have another live generation so often while one search begins.
MOST_SWAPS: Final = 3


@dataclass(frozen=True, slots=True)
class RequestedSearch:
    """One query of a request, its search, and its JSON pointer in the body."""

    query: SearchQuery
    search: Search
    pointer: str


def read_query(query: SearchQuery, settings: Settings, pointer: str = "") -> RequestedSearch:
    """Return a query with its search.

    Raise Problem, InvalidOption and ItemNotFound; the latter two name the query at `pointer`.
    """
    with naming(pointer):
        search = make_search(query)
        like = search.like
        if like is not None and (reason := find_key_fault(like, settings.max_key_bytes)):
            raise ItemNotFound(f"more_like is not the key of an item: {reason}.")
    if query.text is not None:
        check_text(write_input(query.text), settings.max_text_chars, f"{pointer}/text")
    return RequestedSearch(query, search, pointer)


@contextmanager
def naming(pointer: str) -> Iterator[None]:
    """Let errors of the block begin with the query's name, if it is one of several."""
    try:
        yield
    except (InvalidOption, ItemNotFound) as error:
        raise type(error)(f"{name_parameter(pointer)}: {error}" if pointer else str(error)) from error


class GenerationChanged(Exception):
    """The collection has another live generation than the one for which the search was made."""


@dataclass(frozen=True, slots=True)
class SearchesOfRequest:
    """The searches of one request, and the generation for which they were made."""

    generation: Generation
    searches: Sequence[SearchWithVector]
    deadline: Deadline


class Call:
    """A call of find_matches on a thread, until the earliest deadline of its requests."""

    def __init__(self, engine: Engine, together: Sequence[SearchesOfRequest]) -> None:
        self._engine = engine
        self._generation = together[0].generation
        self._searches = [search for wanted in together for search in wanted.searches]
        self._deadline = min((each.deadline for each in together), key=lambda each: each.seconds_left)
        self._driver: psycopg.Connection[Any] | None = None  # while the call runs
        self._lock = threading.Lock()

    def find(self) -> list[SearchAnswer]:
        """Return the answers of all searches. Raise GenerationChanged, and the errors of `find_matches`."""
        with self._engine.connect() as connection:
            self._driver = driver_of(connection)
            try:
                return find_matches(
                    connection,
                    self._generation,
                    self._searches,
                    self._deadline,
                    partial(self._check, connection),
                )
            finally:
                with self._lock:
                    self._driver = None

    def _check(self, connection: Connection) -> None:
        if find_generation(connection, self._generation.collection) != self._generation:
            raise GenerationChanged

    def stop(self) -> None:
        """End the call and its statement. The lock keeps the connection from serving another call meanwhile."""
        self._deadline.end()
        with self._lock, suppress(psycopg.Error):
            if self._driver is not None:
                self._driver.cancel_safe(timeout=CANCEL_SECONDS)


# The key of searches that can share a statement: the generation's id, and the result of find_batch_key.
BatchKey = tuple[int, Hashable]


class SearchPool:
    """A pool that runs SEARCH_CONNECTIONS statements at once; other searches wait without thread or connection.

    It remembers the live generation of each collection. Each call looks up whether it still is the live one, so a
    search sees every swap that was committed before it came.
    """

    def __init__(
        self, engine: Engine, settings: Settings, registry: Registry, queries: QueryExchange
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._registry = registry
        self._queries = queries
        self._threads = ThreadPoolExecutor(SEARCH_CONNECTIONS, thread_name_prefix="searches")
        self._coalescer: Coalescer[BatchKey, SearchesOfRequest, list[SearchAnswer]] = Coalescer(
            self._run,
            max_waiting=settings.max_requests,
            max_running=SEARCH_CONNECTIONS,
            count=self._choose_batch_size,
            is_of_one=lambda error: not isinstance(error, GenerationChanged | OperationalError),
            abandons=True,
        )
        self._generations: dict[str, Generation] = {}  # by collection, as last looked up
        self.seconds_each: dict[int, float] = {}  # by generation: of one search in the last call

    async def search(
        self, name: str, asked: Sequence[RequestedSearch], *, is_small: bool
    ) -> list[SearchAnswer]:
        """Return the matches of each query in the live generation of a collection, all before one deadline.

        A request that `is_small` is fitted in the event loop, because switching to a thread would take longer.

        Raise CollectionNotFound, WrongKind for a collection without vectors, SpecMismatch for queries of another vector
        space, InvalidOption, and the errors of QueryExchange.encode_queries and find_matches.
        """
        deadline = Deadline(self._settings.search_timeout_seconds)
        generation = self._generations.get(name) or await self._find_live(name)
        for _ in range(MOST_SWAPS):
            try:
                return await self._search_generation(generation, asked, deadline, is_small=is_small)
            except (GenerationChanged, Problem, *STALE) as error:
                # The remembered generation may have been the reason. If it still is the live one, it was not.
                live = await self._find_live(name)
                if live == generation and not isinstance(error, GenerationChanged):
                    raise
                generation = live
        raise Conflict(f"The generation of {name!r} changes all the time; search again.")

    async def _find_live(self, name: str) -> Generation:
        """Look up the live generation of a collection, and remember it. Raise CollectionNotFound."""

        def look_up() -> Generation:
            with self._engine.connect() as connection:
                return find_generation(connection, name)

        self._generations.pop(name, None)
        live = await run_in_threadpool(look_up)
        remember(self._generations, name, live)
        return live

    async def _search_generation(
        self, generation: Generation, asked: Sequence[RequestedSearch], deadline: Deadline, *, is_small: bool
    ) -> list[SearchAnswer]:
        """Return the matches of each query, by the vectors that it has or by those of its text.

        All texts that need the same outputs are encoded together. Raise the errors of `search`, and GenerationChanged.
        """
        require_vectors(generation.collection, generation.kind, "A search compares")
        if {each.query.fingerprint for each in asked} - {None, generation.spec.fingerprint()}:
            await run_in_threadpool(self._refuse_other_spaces, generation, [each.query for each in asked])
        if is_small:
            searches = fit_searches(asked, generation)
        else:
            searches = await run_in_threadpool(fit_searches, asked, generation)
        texts: dict[tuple[str, ...], dict[int, str]] = {}
        for number, (search, vectors) in enumerate(searches):
            if vectors is None and (text := asked[number].query.text) is not None and search.outputs:
                texts.setdefault(search.outputs, {})[number] = text
        cut = set[int]()
        for outputs, of_searches in texts.items():
            spec = generation.spec.narrow(outputs)
            by_pointer = {f"{asked[number].pointer}/text": text for number, text in of_searches.items()}
            encoded = await self._queries.encode_queries(spec, by_pointer, deadline)
            for number, (vectors, is_cut) in zip(of_searches, encoded, strict=True):
                searches[number] = searches[number][0], vectors
                cut |= {number} if is_cut else set()
        found = await self.find(generation, searches, deadline)
        for number in cut:
            found[number]["truncated"] = True
        return found

    def _refuse_other_spaces(self, generation: Generation, queries: Sequence[SearchQuery]) -> None:
        """Raise SpecMismatch, and name the difference between the query's vector space and the collection's."""
        spec = generation.spec
        with suppress(UnknownModel, ModelError):  # the names that its revision has on other vectors
            spec = settle_spec(self._registry.card(spec.model), spec)
        revisions = {generation.spec.revision, spec.revision, *spec.aliases}
        alike = {replace(spec, revision=each).fingerprint() for each in revisions}
        for fingerprint in {query.fingerprint for query in queries if query.fingerprint is not None} - alike:
            with self._engine.connect() as connection:
                if (known := find_spec(connection, fingerprint)) is not None:
                    fit_spec(generation, known)
            raise SpecMismatch(
                f"The search is for vectors of {fingerprint}, but collection {generation.collection!r} "
                f"contains those of {generation.spec.fingerprint()}: model {spec.model}, {spec.dimensions} "
                "dimensions. Vector spaces are never mixed: encode the query again with the collection's "
                "own options."
            )

    async def find(
        self, generation: Generation, searches: Sequence[SearchWithVector], deadline: Deadline
    ) -> list[SearchAnswer]:
        """Return the matches of the searches of one request, as `find_matches` does.

        Raise GenerationChanged if the generation is no longer the live one, and SearchTimeout also if earlier searches
        take so long that these are not begun in time.
        """
        batch_key = find_batch_key(searches[0][0]) if len(searches) == 1 else None
        # A search that must run alone has a key that no other search shares.
        key = generation.id, object() if batch_key is None else batch_key
        wanted = SearchesOfRequest(generation, searches, deadline)
        try:
            return await self._coalescer.ask(key, wanted, max_wait_seconds=deadline.seconds_left)
        except CallNotStarted:
            raise SearchTimeout(
                f"The search was not started within {deadline.seconds:g} s because of earlier "
                f"searches: {SEARCH_CONNECTIONS} run at once. An index makes searches faster; more API "
                "processes run more of them."
            ) from None

    def close(self) -> None:
        """Close the threads and connections, once no search is running."""
        self._threads.shutdown()
        self._engine.dispose()

    def _choose_batch_size(self, batch_key: BatchKey, waiting: Sequence[SearchesOfRequest]) -> int:
        """Return how many requests' searches to run in one statement.

        They are as many as run within BATCH_SECONDS or, if that is more, the waiting ones divided by the number of
        free connections.
        """
        num_free = SEARCH_CONNECTIONS - self._coalescer.num_running
        share = math.ceil(self._coalescer.num_waiting / num_free)
        seconds_each = self.seconds_each.get(batch_key[0], math.inf)
        return min(max(share, int(BATCH_SECONDS / seconds_each)), MAX_BATCH_SEARCHES)

    async def _run(
        self, batch_key: BatchKey, together: Sequence[SearchesOfRequest]
    ) -> list[list[SearchAnswer]]:
        loop = asyncio.get_running_loop()
        began, call = loop.time(), Call(self._engine, together)
        running = loop.run_in_executor(self._threads, call.find)
        try:
            found = await asyncio.shield(running)
        except asyncio.CancelledError:  # all clients have gone
            await loop.run_in_executor(None, call.stop)
            await asyncio.wait([running])
            raise
        if len(together) > 1 and any("incomplete_because" in answer for answer in found):
            raise SearchTimeout  # of the request with the earliest deadline; each is then tried alone
        remember(self.seconds_each, batch_key[0], (loop.time() - began) / len(found))
        answers = iter(found)
        return [list(islice(answers, len(wanted.searches))) for wanted in together]


def fit_searches(asked: Sequence[RequestedSearch], generation: Generation) -> list[SearchWithVector]:
    """Return the searches with the outputs of the collection that each compares, and the queries' own vectors.

    Raise InvalidOption, which begins with the place of the query.
    """
    fitted: list[SearchWithVector] = []
    for each in asked:
        with naming(each.pointer):
            outputs = each.query.outputs or list_given(each.query) or None
            search = fit_outputs(each.search, outputs, generation.spec, generation.collection)
            if each.query.weights is not None and not search.is_fused:
                raise InvalidOption(
                    "weights are those of rankings that are fused, and this search has only one: use mode hybrid, "
                    "compare the outputs dense and sparse, or omit weights."
                )
            fitted.append((search, read_own_vectors(each.query, generation)))
    return fitted


def remember(values: dict[Any, Any], key: Hashable, value: Any) -> None:
    """Set the value of a key, and forget the key that was set least recently if there are too many."""
    values.pop(key, None)
    values[key] = value
    if len(values) > MOST_GENERATIONS:
        del values[next(iter(values))]
