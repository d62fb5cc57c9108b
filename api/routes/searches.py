"""Searches over HTTP: the rows of a collection that best match a text, a vector or another row."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.door.media_types import JSON_TYPE
from api.intake.receiving import SMALL_BYTES, receiving, run
from api.intake.requests import check_text, decode_body, locate
from api.openai.errors import name_parameter
from api.problems import Problem
from api.search_pool import GenerationChanged
from api.serving import serve, write_answer
from vectormill.batches.endpoints import write_input
from vectormill.collections.collection import Generation, require_vectors
from vectormill.collections.collections import fit_spec
from vectormill.collections.generations import find_spec
from vectormill.domain.encoding import DOT
from vectormill.domain.errors import (
    Conflict,
    EncodingTimeout,
    InvalidOption,
    InvalidSubmission,
    ItemNotFound,
    ModelError,
    NotFound,
    QueryLost,
    SpecMismatch,
    UnknownModel,
)
from vectormill.domain.task import DENSE
from vectormill.models.specs import settle_spec
from vectormill.rows.values import find_key_fault
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

# Writing this many matches takes a tenth of a millisecond.
FEW_MATCHES: Final = 20
# The largest float16, the type in which vectors of tokens are stored.
LARGEST_NUMBER: Final = float(np.finfo(np.float16).max)

# Errors of which a generation that is no longer live may be the reason.
STALE: Final = (InvalidSubmission, NotFound, Conflict, ModelError, EncodingTimeout, QueryLost)
# A collection may have another live generation so often while one search begins.
MOST_SWAPS: Final = 3


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a request, its search, and its JSON pointer in the body."""

    query: SearchQuery
    search: Search
    pointer: str


router = APIRouter(tags=["collections"])


@serve(router, operations.SEARCH)
async def post_search(request: Request, name: CollectionName, resources: ResourcesDependency) -> Response:
    """Return the rows that best match a query, best first; for several queries, the rows of each."""
    async with receiving(request, resources, read_request, is_quick=True) as (hold, (wanted, asked)):
        found = await search_collection(name, asked, resources, is_small=hold.amount <= SMALL_BYTES)
        answer = found[0] if wanted.queries is None else ManySearchesAnswer(data=found)
        is_short = sum(len(each["data"]) for each in found) <= FEW_MATCHES
        return Response(await run(is_short, write_answer, answer), media_type=JSON_TYPE)


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
        except (GenerationChanged, Problem, *STALE) as error:
            # The remembered generation may have been the reason. If it still is the live one, it was not.
            live = await resources.searches.find_generation(name, afresh=True)
            if live == generation and not isinstance(error, GenerationChanged):
                raise
            generation = live
    raise Conflict(f"The generation of {name!r} changes all the time; search again.")


def read_request(body: bytes, resources: Resources) -> tuple[SearchRequest, list[Asked]]:
    """Return a decoded request, and its queries with their searches. Raise Problem, InvalidOption and ItemNotFound."""
    wanted = decode_body(body, SEARCH_DECODER)
    queries = read_queries(wanted, resources.settings.max_search_queries)
    located = {"": queries[0]} if wanted.queries is None else locate(queries, "queries")
    return wanted, [read_query(query, resources, pointer) for pointer, query in located.items()]


def read_query(query: SearchQuery, resources: Resources, pointer: str = "") -> Asked:
    """Return a query with its search. The errors, those of `read_request`, name the query at `pointer`."""
    with naming(pointer):
        search = make_search(query)
        like = search.like
        if like is not None and (reason := find_key_fault(like, resources.settings.max_key_bytes)):
            raise ItemNotFound(f"more_like is not the key of an item: {reason}.")
    if query.text is not None:
        check_text(write_input(query.text), resources.settings.max_text_chars, f"{pointer}/text")
    return Asked(query, search, pointer)


@contextmanager
def naming(pointer: str) -> Iterator[None]:
    """Let errors of the block begin with the query's name, if it is one of several."""
    try:
        yield
    except (InvalidOption, ItemNotFound) as error:
        raise type(error)(f"{name_parameter(pointer)}: {error}" if pointer else str(error)) from error


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
        with naming(each.pointer):
            outputs = each.query.outputs or list_given(each.query) or None
            search = fit_outputs(each.search, outputs, generation.spec, generation.collection)
            fitted.append((search, read_own_vectors(each.query, generation)))
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
        by_pointer = {f"{asked[number].pointer}/text": text for number, text in of_searches.items()}
        encoded = await resources.queries.encode_queries(spec, by_pointer, deadline)
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
    check_length("The embedding", values, generation.spec.dimensions, generation)
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
    if (place := max(weights, default=0)) >= dimensions:
        raise InvalidOption(
            f"sparse has the place {place}, but the vocabulary of collection {generation.collection!r} has places "
            f"from 0 to {dimensions - 1:,}."
        )
    if min(weights.values(), default=0) < 0:
        raise InvalidOption("sparse has negative weights, which no row of a collection has; leave them out.")
    places = sorted(place for place, weight in weights.items() if weight != 0)
    check_amount("sparse", len(places), "weights other than 0", MAX_WEIGHTS)
    return np.array(places, np.uint32), check_numbers("sparse", [weights[place] for place in places])


def read_multi_vector(vectors: list[list[float]], generation: Generation) -> npt.NDArray[np.float16]:
    """Return a query's multi-vector, float16 [tokens, width]."""
    check_amount("multi_vector", len(vectors), "vectors", generation.spec.max_tokens)
    for number, vector in enumerate(vectors):
        check_length(f"multi_vector[{number}]", vector, generation.spec.token_dimensions, generation)
    return check_numbers("multi_vector", vectors).astype(np.float16)


def check_length(name: str, vector: Sequence[float], dimensions: int, generation: Generation) -> None:
    """Raise InvalidOption if a vector has another length than those of the collection."""
    if len(vector) != dimensions:
        raise InvalidOption(
            f"{name} has {len(vector)} dimensions, but collection {generation.collection!r} has {dimensions}."
        )


def check_amount(name: str, amount: int, things: str, most: int) -> None:
    """Raise InvalidOption if a query has none of something, or more than a collection keeps for a text."""
    if not 0 < amount <= most:
        raise InvalidOption(f"{name} has {amount:,} {things}; it must have from 1 to {most:,}.")


def check_numbers(name: str, numbers: Any) -> npt.NDArray[np.float32]:
    """Return the numbers as an array. Raise InvalidOption for one that is not finite, or whose products may not be."""
    checked = np.array(numbers, np.float64)
    if not (np.abs(checked) <= LARGEST_NUMBER).all():  # false for NaN too
        raise InvalidOption(f"{name} has numbers that are not finite, or larger than {LARGEST_NUMBER:,.0f}.")
    return checked.astype(np.float32)
