"""The shapes of text-embeddings-inference and of Cohere over HTTP, as far as they say what ours can do."""

from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import Resources, ResourcesDependency
from api.intake.requests import decode_body
from api.openai.cohere import (
    COHERE_DECODER,
    COHERE_RANK_DECODER,
    RANK_META,
    CohereAnswer,
    CohereEmbedRequest,
    CohereFirstAnswer,
    CohereRankAnswer,
    CohereRankRequest,
    write_cohere_answer,
    write_first_answer,
)
from api.openai.tei import (
    EMBED_DECODER,
    PREDICT_DECODER,
    RANK_DECODER,
    SIMILARITY_DECODER,
    EmbedRequest,
    InfoBody,
    PredictionBody,
    PredictRequest,
    RankBody,
    RankRequest,
    check_direction,
    choose_model,
)
from api.queries.encoding import encode_texts
from api.queries.exchange import Answered
from api.routes.openai.embedded import embed, read_texts, read_wanted, write
from api.routes.reranking import pair_up, rank_documents
from vectormill.batches.endpoints import MAX_INPUTS, EncodingRequest, resolve_spec
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE
from vectormill.jobs.item import join_pair
from vectormill.vectors.decimals import write_decimals
from vectormill.vectors.scores import rank_scores

router = APIRouter(tags=["other APIs"])

JSON: Final = "application/json"


def takes(name: str, example: dict[str, Any]) -> dict[str, Any]:
    """A body of this schema, for the description."""
    schema = {"$ref": f"#/components/schemas/{name}"}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema, "example": example}}}}


@router.post(
    "/", openapi_extra=takes("EmbedRequest", {"inputs": ["dates"]}), response_model=list[list[float]]
)
@router.post(
    "/embed", openapi_extra=takes("EmbedRequest", {"inputs": ["dates"]}), response_model=list[list[float]]
)
async def post_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Vectors alone, as text-embeddings-inference answers them."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, texts = await read_wanted(request, resources, hold, read_embed)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            encoding = wanted.encoding(resources.registry)
            answered, _ = await embed(resources, hold, encoding, texts, "inputs")

            def write_rows() -> bytes:
                rows = (b"[" + row.tobytes() for row in write_decimals(answered.vectors))
                return b"[" + b",".join(rows) + b"]"

            return Response(await write(answered, write_rows), media_type=JSON)


def read_embed(body: bytes, resources: Resources) -> tuple[EmbedRequest, list[bytes]]:
    """Raises Problem and InvalidOption."""
    wanted = decode_body(body, EMBED_DECODER)
    return wanted, check_embed(wanted, resources)


def check_embed(wanted: EmbedRequest, resources: Resources) -> list[bytes]:
    """Return the texts. Raises Problem and InvalidOption."""
    check_direction(wanted.truncation_direction)
    inputs = [wanted.inputs] if isinstance(wanted.inputs, str) else wanted.inputs
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidOption(f"inputs must be 1 to {MAX_INPUTS:,}, not {len(inputs):,}.")
    if wanted.prompt_name is not None:
        prompts = resources.registry.card(choose_model(resources.registry, wanted.model)).prompts
        if wanted.prompt_name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidOption(f"The model has no prompt {wanted.prompt_name!r}; it has {known}.")
    return read_texts(inputs, "inputs", resources)


@router.post(
    "/similarity",
    openapi_extra=takes(
        "SimilarityRequest", {"inputs": {"source_sentence": "dates", "sentences": ["strptime", "zlib"]}}
    ),
)
async def post_similarity(request: Request, resources: ResourcesDependency) -> list[float]:
    """The cosine of each sentence with the source sentence, as text-embeddings-inference answers them."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, texts = await read_wanted(request, resources, hold, read_similarity)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            answered, _ = await embed(resources, hold, wanted.encoding(resources.registry), texts, "inputs")
            cosines = answered.vectors[1:] @ answered.vectors[0]
            return [float(f"{cosine:.9g}") for cosine in cosines.tolist()]


def read_similarity(body: bytes, resources: Resources) -> tuple[EmbedRequest, list[bytes]]:
    """Raises Problem and InvalidOption."""
    wanted = decode_body(body, SIMILARITY_DECODER)
    if not wanted.inputs.sentences:
        raise InvalidOption("inputs.sentences is empty, so there is nothing to compare; send one at least.")
    request = wanted.as_embed_request()
    return request, check_embed(request, resources)


@router.post(
    "/rerank",
    openapi_extra=takes("RankRequest", {"query": "dates", "texts": ["strptime", "zlib"]}),
    response_model_exclude_none=True,
)
async def post_rank(request: Request, resources: ResourcesDependency) -> list[RankBody]:
    """Texts by their relevance to a query, as text-embeddings-inference answers them."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, (spec, pairs) = await read_wanted(request, resources, hold, read_rank)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            numbers = await encode_texts(resources, spec, pairs)
            _, texts = wanted.read_texts()
            return [
                RankBody(index=index, score=score, text=texts[index] if wanted.return_text else None)
                for index, score in rank_scores(numbers, spec.labels, wanted.top_n)
            ]


def read_rank(body: bytes, resources: Resources) -> tuple[RankRequest, tuple[EncodingSpec, list[bytes]]]:
    """Raises as pair_up."""
    wanted = decode_body(body, RANK_DECODER)
    check_direction(wanted.truncation_direction)
    field, texts = wanted.read_texts()
    options = EncodingOptions(
        task=JUDGE,
        activation="raw" if wanted.raw_scores else None,
        long_texts=TRUNCATE if wanted.truncate else FAIL,
    )
    model = choose_model(resources.registry, wanted.model)
    return wanted, pair_up(resources, EncodingRequest(model, options), wanted.query, texts, field)


@router.post(
    "/predict",
    openapi_extra=takes("PredictRequest", {"inputs": [["a question", "an answer"], ["a text"]]}),
    response_model=list[PredictionBody] | list[list[PredictionBody]],
)
async def post_predict(request: Request, resources: ResourcesDependency) -> Response:
    """The labels of a classifier for texts or pairs, the best first, as text-embeddings-inference answers them."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, (encoding, sequences) = await read_wanted(request, resources, hold, read_predict)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            answered, _ = await embed(resources, hold, encoding, sequences, "inputs", is_list=wanted.is_many)
            labels = resolve_spec(resources.registry, encoding).labels

            def write_rows() -> bytes:
                rows = [write_predictions(labels, row) for row in answered.vectors.tolist()]
                return b"[" + b",".join(rows) + b"]" if wanted.is_many else rows[0]

            return Response(await write(answered, write_rows), media_type=JSON)


def read_predict(
    body: bytes, resources: Resources
) -> tuple[PredictRequest, tuple[EncodingRequest, list[bytes]]]:
    """Raises Problem, UnknownModel, InvalidOption and ModelError."""
    wanted = decode_body(body, PREDICT_DECODER)
    check_direction(wanted.truncation_direction)
    sequences = wanted.read_sequences()
    if not 1 <= len(sequences) <= MAX_INPUTS:
        raise InvalidOption(f"inputs must be 1 to {MAX_INPUTS:,}, not {len(sequences):,}.")
    fields = (f"inputs/{index}" if wanted.is_many else "inputs" for index in range(len(sequences)))
    encoded = [
        read_texts(sequence, field, resources) for field, sequence in zip(fields, sequences, strict=True)
    ]
    texts = [join_pair(*each) if len(each) == 2 else each[0] for each in encoded]
    return wanted, (wanted.encoding(resources.registry), texts)


def write_predictions(labels: Sequence[str], numbers: Sequence[float]) -> bytes:
    """Write the labels of one input as JSON, the best first."""
    ranked = sorted(zip(labels, numbers, strict=True), key=lambda each: -each[1])
    return msgspec.json.encode([{"score": float(f"{score:.9g}"), "label": label} for label, score in ranked])


@router.get("/info")
async def get_info(request: Request, resources: ResourcesDependency) -> InfoBody:
    """The model of `/embed` and `/rerank`."""
    name = choose_model(resources.registry, None)
    card = await run_in_threadpool(resources.registry.card, name)
    return InfoBody(
        model_id=name,
        model_sha=card.revision,
        max_input_length=card.max_tokens,
        max_client_batch_size=MAX_INPUTS,
        version=request.app.version,
    )


@router.post(
    "/v2/embed",
    openapi_extra=takes("CohereEmbedRequest", {"texts": ["dates"], "embedding_types": ["float"]}),
    response_model=CohereAnswer,
)
async def post_cohere_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Vectors in the types that are asked for, as Cohere answers them."""
    return await answer_cohere(request, resources, write_cohere_answer)


@router.post(
    "/v1/embed",
    openapi_extra=takes("CohereEmbedRequest", {"texts": ["dates"]}),
    response_model=CohereFirstAnswer,
)
async def post_first_cohere_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Vectors as Cohere's first interface answers them: rows alone where no types are asked for."""
    return await answer_cohere(request, resources, write_first_answer)


async def answer_cohere(
    request: Request,
    resources: Resources,
    write_answer: Callable[[CohereEmbedRequest, Answered, int, str], bytes],
) -> Response:
    """Answer either interface. Raises Problem, and as embed does."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, texts = await read_wanted(request, resources, hold, read_cohere)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            answered, num_tokens = await embed(resources, hold, wanted.encoding(), texts, "texts")
            content = await write(answered, lambda: write_answer(wanted, answered, num_tokens, str(uuid4())))
            return Response(content, media_type=JSON)


def read_cohere(body: bytes, resources: Resources) -> tuple[CohereEmbedRequest, list[bytes]]:
    """Raises Problem and InvalidOption."""
    wanted = decode_body(body, COHERE_DECODER)
    check_direction(wanted.truncate)
    return wanted, read_texts(wanted.texts, "texts", resources)


@router.post(
    "/v2/rerank",
    openapi_extra=takes("CohereRankRequest", {"query": "dates", "documents": ["strptime", "zlib"]}),
    response_model_exclude_none=True,
)
async def post_cohere_rank(request: Request, resources: ResourcesDependency) -> CohereRankAnswer:
    """Documents by their relevance to a query, as Cohere answers them."""
    with resources.gates.json_bytes.hold() as hold:
        wanted, (spec, pairs) = await read_wanted(request, resources, hold, read_cohere_rank)
        with resources.gates.searches.enter():  # not before: a body may come slowly
            numbers = await encode_texts(resources, spec, pairs)
            texts = wanted.texts() if wanted.return_documents else None
            results = rank_documents(numbers, spec, texts, wanted.top_n)
            return CohereRankAnswer(id=str(uuid4()), results=results, meta=RANK_META)


def read_cohere_rank(
    body: bytes, resources: Resources
) -> tuple[CohereRankRequest, tuple[EncodingSpec, list[bytes]]]:
    """Raises as pair_up."""
    wanted = decode_body(body, COHERE_RANK_DECODER)
    max_tokens = wanted.max_tokens_per_doc
    if max_tokens is not None:  # a cap, which clients set for models that read more
        max_tokens = min(max_tokens, resources.registry.card(wanted.model).max_tokens)
    options = EncodingOptions(task=JUDGE, max_tokens=max_tokens)
    return wanted, pair_up(resources, EncodingRequest(wanted.model, options), wanted.query, wanted.texts())
