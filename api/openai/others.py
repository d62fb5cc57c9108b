"""The routes of text-embeddings-inference and of Cohere, as far as Vectormill can do what they request."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import Resources, ResourcesDependency
from api.intake.bodies import receiving
from api.intake.requests import decode_body, locate
from api.openai import operations
from api.openai.embeddings import embed, read_texts, write
from api.openai.operations import (
    RANK_META,
    CohereEmbedRequest,
    CohereRankAnswer,
    CohereRankRequest,
    EmbedRequest,
    InfoBody,
    PredictRequest,
    RankBody,
    RankRequest,
    SimilarityRequest,
    SparseRequest,
    TextsRequest,
    WeightBody,
    check_direction,
    choose_model,
)
from api.openai.reranking import Asked, pair_documents, pair_up, rank, rank_documents
from api.queries import Answered
from api.serving import serve
from api.streams.result_columns import write_vectors
from vectormill.batches.endpoints import (
    MAX_INPUTS,
    EncodingRequest,
    RerankAnswer,
    RerankRequest,
    VoyageRerankAnswer,
    resolve_spec,
)
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE, MULTI_VECTOR, SPARSE
from vectormill.jobs.item import join_pair
from vectormill.vectors.decimals import write_decimals, write_wholes
from vectormill.vectors.quantization import pack_signs
from vectormill.vectors.representations import Representations
from vectormill.vectors.scores import rank_scores

router = APIRouter(tags=["other APIs"])
Texts = TypeVar("Texts", bound=TextsRequest)
Wanted = TypeVar("Wanted", bound=TextsRequest | CohereEmbedRequest)
Vectors = npt.NDArray[Any]  # float32 [n, d], or Representations [n]

EMBED_DECODER: Final = msgspec.json.Decoder(EmbedRequest)
RANK_DECODER: Final = msgspec.json.Decoder(RankRequest)
SIMILARITY_DECODER: Final = msgspec.json.Decoder(SimilarityRequest)
PREDICT_DECODER: Final = msgspec.json.Decoder(PredictRequest)
SPARSE_DECODER: Final = msgspec.json.Decoder(SparseRequest)
COHERE_RANK_DECODER: Final = msgspec.json.Decoder(CohereRankRequest)
COHERE_DECODER: Final = msgspec.json.Decoder(CohereEmbedRequest)


@serve(router, operations.TEI_ROOT)
@serve(router, operations.TEI_EMBED)
async def post_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Return vectors alone, as text-embeddings-inference does."""

    def write_rows(_: EmbedRequest, answered: Answered) -> bytes:
        rows = (b"[" + row.tobytes() for row in write_decimals(answered.vectors))
        return b"[" + b",".join(rows) + b"]"

    return await answer(request, resources, partial(read_inputs, EMBED_DECODER), write_rows)


@serve(router, operations.TEI_SPARSE)
async def post_sparse(request: Request, resources: ResourcesDependency) -> Response:
    """Return the weights of sparse vectors, as text-embeddings-inference does."""

    def write_rows(_: SparseRequest, answered: Answered) -> bytes:
        return msgspec.json.encode([*map(list_weights, answered.vectors)])

    return await answer(request, resources, partial(read_inputs, SPARSE_DECODER), write_rows)


async def answer(
    request: Request,
    resources: Resources,
    read: Callable[[bytes, Resources], tuple[Wanted, dict[str, bytes]]],
    write_answer: Callable[[Wanted, Answered], bytes],
) -> Response:
    """Answer a request for the vectors of its texts. Raise Problem and the errors of embed."""
    async with receiving(request, resources, read) as (hold, (wanted, texts)):
        answered = await embed(resources, hold, wanted.encoding(resources.registry), texts)
        return await write(answered, lambda: write_answer(wanted, answered))


def list_weights(row: Representations) -> list[WeightBody]:
    """Return the weights of a sparse vector; numbers have as many digits as float32 needs."""
    pairs = zip(row.indices.tolist(), row.weights, strict=True)
    return [WeightBody(index=index, value=float(str(weight))) for index, weight in pairs]


def read_inputs(
    decoder: msgspec.json.Decoder[Texts], body: bytes, resources: Resources
) -> tuple[Texts, dict[str, bytes]]:
    """Return the decoded request and its texts in UTF-8. Raise Problem and InvalidOption."""
    wanted = decode_body(body, decoder)
    return wanted, check_embed(wanted, resources)


def check_embed(wanted: TextsRequest, resources: Resources) -> dict[str, bytes]:
    """Check a request for vectors, and return its texts in UTF-8. Raise Problem and InvalidOption."""
    check_direction(wanted.truncation_direction)
    inputs = [wanted.inputs] if isinstance(wanted.inputs, str) else wanted.inputs
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidOption(f"inputs must have 1 to {MAX_INPUTS:,} texts, not {len(inputs):,}.")
    if wanted.prompt_name is not None:
        prompts = resources.registry.card(choose_model(resources.registry, wanted.model)).prompts
        if wanted.prompt_name not in prompts:
            known = ", ".join(sorted(prompts)) or "none"
            raise InvalidOption(f"The model has no prompt {wanted.prompt_name!r}; it has {known}.")
    return read_texts(inputs, "inputs", resources)


@serve(router, operations.TEI_SIMILARITY)
async def post_similarity(request: Request, resources: ResourcesDependency) -> list[float]:
    """Return the cosine of each sentence with the source sentence, as text-embeddings-inference does."""
    async with receiving(request, resources, read_similarity) as (hold, (wanted, texts)):
        answered = await embed(resources, hold, wanted.encoding(resources.registry), texts)
        cosines = answered.vectors[1:] @ answered.vectors[0]
        return [float(f"{cosine:.9g}") for cosine in cosines.tolist()]


def read_similarity(body: bytes, resources: Resources) -> tuple[EmbedRequest, dict[str, bytes]]:
    """Return a request for the vectors of all sentences, and the sentences in UTF-8.

    Raise Problem and InvalidOption.
    """
    wanted = decode_body(body, SIMILARITY_DECODER)
    if not wanted.inputs.sentences:
        raise InvalidOption("inputs.sentences is empty; send at least one sentence to compare.")
    request = wanted.as_embed_request()
    return request, check_embed(request, resources)


@serve(router, operations.TEI_RERANK)
async def post_rank(
    request: Request, resources: ResourcesDependency
) -> list[RankBody] | RerankAnswer | VoyageRerankAnswer:
    """Rank texts by their relevance to a query, as text-embeddings-inference does, or vLLM (`return_documents`)."""
    async with receiving(request, resources, read_rank) as (_, (wanted, asked)):
        answered = await resources.queries.answer(*asked)
        if isinstance(wanted, RerankRequest):
            return rank(wanted, asked[0], answered)
        _, texts = wanted.read_texts()
        ranked = rank_scores(answered.vectors, asked[0].labels, wanted.top_n)
        if wanted.return_text:
            return [RankBody(index=index, score=score, text=texts[index]) for index, score in ranked]
        return [RankBody(index=index, score=score) for index, score in ranked]


def read_rank(body: bytes, resources: Resources) -> tuple[RankRequest | RerankRequest, Asked]:
    """Return the decoded request, and its pairs of query and text. Raise the errors of pair_up."""
    wanted = decode_body(body, RANK_DECODER)
    check_direction(wanted.truncation_direction)
    if wanted.return_documents is not None:
        return pair_documents(wanted.as_rerank_request(resources.registry), resources)
    field, texts = wanted.read_texts()
    options = EncodingOptions(
        task=JUDGE,
        activation="raw" if wanted.raw_scores else None,
        long_texts=TRUNCATE if wanted.truncate else FAIL,
    )
    model = choose_model(resources.registry, wanted.model)
    return wanted, pair_up(resources, EncodingRequest(model, options), wanted.query, texts, field)


@serve(router, operations.TEI_PREDICT)
async def post_predict(request: Request, resources: ResourcesDependency) -> Response:
    """Return a classifier's labels of texts or pairs, best first, as text-embeddings-inference does."""
    async with receiving(request, resources, read_predict) as (hold, (wanted, (encoding, sequences))):
        answered = await embed(resources, hold, encoding, sequences)
        labels = resolve_spec(resources.registry, encoding).labels

        def write_rows() -> bytes:
            rows = [write_predictions(labels, row) for row in answered.vectors.tolist()]
            return b"[" + b",".join(rows) + b"]" if wanted.is_many else rows[0]

        return await write(answered, write_rows)


def read_predict(
    body: bytes, resources: Resources
) -> tuple[PredictRequest, tuple[EncodingRequest, dict[str, bytes]]]:
    """Return the decoded request, its model and options, and its texts or pairs of texts.

    Raise Problem, UnknownModel, InvalidOption and ModelError.
    """
    wanted = decode_body(body, PREDICT_DECODER)
    check_direction(wanted.truncation_direction)
    sequences = wanted.read_sequences()
    if not 1 <= len(sequences) <= MAX_INPUTS:
        raise InvalidOption(f"inputs must have 1 to {MAX_INPUTS:,} texts or pairs, not {len(sequences):,}.")
    texts = {}
    for pointer, sequence in locate(sequences, "inputs", is_list=wanted.is_many).items():
        text, *second = read_texts(sequence, pointer.removeprefix("/"), resources).values()
        texts[pointer] = join_pair(text, *second) if second else text
    return wanted, (wanted.encoding(resources.registry), texts)


def write_predictions(labels: Sequence[str], numbers: Sequence[float]) -> bytes:
    """Return the labels and scores of one input as JSON, best first."""
    ranked = sorted(zip(labels, numbers, strict=True), key=lambda each: -each[1])
    return msgspec.json.encode([{"score": float(f"{score:.9g}"), "label": label} for label, score in ranked])


@serve(router, operations.TEI_INFO)
async def get_info(request: Request, resources: ResourcesDependency) -> InfoBody:
    """Describe the model of `/embed` and `/rerank`."""
    name = choose_model(resources.registry, None)
    card = await run_in_threadpool(resources.registry.card, name)
    return InfoBody(
        model_id=name,
        model_sha=card.revision,
        max_input_length=card.max_tokens,
        max_client_batch_size=MAX_INPUTS,
        version=request.app.version,
    )


@serve(router, operations.COHERE_EMBED)
async def post_cohere_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Return vectors in the requested types, as Cohere does."""
    return await answer(request, resources, read_cohere, write_cohere_answer)


@serve(router, operations.COHERE_FIRST_EMBED)
async def post_first_cohere_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Return vectors as Cohere's first interface does: rows alone if no types are requested."""
    return await answer(request, resources, read_cohere, partial(write_cohere_answer, version="1"))


def read_cohere(body: bytes, resources: Resources) -> tuple[CohereEmbedRequest, dict[str, bytes]]:
    """Return the decoded request and its texts in UTF-8. Raise Problem and InvalidOption."""
    wanted = decode_body(body, COHERE_DECODER)
    check_direction(wanted.truncate)
    return wanted, read_texts(wanted.texts, "texts", resources)


@serve(router, operations.COHERE_RERANK)
async def post_cohere_rank(request: Request, resources: ResourcesDependency) -> CohereRankAnswer:
    """Rank documents by their relevance to a query, as Cohere does."""
    async with receiving(request, resources, read_cohere_rank) as (_, (wanted, asked)):
        results = rank_documents(wanted, asked[0], await resources.queries.answer(*asked))
        if not wanted.return_documents:
            for result in results:
                del result["document"]
        return CohereRankAnswer(id=str(uuid4()), results=results, meta=RANK_META)


def read_cohere_rank(body: bytes, resources: Resources) -> tuple[RerankRequest, Asked]:
    """Return the decoded request, and its pairs of query and document. Raise the errors of pair_up."""
    wanted = decode_body(body, COHERE_RANK_DECODER)
    return pair_documents(wanted.as_rerank_request(resources.registry), resources)


def open_rows(rows: Iterable[npt.NDArray[Any]]) -> list[Any]:
    """Return JSON arrays of rows in the bytes of their text, which lack only the opening bracket."""
    return [msgspec.Raw(b"[" + row.tobytes()) for row in rows]


def write_sparse(rows: Vectors) -> list[Any]:
    """Return the sparse vector of each of the Representations `rows`."""
    return [
        {"indices": row.indices.tolist(), "weights": [float(str(weight)) for weight in row.weights]}
        for row in rows
    ]


def write_multi_vectors(rows: Vectors) -> list[Any]:
    """Return the vectors of the tokens of each of the Representations `rows`."""
    return [msgspec.Raw(b"[" + write_vectors(row.vectors) + b"]") for row in rows]


# The types that are made from representations; all others from dense vectors.
PART_WRITERS: Final[dict[str, Callable[[Vectors], list[Any]]]] = {
    SPARSE: write_sparse,
    MULTI_VECTOR: write_multi_vectors,
}
WRITERS: Final[dict[str, Callable[[Vectors], list[Any]]]] = {
    "float": lambda vectors: open_rows(write_decimals(vectors)),
    "base64": lambda vectors: [row.tobytes() for row in vectors.astype("<f4", copy=False)],
    "binary": lambda vectors: open_rows(write_wholes((pack_signs(vectors) ^ 128).view(np.int8))),
    "ubinary": lambda vectors: open_rows(write_wholes(pack_signs(vectors))),
}


def write_cohere_answer(wanted: CohereEmbedRequest, answered: Answered, version: str = "2") -> bytes:
    """Return the JSON answer with vectors by type.

    `version` is that of Cohere's API, of which the first has plain rows if the request names no types.
    """
    kinds = dict.fromkeys(wanted.embedding_types or ["float"])
    vectors = answered.vectors
    if vectors.dtype == np.object_ and kinds.keys() - PART_WRITERS.keys():
        vectors = np.stack([row.dense for row in answered.vectors])
    rows = {
        kind: PART_WRITERS[kind](answered.vectors) if kind in PART_WRITERS else WRITERS[kind](vectors)
        for kind in kinds
    }
    is_plain = version == "1" and wanted.embedding_types is None
    return msgspec.json.encode(
        {
            "id": str(uuid4()),
            "embeddings": rows["float"] if is_plain else rows,
            "texts": wanted.texts,
            "meta": {
                "api_version": {"version": version},
                "billed_units": {"input_tokens": answered.num_tokens},
            },
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        }
    )
