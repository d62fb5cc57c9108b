"""Reranking over HTTP: documents in the order in which they answer a query, while somebody waits."""

from collections.abc import Sequence
from typing import Any, Final
from uuid import uuid4

import numpy as np
from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from api.bodies.reranking import MAX_DOCUMENTS, RERANK_DECODER, RankedDocument, RerankAnswer, RerankRequest
from api.dependencies import Resources, ResourcesDependency
from api.door.media_types import require_json
from api.intake.requests import decode_body
from api.intake.submissions import read_body
from api.queries.encoding import answer_all, check_query, count_tokens
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.pair import pair_with_each
from vectormill.domain.tasks.task import JUDGE
from vectormill.models.registry import make_spec
from vectormill.vectors.scores import choose_scores

router = APIRouter(tags=["results"])

RERANK_DOCS: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"$ref": "#/components/schemas/RerankRequest"},
                "example": {
                    "query": "how to parse a date",
                    "documents": ["datetime.strptime reads a date.", "zlib compresses bytes."],
                    "top_n": 1,
                },
            }
        },
    }
}


@router.post("/v1/rerank", openapi_extra=RERANK_DOCS)
async def post_rerank(request: Request, resources: ResourcesDependency) -> RerankAnswer:
    """The documents that answer a query best, best first: by a classifier of pairs, or by the cosine of two vectors.

    The score of two labels is the second one's probability. A document that is too long is cut.
    """
    require_json(request)
    with resources.gates.json_bytes.hold() as hold:
        body = await read_body(request, resources.settings, hold)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            wanted, spec, pairs = await run_in_threadpool(read_pairs, body, resources)
            answered = await answer_all(resources, spec, pairs)
            return rank(wanted, spec, answered.vectors, count_tokens(answered, spec, pairs))


def read_pairs(body: bytes, resources: Resources) -> tuple[RerankRequest, EncodingSpec, list[bytes]]:
    """What is asked for, and the pairs that are to be judged. Raises Problem, InvalidOption and InvalidItem."""
    wanted = decode_body(body, RERANK_DECODER)
    options = EncodingOptions(task=JUDGE, max_tokens=wanted.max_tokens)
    return wanted, *pair_up(resources, wanted.model, options, wanted.query, wanted.texts())


def pair_up(
    resources: Resources,
    model: str,
    options: EncodingOptions,
    query: str,
    texts: Sequence[str],
    field: str = "documents",
) -> tuple[EncodingSpec, list[bytes]]:
    """The query with each text of the request's field. Raises UnknownModel, InvalidOption and InvalidItem."""
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise InvalidOption(f"{field} must be 1 to {MAX_DOCUMENTS:,}, not {len(texts):,}.")
    check_query(query, "", resources.settings)
    for index, text in enumerate(texts):
        check_query(text, f"{field}[{index}]: ", resources.settings, what="document")
    spec = make_spec(resources.registry.card(model), options)
    if len(spec.labels) > 2:
        raise InvalidOption(
            f"The model {model!r} tells {len(spec.labels)} labels apart ({', '.join(spec.labels[:3])}, …), and "
            "which of them ranks documents is not said; use a model of one label or of two."
        )
    return spec, pair_with_each(query.encode(), [text.encode() for text in texts])


def order_scores(
    numbers: "np.ndarray[Any, np.dtype[np.float32]]", spec: EncodingSpec, limit: int | None = None
) -> list[tuple[int, float]]:
    """Places and scores, the best first; equal scores in the order in which they were sent."""
    scores, _ = choose_scores(numbers, spec.labels)
    order = np.argsort(-scores, kind="stable")[:limit]
    return [(index, float(f"{scores[index]:.9g}")) for index in order.tolist()]


def rank(
    wanted: RerankRequest,
    spec: EncodingSpec,
    numbers: "np.ndarray[Any, np.dtype[np.float32]]",
    num_tokens: int,
) -> RerankAnswer:
    texts = wanted.texts()
    return RerankAnswer(
        id=str(uuid4()),
        usage={"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        model=wanted.model,
        results=[
            RankedDocument(
                index=index,
                relevance_score=score,
                document={"text": texts[index]} if wanted.return_documents else None,
            )
            for index, score in order_scores(numbers, spec, wanted.top_n)
        ],
    )
