"""The operation that searches a collection, with the bodies that API and client exchange."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from vectormill.collections.operations import PassageBody
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.keys.api_key import READ
from vectormill.operation import Operation
from vectormill.search.filter import OPERATORS, parse_filter
from vectormill.search.search import (
    BY_VECTOR,
    HYBRID,
    MAX_LIMIT,
    MAX_OFFSET,
    METADATA,
    TEXT,
    VECTOR,
    Search,
    check_search,
)

# Limits of matches, and of matches with vectors, of all queries of a request together. They are in memory until sent.
MAX_MATCHES: Final = 10_000
MAX_VECTORS: Final = 1_000

FILTER_DESCRIPTION: Final = (
    f"Conditions on the metadata, all of which must hold: a value, or operators ({', '.join(OPERATORS)}). A dotted "
    "name leads into an object, and one in double quotes is taken as it is; `and` and `or` take lists of filters, "
    "`not` takes one."
)


class Weights(msgspec.Struct, forbid_unknown_fields=True):
    """The weights of the rankings that are fused."""

    vector: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    text: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    sparse: Annotated[float, Meta(ge=0, le=1000)] = 1.0


class SearchQuery(msgspec.Struct, forbid_unknown_fields=True):
    """One search: for a text, for vectors of the collection's space, or for rows similar to one of its rows."""

    text: Annotated[str | None, Meta(examples=["how to parse a date"])] = None
    embedding: Annotated[
        list[float] | None, Meta(description="The query's own dense vector, instead of a text.")
    ] = None
    sparse: Annotated[
        dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,8})$")], float] | None,
        Meta(
            description="The query's own sparse weights, by their places in the vocabulary from 0.",
            examples=[{"2003": 1.25, "3407": 0.5}],
        ),
    ] = None
    multi_vector: Annotated[
        list[list[float]] | None, Meta(description="The query's own multi-vector: a vector for each token.")
    ] = None
    more_like: Annotated[
        str | None, Meta(description="The key of a row: find the rows nearest to it, without the row itself.")
    ] = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] = 10
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET, description="Skip this many of the best matches.")] = 0
    filter: Annotated[
        dict[str, Any] | None,
        Meta(description=FILTER_DESCRIPTION, examples=[{"lang": "de", "year": {"gte": 2020}}]),
    ] = None
    mode: Annotated[
        Literal["vector", "text", "hybrid"] | None,
        Meta(description="By vectors (the default), by words, or by both, fused by their ranks."),
    ] = None
    hybrid: Annotated[bool | None, Meta(description="true means mode hybrid.")] = None
    weights: Annotated[Weights | None, Meta(description="The weights of the rankings that are fused.")] = None
    outputs: Annotated[
        Annotated[list[Literal["dense", "sparse", "multi_vector"]], Meta(min_length=1, max_length=3)] | None,
        Meta(
            description="The outputs that are compared, by default those of the query's own vectors, or else dense, or "
            "the first that the collection has. "
            "Rankings by dense and sparse are fused by their ranks, and multi_vector orders the best rows anew by "
            "MaxSim; alone, it compares every row."
        ),
    ] = None
    include: Annotated[
        Annotated[list[Literal["vector", "text", "metadata"]], Meta(max_length=3)] | None,
        Meta(description="Fields of the answer besides key and score. By default the metadata."),
    ] = None
    group_by: Annotated[
        Literal["document"] | None, Meta(description="Return only the best passage of each document.")
    ] = None
    min_score: Annotated[float | None, Meta(description="Leave out matches with a lower score.")] = None
    ef_search: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None,
        Meta(description="Candidates that an HNSW index examines; by default chosen by the limit."),
    ] = None
    fingerprint: Annotated[
        Annotated[str, Meta(pattern="^[0-9a-f]{16}$")] | None,
        Meta(description="Refuse the search unless the collection has this vector space."),
    ] = None


class SearchRequest(SearchQuery, forbid_unknown_fields=True):
    """The JSON body of a search: one query, or `queries` and nothing else."""

    queries: Annotated[
        Annotated[list[SearchQuery], Meta(min_length=1)] | None,
        Meta(description="Queries to answer together, in this order."),
    ] = None


# The part of the JSON schema that types cannot express: a query needs one of these fields.
KIND_OF_FIELD: Final = {
    "text": "string", "embedding": "array", "sparse": "object", "multi_vector": "array", "more_like": "string",
    "queries": "array",
}  # fmt: skip
ONE_OR_MANY: Final = {
    "anyOf": [
        {"required": [name], "properties": {name: {"type": kind}}} for name, kind in KIND_OF_FIELD.items()
    ]
}
ONE_QUERY: Final = {"anyOf": ONE_OR_MANY["anyOf"][:-1]}

SEARCH_DECODER: Final = msgspec.json.Decoder(SearchRequest)


def read_queries(request: SearchRequest, max_queries: int) -> list[SearchQuery]:
    """Return the queries of a request: those in `queries`, or the request itself as the only one.

    Raise InvalidOption if it has both, or if there are more than `max_queries` or too many matches in all.
    """
    if request.queries is None:
        return [request]
    if msgspec.structs.replace(request, queries=None) != SearchRequest():
        raise InvalidOption(
            "A request must contain either one query or `queries`; with `queries`, options belong in each query."
        )
    if len(request.queries) > max_queries:
        raise InvalidOption(
            f"Too many queries: {len(request.queries):,}; VECTORMILL_MAX_SEARCH_QUERIES allows {max_queries:,} at once."
        )
    num_matches = sum(query.limit for query in request.queries)
    num_vectors = sum(query.limit for query in request.queries if VECTOR in (query.include or ()))
    if num_matches > MAX_MATCHES or num_vectors > MAX_VECTORS:
        raise InvalidOption(
            f"The limits of all queries add up to {num_matches:,} matches and {num_vectors:,} vectors; at most "
            f"{MAX_MATCHES:,} matches and {MAX_VECTORS:,} vectors are allowed. Lower them, or send several requests."
        )
    return request.queries


def make_search(query: SearchQuery) -> Search:
    """Make a Search of a client's query; its vector is passed separately. Raise InvalidOption for contradictions."""
    if query.mode is not None and query.hybrid not in (None, query.mode == HYBRID):
        raise InvalidOption(f"hybrid=true means mode hybrid; omit hybrid, or else mode={query.mode}.")
    mode = query.mode or (HYBRID if query.hybrid else BY_VECTOR)
    given = list_given(query)
    if mode == BY_VECTOR and bool(given) + (query.text is not None) + (query.more_like is not None) != 1:
        raise InvalidOption(
            "A search needs exactly one of text, more_like and its own vectors (embedding, sparse, multi_vector)."
        )
    if query.outputs is not None and given and set(query.outputs) != set(given):
        raise InvalidOption(
            f"The query has its own vectors for {', '.join(given)}, so outputs must be these: send a vector for each "
            "output that is to be compared, or a text."
        )
    if mode == TEXT and set(given) - {MULTI_VECTOR}:
        raise InvalidOption(
            "A search in mode text does not compare vectors: omit embedding and sparse, or use mode hybrid."
        )
    weights = query.weights or Weights()
    search = Search(
        limit=query.limit,
        offset=query.offset,
        mode=mode,
        words=query.text if mode != BY_VECTOR else None,
        like=query.more_like,
        condition=parse_filter(query.filter) if query.filter is not None else None,
        by_document=query.group_by is not None,
        include=(METADATA,) if query.include is None else tuple(dict.fromkeys(query.include)),
        min_score=query.min_score,
        ef_search=query.ef_search,
        vector_weight=weights.vector,
        text_weight=weights.text,
        sparse_weight=weights.sparse,
    )
    check_search(search)
    return search


def list_given(query: SearchQuery) -> list[str]:
    """Return the outputs for which a query has its own vectors, in the order of OUTPUTS."""
    own = {DENSE: query.embedding, SPARSE: query.sparse, MULTI_VECTOR: query.multi_vector}
    return [name for name, vectors in own.items() if vectors is not None]


class MatchBody(TypedDict):
    """A row that a search found. Parts that were not requested or do not exist are left out."""

    key: str
    score: Annotated[
        float,
        Meta(
            description="Cosine similarity, -1 to 1, or the inner product if the collection compares by it; in a "
            "binary collection, that of the signs. In mode text, how close together the words are; of several "
            "rankings, the sum of weight / (60 + rank). By the output sparse it is the inner product, and by "
            "multi_vector the sum of each query token's largest one."
        ),
    ]
    metadata: NotRequired[dict[str, Any] | None]
    text: NotRequired[Annotated[str | None, Meta(description="Null unless the collection keeps texts.")]]
    embedding: NotRequired[
        Annotated[list[float] | None, Meta(description="In the collection's vector type, as in an export.")]
    ]
    document: NotRequired[
        Annotated[str | None, Meta(description="The key of the document whose passage it is.")]
    ]
    passage: NotRequired[PassageBody | None]
    vector_rank: NotRequired[
        Annotated[int | None, Meta(description="In mode hybrid: its rank by vectors, from 1.")]
    ]
    text_rank: NotRequired[
        Annotated[int | None, Meta(description="In mode hybrid: its rank by words, from 1.")]
    ]
    sparse_rank: NotRequired[
        Annotated[int | None, Meta(description="Of several rankings: its rank by sparse vectors, from 1.")]
    ]


class SearchAnswer(TypedDict):
    """The matches of one search, best first, and how they were found."""

    data: list[MatchBody]
    num_rows_read: Annotated[
        int | None,
        Meta(
            description="About how many rows there are, all of which were read, since no index served the search or it "
            "was repeated; null when an index was used."
        ),
    ]
    num_rows_unindexed: NotRequired[
        Annotated[
            int,
            Meta(
                description="Rows that have too many sparse weights for the index, all of which were read beside it; "
                "only if an index of sparse weights was used."
            ),
        ]
    ]
    next_offset: NotRequired[
        Annotated[int, Meta(description="The offset of the next page; omitted on the last page.")]
    ]
    repeated_because: NotRequired[
        Annotated[
            str, Meta(description="Why the search was repeated exactly: an index had returned too few.")
        ]
    ]
    incomplete_because: NotRequired[
        Annotated[str, Meta(description="Why there may be better or further matches, which need more time.")]
    ]
    pages_differ_because: NotRequired[
        Annotated[str, Meta(description="Why this page may repeat or miss matches of those before.")]
    ]
    truncated: NotRequired[
        Annotated[bool, Meta(description="True if the query's text was cut at max_tokens; else omitted.")]
    ]
    missing_fields: NotRequired[
        Annotated[
            list[str], Meta(description="If nothing was found: fields of the filter that no sampled row has.")
        ]
    ]


class ManySearchesAnswer(TypedDict):
    """The answers to each of `queries`, in their order."""

    data: list[SearchAnswer]


# Below this number of rows, reading all of them takes a few milliseconds, and nobody needs an index.
MANY_ROWS: Final = 10_000


def list_notes(answer: Mapping[str, Any], collection: str) -> list[str]:
    """Return sentences for people about how an answer was found."""
    notes = []
    if answer.get("truncated"):
        notes.append(
            f"Only the beginning of the query was read, as many tokens as {collection} has as max_tokens."
        )
    if (reason := answer.get("incomplete_because")) is not None:
        notes.append(f"There may be better matches: {reason}.")
    elif (reason := answer.get("repeated_because")) is not None:
        notes.append(f"Repeated as an exact search, because {reason}.")
    elif (num_rows := answer.get("num_rows_read") or 0) >= MANY_ROWS:
        notes.append(
            f"No vector index served this search: all rows of {collection}, about {num_rows:,}, were read. "
            f"`vectormill collections index {collection}` shows the indexes, and `vectormill collections index "
            f"{collection} --policy hnsw --wait` builds one."
        )
    if (reason := answer.get("pages_differ_because")) is not None:
        notes.append(f"Pages may repeat or miss matches, because {reason}.")
    if missing := answer.get("missing_fields"):
        hint = (
            " A name that has a dot stands in double quotes." if any("." in name for name in missing) else ""
        )
        notes.append(f"No row that was sampled has the metadata field {' or '.join(missing)}.{hint}")
    return notes


# A search is not retried, since the server itself waits for a worker for VECTORMILL_SEARCH_TIMEOUT_SECONDS.
SEARCH: Final = Operation(
    "POST", "/v1/collections/{name}/search", READ, SearchAnswer, SearchRequest,
    other_answer=ManySearchesAnswer, is_repeatable=False, is_slow=True,
    examples={
        "one": {"text": "how to parse a date", "limit": 3},
        "filtered": {"text": "dates", "filter": {"lang": "de", "year": {"gte": 2020}}},
        "many": {"queries": [{"text": "dates"}, {"more_like": "json.dumps"}]},
    },
)  # fmt: skip
