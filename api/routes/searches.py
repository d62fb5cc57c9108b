"""Searches over HTTP: the rows of a collection that best match a text, a vector or another row."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import CollectionName, Resources, ResourcesDependency, parse_collection_name
from api.door.media_types import require_json
from api.intake.requests import UnreadableItem, check_key, decode_body
from api.intake.submissions import read_body
from api.queries import check_query
from api.serving import serve, write_answer
from vectormill.collections.collection import Generation, require_vectors
from vectormill.collections.collections import fit_spec
from vectormill.collections.generations import find_spec
from vectormill.domain.encoding import DOT
from vectormill.domain.errors import InvalidOption, ItemNotFound, ModelError, SpecMismatch, UnknownModel
from vectormill.domain.task import DENSE
from vectormill.models.specs import settle_spec
from vectormill.search import operations
from vectormill.search.operations import (
    SEARCH_DECODER,
    ManySearchesAnswer,
    SearchQuery,
    SearchRequest,
    list_given,
    make_search,
    read_queries,
    tell_nearest,
)
from vectormill.search.search import Nearest, Search, fit_outputs
from vectormill.vectors.representations import MAX_WEIGHTS, Representations

P = ParamSpec("P")
T = TypeVar("T")
# Reading a body of this size, or writing this many matches, takes a tenth of a millisecond.
SMALL_BYTES: Final = 16 << 10
FEW_MATCHES: Final = 20
# The largest float16, the type in which vectors of tokens are stored.
LARGEST_NUMBER: Final = float(np.finfo(np.float16).max)

# The dense vector of a query, float32 [dimensions], or several outputs.
Vectors = npt.NDArray[np.float32] | Representations


router = APIRouter(tags=["collections"])


@serve(router, operations.SEARCH)
async def post_search(request: Request, name: CollectionName, resources: ResourcesDependency) -> Response:
    """Return the rows that best match a query, best first; for several queries, the rows of each."""
    name = parse_collection_name(name)
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        is_small = len(body) <= SMALL_BYTES
        wanted = await run(is_small, decode_body, body, SEARCH_DECODER)
    with resources.gates.searches.enter():  # after the body, which may arrive slowly
        queries, searches = await run(is_small, make_searches, wanted, resources)
        generation = await open_generation(resources, name, queries)
        searches, given = await run(
            is_small, fit_searches, queries, searches, generation, wanted.queries is None
        )
        found = await find_nearest(queries, searches, given, generation, resources)
        num_matches = sum(len(nearest.matches) for nearest in found)
        content = await run(num_matches <= FEW_MATCHES, make_answer, searches, found, wanted.queries is None)
        return Response(content, media_type="application/json")


async def run(is_little: bool, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run short work at once, because switching to a thread would take longer, and other work on a thread."""
    return work(*arguments, **options) if is_little else await run_in_threadpool(work, *arguments, **options)


def make_searches(wanted: SearchRequest, resources: Resources) -> tuple[list[SearchQuery], list[Search]]:
    """Return a request's queries, and the search for each. Raise the errors of make_one_search."""
    queries = read_queries(wanted, resources.settings.max_search_queries)
    searches = [
        make_one_search(query, name_place(number, wanted.queries is None), resources)
        for number, query in enumerate(queries)
    ]
    return queries, searches


def name_place(number: int, is_one: bool) -> str:
    """Return the beginning of an error message about one of several queries; empty if it is the only one."""
    return "" if is_one else f"queries[{number}]: "


def make_one_search(query: SearchQuery, place: str, resources: Resources) -> Search:
    """Return the search for a query. The errors begin with `place`, the position of the query.

    Raise InvalidOption, InvalidItem and ItemNotFound.
    """
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
    return search


async def open_generation(resources: Resources, name: str, queries: Sequence[SearchQuery]) -> Generation:
    """Return the live generation of a collection.

    Raise CollectionNotFound, WrongKind for a collection without vectors, and SpecMismatch for queries of
    another vector space.
    """
    generation = await resources.generations.find(name)
    require_vectors(name, generation.kind, "A search compares")
    fingerprints = {query.fingerprint for query in queries} - {None}
    if fingerprints and fingerprints != {generation.spec.fingerprint()}:
        await run_in_threadpool(refuse_other_spaces, resources, generation, queries)
    return generation


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


def fit_searches(
    queries: Sequence[SearchQuery], searches: Sequence[Search], generation: Generation, is_one: bool
) -> tuple[list[Search], list[Vectors | None]]:
    """Return the searches with the outputs of the collection that each compares, and the queries' own vectors.

    Raise InvalidOption, which begins with the position of the query unless `is_one`.
    """
    fitted, given = [], []
    for number, (query, search) in enumerate(zip(queries, searches, strict=True)):
        try:
            outputs = query.outputs or list_given(query) or None
            fitted.append(fit_outputs(search, outputs, generation.spec, generation.collection))
            given.append(read_own_vectors(query, generation))
        except InvalidOption as error:
            raise InvalidOption(f"{name_place(number, is_one)}{error}") from error
    return fitted, given


async def find_nearest(
    queries: Sequence[SearchQuery],
    searches: Sequence[Search],
    given: Sequence[Vectors | None],
    generation: Generation,
    resources: Resources,
) -> list[Nearest]:
    """Return the matches of each search, by the vectors that are given or by those of the query's text.

    All texts that need the same outputs are encoded together. Raise the errors of QueryExchange.encode_queries and
    find_matches.
    """
    embeddings, cut = list(given), set[int]()
    texts: dict[tuple[str, ...], dict[int, str]] = {}
    for number, (query, search) in enumerate(zip(queries, searches, strict=True)):
        if given[number] is None and query.text is not None and search.outputs:
            texts.setdefault(search.outputs, {})[number] = query.text
    for outputs, asked in texts.items():
        spec = generation.spec.narrow(outputs)
        encoded = await resources.queries.encode_queries(spec, list(asked.values()))
        for number, (embedding, is_cut) in zip(asked, encoded, strict=True):
            embeddings[number] = embedding
            cut |= {number} if is_cut else set()
    found = await resources.searches.find(generation, list(zip(searches, embeddings, strict=True)))
    return [replace(nearest, is_cut=number in cut) for number, nearest in enumerate(found)]


def make_answer(searches: Sequence[Search], found: Sequence[Nearest], is_one: bool) -> bytes:
    """Return the JSON answer: one list of matches, or one per query unless `is_one`."""
    answers = [tell_nearest(nearest, search) for nearest, search in zip(found, searches, strict=True)]
    return write_answer(answers[0] if is_one else ManySearchesAnswer(data=answers))


def read_own_vectors(query: SearchQuery, generation: Generation) -> Vectors | None:
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
