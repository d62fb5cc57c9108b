"""Routes compatible with OpenAI, text-embeddings-inference and Cohere, for texts that a client waits for.

The texts of a request are sent to a worker as a message. Numbers are formatted in bulk, never by Python itself.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from api.dependencies import Resources, ResourcesDependency
from api.intake.bodies import receiving, run
from api.intake.requests import check_text, decode_body, locate
from api.limits.gates import Hold
from api.openai import operations
from api.openai.operations import (
    RANK_META,
    CohereEmbedRequest,
    CohereRankAnswer,
    CohereRankRequest,
    EmbedRequest,
    InfoBody,
    PredictionBody,
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
from api.problems import JSON_TYPE
from api.queries import Answered
from api.serving import serve
from vectormill.batches.endpoints import (
    BASE64,
    BYTES,
    EMBEDDINGS_DECODER,
    MAX_INPUTS,
    RERANK_DECODER,
    EmbeddingsRequest,
    EncodingRequest,
    RerankAnswer,
    RerankRequest,
    VoyageRerankAnswer,
    check_documents,
    check_ranks,
    read_inputs,
    resolve_spec,
    write_input,
)
from vectormill.batches.operations import EMBED, OCTETS, RERANK
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import JUDGE, MULTI_VECTOR, REPRESENTATIONS, SPARSE, has_token_ids
from vectormill.domain.vector_type import VECTOR_TYPES
from vectormill.jobs.item import join_pair, pair_with_each
from vectormill.models.registry import Registry
from vectormill.results.representations import write_representations, write_vectors
from vectormill.results.scores import rank_scores
from vectormill.vectors.decimals import write_decimals, write_wholes
from vectormill.vectors.quantization import pack_signs
from vectormill.vectors.representations import Representations
from vectormill.vectors.vector_types import MAX_HALF, find_vector_failures

router = APIRouter(tags=["openai"])
rerank_router = APIRouter(tags=["results"])
other_router = APIRouter(tags=["other APIs"])

# Writing vectors of at most this size takes a tenth of a millisecond.
SMALL_VECTORS: Final = 64 << 10


async def embed(
    resources: Resources, hold: Hold, encoding: EncodingRequest, texts: Mapping[str, bytes]
) -> Answered:
    """Return the vectors and the token counts of texts, which are named by their JSON pointers in the body.

    Raise the errors of find_spec and QueryExchange.answer.
    """
    spec = await find_spec(resources.registry, encoding)
    num_bytes = measure_results(spec, texts.values())
    if num_bytes > SMALL_VECTORS:
        # The vectors and the answer made from them take five times num_bytes, while the gate counts a byte of
        # JSON for each 16 bytes of memory.
        hold.take(num_bytes * 5 // 16)
    return await resources.queries.answer(spec, texts)


# A text has hardly more weights than this; a model that has would need more memory than is counted.
MOST_WEIGHTS: Final = 512


def measure_results(spec: EncodingSpec, texts: Collection[bytes]) -> int:
    """Return about how many bytes the results of texts take; a token is counted for each byte of a short text."""
    num_bytes = (4 * spec.dimensions + 8 * min(spec.sparse_dimensions, MOST_WEIGHTS)) * len(texts)
    if spec.token_dimensions:
        num_bytes += 2 * spec.token_dimensions * sum(min(len(text), spec.max_tokens) for text in texts)
    return num_bytes


async def find_spec(registry: Registry, encoding: EncodingRequest) -> EncodingSpec:
    """Return the requested spec, on a thread if that may wait for a model hub.

    Raise the errors of resolve_spec.
    """
    return await run(registry.is_read(encoding.model), resolve_spec, registry, encoding)


async def write(
    answered: Answered,
    work: Callable[[], bytes],
    media_type: str = JSON_TYPE,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response with the bytes that `work` returns; a large answer is written on a thread."""
    is_small = answered.vectors.dtype != np.object_ and answered.vectors.nbytes <= SMALL_VECTORS
    return Response(await run(is_small, work), media_type=media_type, headers=headers)


def read_texts(texts: Sequence[str], field: str, resources: Resources) -> dict[str, bytes]:
    """Return the texts of a list in UTF-8 by their JSON pointers. Raise Problem if one cannot be encoded."""
    found = locate([*map(write_input, texts)], field)
    for pointer, text in found.items():
        check_text(text, resources.settings.max_text_chars, pointer)
    return found


@serve(router, EMBED)
async def post_embeddings(request: Request, resources: ResourcesDependency) -> Response:
    """Return the vectors of texts in the format of OpenAI's API; docs/OPENAI.md lists the differences."""
    async with receiving(request, resources, read_embeddings, is_quick=True) as (hold, (wanted, texts)):
        encoding = wanted.encoding()
        spec = await find_spec(resources.registry, encoding)
        if wanted.encoding_format == BYTES and spec.result == REPRESENTATIONS:
            raise InvalidOption(
                f"encoding_format bytes is for dense vectors, not {spec.outputs}; use base64."
            )
        answered = await embed(resources, hold, encoding, texts)
        if wanted.encoding_format != BYTES:
            return await write(answered, lambda: write_answer(wanted, answered, spec))
        return await write(
            answered,
            lambda: pack_rows(answered.vectors, wanted).tobytes(),
            OCTETS,
            describe_bytes(wanted, answered),
        )


def read_embeddings(body: bytes, resources: Resources) -> tuple[EmbeddingsRequest, dict[str, bytes]]:
    """Return the decoded request and its checked inputs. Raise Problem and InvalidOption."""
    wanted = decode_body(body, EMBEDDINGS_DECODER)
    return wanted, read_checked_inputs(wanted, resources.settings.max_text_chars)


def read_checked_inputs(request: EmbeddingsRequest, max_chars: int) -> dict[str, bytes]:
    """Return the inputs of read_inputs by their JSON pointers, all texts checked. Raise Problem and InvalidOption."""
    found = locate(read_inputs(request), "input", is_list=request.has_list)
    for pointer, text in found.items():
        if not has_token_ids(text):
            check_text(text, max_chars, pointer)
    return found


def pack_rows(vectors: npt.NDArray[np.float32], request: EmbeddingsRequest) -> npt.NDArray[Any]:
    """Return dense vectors [n, d] in the requested type. Raise InvalidOption if it cannot hold one of them."""
    kind = VECTOR_TYPES[request.embed_dtype]
    unfit = find_vector_failures(vectors, kind) if kind.is_half else {}
    if unfit:
        raise InvalidOption(
            f"float16 cannot hold the vector of input {min(unfit)}: one of its numbers is beyond ±{MAX_HALF:,.0f}, or "
            "all would become 0. Omit embed_dtype, or have vectors normalized."
        )
    return vectors.astype(kind.row, copy=False)


def describe_bytes(request: EmbeddingsRequest, answered: Answered) -> dict[str, str]:
    """Return the headers of an answer in bytes, in vLLM's form, whose readers get one tensor [n, d].

    vLLM names the place of each vector, which is too much for the headers of most servers and clients.
    """
    num_bytes = answered.vectors.size * np.dtype(VECTOR_TYPES[request.embed_dtype].row).itemsize
    block = {
        "index": 0,
        "embed_dtype": request.embed_dtype,
        "endianness": "little",
        "start": 0,
        "end": num_bytes,
        "shape": answered.vectors.shape,
    }
    told = {"model": request.model, "data": [block], "usage": count_usage(answered)}
    return {"metadata": json.dumps(told)}  # its characters are ASCII, as those of a header have to be


def write_outputs(
    row: Representations, spec: EncodingSpec, request: EmbeddingsRequest, *, is_packed: bool
) -> dict[str, Any]:
    """Return the outputs of one text by name, with the dense vector as bytes if `is_packed`."""
    outputs: dict[str, Any] = msgspec.json.decode(
        b"{" + b"".join(write_representations(row, spec))[1:] + b"}", type=dict[str, msgspec.Raw]
    )
    if is_packed and "embedding" in outputs:
        outputs["embedding"] = pack_rows(row.dense[np.newaxis], request).tobytes()
    return outputs


def count_usage(answered: Answered) -> dict[str, int]:
    """Return the tokens of an answer as OpenAI names them, and our number of truncated inputs."""
    return {
        "prompt_tokens": answered.num_tokens,
        "total_tokens": answered.num_tokens,
        "truncated_inputs": int(answered.is_truncated.sum()),
    }


def write_answer(request: EmbeddingsRequest, answered: Answered, spec: EncodingSpec) -> bytes:
    """Return the JSON answer to a request for embeddings. In it bytes become base64, and Raw is JSON already."""
    rows: Iterable[dict[str, Any]]
    is_packed = request.encoding_format == BASE64
    if spec.result == REPRESENTATIONS:
        rows = (write_outputs(row, spec, request, is_packed=is_packed) for row in answered.vectors)
    elif is_packed:
        rows = ({"embedding": row.tobytes()} for row in pack_rows(answered.vectors, request))
    else:
        rows = ({"embedding": msgspec.Raw(b"[" + row.tobytes())} for row in write_decimals(answered.vectors))
    data = [{"object": "embedding", "index": index, **row} for index, row in enumerate(rows)]
    told = {"object": "list", "data": data, "model": request.model, "usage": count_usage(answered)}
    return msgspec.json.encode(told)


# ---- rankings

# The arguments of QueryExchange.answer: the spec, and the pairs by the JSON pointers of their documents.
Asked = tuple[EncodingSpec, dict[str, bytes]]


@serve(rerank_router, RERANK)
async def post_rerank(request: Request, resources: ResourcesDependency) -> RerankAnswer | VoyageRerankAnswer:
    """Rank documents by how well they answer a query, by a classifier of pairs or by the cosine of two vectors.

    With two labels, the score is the second label's probability. A document that is too long is truncated.
    """
    async with receiving(request, resources, partial(read_rerank, RERANK_DECODER)) as (_, (wanted, asked)):
        return rank(wanted, asked[0], await resources.queries.answer(*asked))


def read_rerank(
    decoder: msgspec.json.Decoder[Any], body: bytes, resources: Resources
) -> tuple[RerankRequest, Asked]:
    """Return the request of /v1/rerank that a body is, and its pairs. Raise Problem and the errors of pair_up."""
    given: RerankRequest | CohereRankRequest = decode_body(body, decoder)
    wanted = given if isinstance(given, RerankRequest) else given.as_rerank_request(resources.registry)
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
    documents: list[Any] = [{"text": text} for text in wanted.texts()]
    if wanted.is_voyages:
        documents = wanted.texts()
    return [
        {
            "index": index,
            "relevance_score": score,
            "document": documents[index] if wanted.return_documents else None,
        }
        for index, score in rank_scores(answered.vectors, spec.labels, wanted.limit)
    ]


# ---- text-embeddings-inference and Cohere

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


@serve(other_router, operations.TEI_ROOT)
@serve(other_router, operations.TEI_EMBED)
async def post_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Return vectors alone, as text-embeddings-inference does."""

    def write_rows(_: EmbedRequest, answered: Answered) -> bytes:
        rows = (b"[" + row.tobytes() for row in write_decimals(answered.vectors))
        return b"[" + b",".join(rows) + b"]"

    return await answer(request, resources, partial(read_embed, EMBED_DECODER), write_rows)


@serve(other_router, operations.TEI_SPARSE)
async def post_sparse(request: Request, resources: ResourcesDependency) -> Response:
    """Return the weights of sparse vectors, as text-embeddings-inference does."""

    def write_rows(_: SparseRequest, answered: Answered) -> bytes:
        return msgspec.json.encode([*map(list_weights, answered.vectors)])

    return await answer(request, resources, partial(read_embed, SPARSE_DECODER), write_rows)


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


def read_embed(
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


@serve(other_router, operations.TEI_SIMILARITY)
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


@serve(other_router, operations.TEI_RERANK)
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
        request = wanted.as_rerank_request(resources.registry)
        return request, pair_up(resources, request.encoding(), request.query, request.texts())
    field, texts = wanted.read_texts()
    options = EncodingOptions(
        task=JUDGE,
        activation="raw" if wanted.raw_scores else None,
        long_texts=TRUNCATE if wanted.truncate else FAIL,
    )
    model = choose_model(resources.registry, wanted.model)
    return wanted, pair_up(resources, EncodingRequest(model, options), wanted.query, texts, field)


@serve(other_router, operations.TEI_PREDICT)
async def post_predict(request: Request, resources: ResourcesDependency) -> Response:
    """Return a classifier's labels of texts or pairs, best first, as text-embeddings-inference does."""
    async with receiving(request, resources, read_predict) as (hold, (wanted, (encoding, sequences))):
        answered = await embed(resources, hold, encoding, sequences)
        labels = resolve_spec(resources.registry, encoding).labels

        def write_rows() -> bytes:
            rows = [
                [
                    PredictionBody(score=float(f"{score:.9g}"), label=label)
                    for label, score in sorted(zip(labels, numbers, strict=True), key=lambda each: -each[1])
                ]
                for numbers in answered.vectors.tolist()
            ]
            return msgspec.json.encode(rows if wanted.is_many else rows[0])

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


@serve(other_router, operations.TEI_INFO)
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


@serve(other_router, operations.COHERE_EMBED)
async def post_cohere_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Return vectors in the requested types, as Cohere does."""
    return await answer(request, resources, read_cohere, write_cohere_answer)


@serve(other_router, operations.COHERE_FIRST_EMBED)
async def post_first_cohere_embed(request: Request, resources: ResourcesDependency) -> Response:
    """Return vectors as Cohere's first interface does: rows alone if no types are requested."""
    return await answer(request, resources, read_cohere, partial(write_cohere_answer, version="1"))


def read_cohere(body: bytes, resources: Resources) -> tuple[CohereEmbedRequest, dict[str, bytes]]:
    """Return the decoded request and its texts in UTF-8. Raise Problem and InvalidOption."""
    wanted = decode_body(body, COHERE_DECODER)
    check_direction(wanted.truncate)
    return wanted, read_texts(wanted.texts, "texts", resources)


@serve(other_router, operations.COHERE_RERANK)
async def post_cohere_rank(request: Request, resources: ResourcesDependency) -> CohereRankAnswer:
    """Rank documents by their relevance to a query, as Cohere does."""
    async with receiving(request, resources, partial(read_rerank, COHERE_RANK_DECODER)) as (
        _,
        (wanted, asked),
    ):
        results = rank_documents(wanted, asked[0], await resources.queries.answer(*asked))
        if not wanted.return_documents:
            for result in results:
                del result["document"]
        return CohereRankAnswer(id=str(uuid4()), results=results, meta=RANK_META)


def open_rows(rows: Iterable[npt.NDArray[Any]]) -> list[Any]:
    """Return JSON arrays of rows in the bytes of their text, which lack only the opening bracket."""
    return [msgspec.Raw(b"[" + row.tobytes()) for row in rows]


# The types that are made from representations; all others from dense vectors.
PART_WRITERS: Final[dict[str, Callable[[Vectors], list[Any]]]] = {
    SPARSE: lambda rows: [
        {"indices": row.indices.tolist(), "weights": [float(str(weight)) for weight in row.weights]}
        for row in rows
    ],
    MULTI_VECTOR: lambda rows: [msgspec.Raw(b"[" + write_vectors(row.vectors) + b"]") for row in rows],
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
