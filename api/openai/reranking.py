"""Reranking over HTTP: documents are ranked by their relevance to a query, while the client waits."""

from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request

from api.dependencies import Resources, ResourcesDependency
from api.intake.bodies import receiving
from api.intake.requests import check_text, decode_body
from api.openai.embeddings import read_texts
from api.queries import Answered
from api.serving import serve
from vectormill.batches.endpoints import (
    RERANK_DECODER,
    EncodingRequest,
    RerankAnswer,
    RerankRequest,
    VoyageRerankAnswer,
    check_documents,
    check_ranks,
    resolve_spec,
    write_input,
)
from vectormill.batches.operations import RERANK
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import pair_with_each
from vectormill.vectors.scores import rank_scores

router = APIRouter(tags=["results"])

# The arguments of QueryExchange.answer: the spec, and the pairs by the JSON pointers of their documents.
Asked = tuple[EncodingSpec, dict[str, bytes]]


@serve(router, RERANK)
async def post_rerank(request: Request, resources: ResourcesDependency) -> RerankAnswer | VoyageRerankAnswer:
    """Rank documents by how well they answer a query, by a classifier of pairs or by the cosine of two vectors.

    With two labels, the score is the second label's probability. A document that is too long is truncated.
    """
    async with receiving(request, resources, read_pairs) as (_, (wanted, asked)):
        return rank(wanted, asked[0], await resources.queries.answer(*asked))


def read_pairs(body: bytes, resources: Resources) -> tuple[RerankRequest, Asked]:
    """Return the decoded request, and its pairs of query and document. Raise the errors of pair_up."""
    return pair_documents(decode_body(body, RERANK_DECODER), resources)


def pair_documents(wanted: RerankRequest, resources: Resources) -> tuple[RerankRequest, Asked]:
    """Return a request with its pairs of query and document. Raise the errors of pair_up."""
    return wanted, pair_up(resources, wanted.encoding(), wanted.query, wanted.texts())


def pair_up(
    resources: Resources, encoding: EncodingRequest, query: str, texts: list[str], field: str = "documents"
) -> Asked:
    """Return pairs of the query with each text of a field. Raise Problem, UnknownModel and InvalidOption."""
    check_documents(texts, field)
    asked = write_input(query)
    check_text(asked, resources.settings.max_text_chars, "/query")
    encoded = read_texts(texts, field, resources)
    spec = resolve_spec(resources.registry, encoding)
    check_ranks(spec)
    return spec, dict(zip(encoded, pair_with_each(asked, [*encoded.values()]), strict=True))


def rank(wanted: RerankRequest, spec: EncodingSpec, answered: Answered) -> RerankAnswer | VoyageRerankAnswer:
    """Return the ranked documents: in Voyage's format if the request has its field names, else in Cohere's."""
    usage = {"prompt_tokens": answered.num_tokens, "total_tokens": answered.num_tokens}
    ranked = rank_documents(wanted, spec, answered)
    if wanted.is_voyages:
        return VoyageRerankAnswer(object="list", data=ranked, model=wanted.model, usage=usage)
    return RerankAnswer(id=str(uuid4()), model=wanted.model, results=ranked, usage=usage)


def rank_documents(wanted: RerankRequest, spec: EncodingSpec, answered: Answered) -> list[Any]:
    """Return the best documents, best first, as the request's format describes each."""
    texts = wanted.texts() if wanted.return_documents else None

    def show(index: int) -> str | dict[str, str] | None:
        if texts is None:
            return None
        return texts[index] if wanted.is_voyages else {"text": texts[index]}

    return [
        {"index": index, "relevance_score": score, "document": show(index)}
        for index, score in rank_scores(answered.vectors, spec.labels, wanted.limit)
    ]
