"""Searches over HTTP: the rows of a collection that best match a text, a vector or another row."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.door.media_types import require_json
from api.intake.departures import ended_by_departure
from api.intake.requests import UnreadableItem, check_key, decode_body
from api.intake.submissions import read_body
from api.queries import check_query
from api.search_pool import GenerationChanged
from api.serving import serve, write_answer
from vectormill.collections.collection import Generation, require_vectors
from vectormill.collections.collections import fit_spec
from vectormill.collections.generations import find_spec
from vectormill.domain.encoding import DOT
from vectormill.domain.errors import (
    Conflict,
    InvalidOption,
    ItemNotFound,
    ModelError,
    SpecMismatch,
    UnknownModel,
    VectormillError,
)
from vectormill.domain.task import DENSE
from vectormill.models.specs import settle_spec
from vectormill.search import operations
from vectormill.search.deadline import Deadline
from vectormill.search.matches import Query, SearchWithVector
from vectormill.search.operations import (
    SEARCH_DECODER,
    ManySearchesAnswer,
    SearchAnswer,
    SearchQuery,
    SearchRequest,
    list_given,
    make_search,
    read_queries,
)
from vectormill.search.search import Search, fit_outputs
from vectormill.vectors.representations import MAX_WEIGHTS, Representations

P = ParamSpec("P")
T = TypeVar("T")
# Reading a body of this size, or writing this many matches, takes a tenth of a millisecond.
SMALL_BYTES: Final = 16 << 10
FEW_MATCHES: Final = 20
# The largest float16, the type in which vectors of tokens are stored.
LARGEST_NUMBER: Final = float(np.finfo(np.float16).max)

# A collection may have another live generation so often while one search begins.
MOST_SWAPS: Final = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a request, its search, and the beginning of errors about it."""

    query: SearchQuery
    search: Search
    place: str


router = APIRouter(tags=["collections"])


@serve(router, operations.SEARCH)
async def post_search(request: Request, name: CollectionName, resources: ResourcesDependency) -> Response:
    """Return the rows that best match a query, best first; for several queries, the rows of each."""
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        is_small = len(body) <= SMALL_BYTES
        wanted = await run(is_small, decode_body, body, SEARCH_DECODER)
    with resources.gates.searches.enter():  # after the body, which may arrive slowly
        async with ended_by_departure(request):
            asked = await run(is_small, read_request, wanted, resources)
            found = await search_collection(name, asked, resources, is_small=is_small)
            answer = found[0] if wanted.queries is None else ManySearchesAnswer(data=found)
            is_short = sum(len(each["data"]) for each in found) <= FEW_MATCHES
            content = await run(is_short, write_answer, answer)
            return Response(content, media_type="application/json")


async def search_collection(
    name: str, asked: Sequence[Asked], resources: Resources, *, is_small: bool
) -> list[SearchAnswer]:
    """Return the matches of each query in the live generation of a collection.

    Raise CollectionNotFound, WrongKind for a collection without vectors, SpecMismatch for queries of another vector
    space, InvalidOption, and the errors of QueryExchange.encode_queries and find_matches.
    """
    deadline = Deadline(resources.settings.search_timeout_seconds)
    generation = await resources.searches.find_generation(name)
    for _ in range(MOST_SWAPS):
        try:
            return await find_nearest(asked, generation, resources, deadline, is_small=is_small)
        except (GenerationChanged, VectormillError) as error:
            # The remembered generation may have been the reason. If it still is the live one, it was not.
            live = await resources.searches.find_generation(name, afresh=True)
            if live == generation and not isinstance(error, GenerationChanged):
                raise
            generation = live
    raise Conflict(f"The generation of {name!r} changes all the time; search again.")


async def run(is_little: bool, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run short work at once, because switching to a thread would take longer, and other work on a thread."""
    return work(*arguments, **options) if is_little else await run_in_threadpool(work, *arguments, **options)


def read_request(wanted: SearchRequest, resources: Resources) -> list[Asked]:
    """Return a request's queries with their searches. Raise InvalidOption, InvalidItem and ItemNotFound."""
    queries = read_queries(wanted, resources.settings.max_search_queries)
    places = [f"queries[{number}]: " if wanted.queries is not None else "" for number in range(len(queries))]
    return [read_query(query, resources, place) for query, place in zip(queries, places, strict=True)]


def read_query(query: SearchQuery, resources: Resources, place: str = "") -> Asked:
    """Return a query with its search. The errors, those of `read_request`, begin with `place`."""
    try:
        search = make_search(query)
    except InvalidOption as error:
        raise InvalidOption(f"{place}{error}") from error
    if query.text is not None:
        check_query(query.text, place, resources.settings)
    if search.like is not None:
        try:
            check_key(search.like, resources.settings.max_key_bytes)
        except UnreadableItem as error:
            raise ItemNotFound(f"{place}more_like is not the key of an item: {error.reason}.") from error
    return Asked(query, search, place)


def refuse_other_spaces(resources: Resources, generation: Generation, queries: Sequence[SearchQuery]) -> None:
    """Raise SpecMismatch, and name the difference between the query's vector space and the collection's."""
    spec = generation.spec
    with suppress(UnknownModel, ModelError):  # the names that its revision has on other vectors
        spec = settle_spec(resources.registry.card(spec.model), spec)
    revisions = {generation.spec.revision, spec.revision, *spec.aliases}
    alike = {replace(spec, revision=each).fingerprint() for each in revisions}
    for fingerprint in {query.fingerprint for query in queries if query.fingerprint is not None} - alike:
        with resources.engine.connect() as connection:
            if (known := find_spec(connection, fingerprint)) is not None:
                fit_spec(generation, known)
        raise SpecMismatch(
            f"The search is for vectors of {fingerprint}, but collection {generation.collection!r} "
            f"contains those of {generation.spec.fingerprint()}: model {spec.model}, {spec.dimensions} "
            "dimensions. Vector spaces are never mixed: encode the query again with the collection's "
            "own options."
        )


def fit_searches(asked: Sequence[Asked], generation: Generation) -> list[SearchWithVector]:
    """Return the searches with the outputs of the collection that each compares, and the queries' own vectors.

    Raise InvalidOption, which begins with the place of the query.
    """
    fitted: list[SearchWithVector] = []
    for each in asked:
        try:
            outputs = each.query.outputs or list_given(each.query) or None
            search = fit_outputs(each.search, outputs, generation.spec, generation.collection)
            fitted.append((search, read_own_vectors(each.query, generation)))
        except InvalidOption as error:
            raise InvalidOption(f"{each.place}{error}") from error
    return fitted


async def find_nearest(
    asked: Sequence[Asked],
    generation: Generation,
    resources: Resources,
    deadline: Deadline,
    *,
    is_small: bool,
) -> list[SearchAnswer]:
    """Return the matches of each query, by the vectors that it has or by those of its text.

    All texts that need the same outputs are encoded together. Raise the errors of `search_collection`, and
    GenerationChanged.
    """
    require_vectors(generation.collection, generation.kind, "A search compares")
    if {each.query.fingerprint for each in asked} - {None, generation.spec.fingerprint()}:
        await run_in_threadpool(refuse_other_spaces, resources, generation, [each.query for each in asked])
    searches = await run(is_small, fit_searches, asked, generation)
    cut = set[int]()
    texts: dict[tuple[str, ...], dict[int, str]] = {}
    for number, (search, vectors) in enumerate(searches):
        if vectors is None and (text := asked[number].query.text) is not None and search.outputs:
            texts.setdefault(search.outputs, {})[number] = text
    for outputs, of_searches in texts.items():
        spec = generation.spec.narrow(outputs)
        encoded = await resources.queries.encode_queries(spec, list(of_searches.values()), deadline)
        for number, (vectors, is_cut) in zip(of_searches, encoded, strict=True):
            searches[number] = searches[number][0], vectors
            cut |= {number} if is_cut else set()
    found = await resources.searches.find(generation, searches, deadline)
    for number in cut:
        found[number]["truncated"] = True
    return found


def read_own_vectors(query: SearchQuery, generation: Generation) -> Query:
    """Return a query's own vectors: the dense one alone as float32 [dimensions]. Raise InvalidOption."""
    own = Representations()
    if query.embedding is not None:
        own = replace(own, dense=read_embedding(query.embedding, generation))
    if query.sparse is not None:
        by_place = {int(place): weight for place, weight in query.sparse.items()}
        indices, weights = read_sparse(by_place, generation)
        own = replace(own, indices=indices, weights=weights)
    if query.multi_vector is not None:
        own = replace(own, vectors=read_multi_vector(query.multi_vector, generation))
    given = list_given(query)
    return (own.dense if given == [DENSE] else own) if given else None


def read_embedding(values: list[float], generation: Generation) -> npt.NDArray[np.float32]:
    dimensions = generation.spec.dimensions
    if len(values) != dimensions:
        raise InvalidOption(
            f"The embedding has {len(values)} dimensions, but collection {generation.collection!r} has {dimensions}."
        )
    embedding = np.array(values, dtype=np.float64)
    largest = np.abs(embedding).max(initial=0)
    if not np.isfinite(largest) or largest == 0:
        raise InvalidOption("The embedding has no direction: its numbers must be finite and not all zero.")
    if generation.spec.similarity == DOT:
        return check_numbers("embedding", values)
    # Only the direction matters, since rows are compared by angle or sign. At length 1, no number exceeds a
    # float16, and no square exceeds the float32 in which pgvector sums.
    embedding /= largest
    return (embedding / np.linalg.norm(embedding)).astype(np.float32)


def read_sparse(
    weights: dict[int, float], generation: Generation
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Return the places and weights of a query's sparse vector, without those that are 0, in ascending order."""
    dimensions = generation.spec.sparse_dimensions
    for place in weights:
        if place >= dimensions:
            raise InvalidOption(
                f"sparse has the place {place}, but the vocabulary of collection {generation.collection!r} has places "
                f"from 0 to {dimensions - 1:,}."
            )
    places = sorted(place for place, weight in weights.items() if weight != 0)
    if not 0 < len(places) <= MAX_WEIGHTS:
        raise InvalidOption(
            f"sparse has {len(places):,} weights other than 0; it must have from 1 to {MAX_WEIGHTS:,}."
        )
    return np.array(places, np.uint32), check_numbers("sparse", [weights[place] for place in places])


def read_multi_vector(vectors: list[list[float]], generation: Generation) -> npt.NDArray[np.float16]:
    """Return a query's multi-vector, float16 [tokens, width]."""
    spec = generation.spec
    if not 0 < len(vectors) <= spec.max_tokens:
        raise InvalidOption(
            f"multi_vector has {len(vectors):,} vectors; it must have from 1 to {spec.max_tokens:,}, the most tokens "
            "that are read of a text."
        )
    for number, vector in enumerate(vectors):
        if len(vector) != spec.token_dimensions:
            raise InvalidOption(
                f"multi_vector[{number}] has {len(vector)} dimensions, but collection {generation.collection!r} has "
                f"{spec.token_dimensions}."
            )
    return check_numbers("multi_vector", vectors).astype(np.float16)


def check_numbers(name: str, numbers: Any) -> npt.NDArray[np.float32]:
    """Return the numbers as an array. Raise InvalidOption for one that is not finite, or whose products may not be."""
    checked = np.array(numbers, np.float64)
    if not (np.abs(checked) <= LARGEST_NUMBER).all():  # false for NaN too
        raise InvalidOption(f"{name} has numbers that are not finite, or larger than {LARGEST_NUMBER:,.0f}.")
    return checked.astype(np.float32)
