"""Searches over HTTP: the rows of a collection that best match a text, a vector or another row."""

from typing import Final

from fastapi import APIRouter, Request, Response

from api.dependencies import CollectionName, Resources, ResourcesDependency
from api.intake.bodies import SMALL_BYTES, receiving, run
from api.intake.requests import decode_body, locate
from api.problems import JSON_TYPE
from api.searches import RequestedSearch, read_query
from api.serving import serve, write_answer
from vectormill.search import operations
from vectormill.search.operations import SEARCH_DECODER, ManySearchesAnswer, SearchRequest, read_queries

# Writing this many matches takes a tenth of a millisecond.
FEW_MATCHES: Final = 20

router = APIRouter(tags=["collections"])


@serve(router, operations.SEARCH)
async def post_search(request: Request, name: CollectionName, resources: ResourcesDependency) -> Response:
    """Return the rows that best match a query, best first; for several queries, the rows of each."""
    async with receiving(request, resources, read_request, is_quick=True) as (hold, (wanted, asked)):
        found = await resources.searches.search(name, asked, is_small=hold.amount <= SMALL_BYTES)
        answer = found[0] if wanted.queries is None else ManySearchesAnswer(data=found)
        is_short = sum(len(each["data"]) for each in found) <= FEW_MATCHES
        return Response(await run(is_short, write_answer, answer), media_type=JSON_TYPE)


def read_request(body: bytes, resources: Resources) -> tuple[SearchRequest, list[RequestedSearch]]:
    """Return a decoded request, and its queries with their searches. Raise Problem, InvalidOption and ItemNotFound."""
    wanted = decode_body(body, SEARCH_DECODER)
    queries = read_queries(wanted, resources.settings.max_search_queries)
    located = {"": queries[0]} if wanted.queries is None else locate(queries, "queries")
    return wanted, [read_query(query, resources.settings, pointer) for pointer, query in located.items()]
