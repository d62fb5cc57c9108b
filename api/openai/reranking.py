"""Reranking over HTTP: documents are ranked by their relevance to a query, while the client waits."""

from collections.abc import Sequence
from uuid import uuid4

from fastapi import APIRouter, Request

from api.dependencies import Resources, ResourcesDependency
from api.intake.requests import decode_body
from api.openai.embeddings import receiving
from api.queries import check_query
from api.serving import serve
from vectormill.batches.endpoints import (
    RERANK_DECODER,
    EncodingRequest,
    RankedDocument,
    RerankAnswer,
    RerankRequest,
    VoyageRankedDocument,
    VoyageRerankAnswer,
    check_documents,
    check_ranks,
    resolve_spec,
)
from vectormill.batches.operations import RERANK
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import pair_with_each
from vectormill.vectors.scores import Numbers, rank_scores

router = APIRouter(tags=["results"])


@serve(router, RERANK)
async def post_rerank(request: Request, resources: ResourcesDependency) -> RerankAnswer | VoyageRerankAnswer:
    """Rank documents by how well they answer a query, by a classifier of pairs or by the cosine of two vectors.

    With two labels, the score is the second label's probability. A document that is too long is truncated.
    """
    async with receiving(request, resources, read_pairs) as (_, (wanted, spec, pairs)):
        answered = await resources.queries.answer_all(spec, pairs)
        return rank(wanted, spec, answered.vectors, answered.num_tokens)


def read_pairs(body: bytes, resources: Resources) -> tuple[RerankRequest, EncodingSpec, list[bytes]]:
    """Return the decoded request, its spec, and its pairs of query and document.

    Raise Problem, InvalidOption and InvalidItem.
    """
    wanted = decode_body(body, RERANK_DECODER)
    return wanted, *pair_up(resources, wanted.encoding(), wanted.query, wanted.texts())


def pair_up(
    resources: Resources, encoding: EncodingRequest, query: str, texts: list[str], field: str = "documents"
) -> tuple[EncodingSpec, list[bytes]]:
    """Return the spec, and pairs of the query with each text. `field` names the texts in errors.

    Raise UnknownModel, InvalidOption and InvalidItem.
    """
    check_documents(texts, field)
    check_query(query, "", resources.settings)
    for index, text in enumerate(texts):
        check_query(text, f"{field}[{index}]: ", resources.settings, what="document")
    spec = resolve_spec(resources.registry, encoding)
    check_ranks(spec)
    return spec, pair_with_each(query.encode(), [text.encode() for text in texts])


def rank(
    wanted: RerankRequest, spec: EncodingSpec, numbers: Numbers, num_tokens: int
) -> RerankAnswer | VoyageRerankAnswer:
    """Return the ranked documents: in Voyage's format if the request has its field names, else in Cohere's."""
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    texts = wanted.texts() if wanted.return_documents else None
    if not wanted.is_voyages:
        results = rank_documents(numbers, spec, texts, wanted.limit)
        return RerankAnswer(id=str(uuid4()), model=wanted.model, results=results, usage=usage)
    data = [
        VoyageRankedDocument(
            index=index, relevance_score=score, document=None if texts is None else texts[index]
        )
        for index, score in rank_scores(numbers, spec.labels, wanted.limit)
    ]
    return VoyageRerankAnswer(object="list", data=data, model=wanted.model, usage=usage)


def rank_documents(
    numbers: Numbers, spec: EncodingSpec, texts: Sequence[str] | None, limit: int | None
) -> list[RankedDocument]:
    """Return the best `limit` documents, best first, with their texts unless `texts` is None."""
    return [
        RankedDocument(
            index=index, relevance_score=score, document=None if texts is None else {"text": texts[index]}
        )
        for index, score in rank_scores(numbers, spec.labels, limit)
    ]
