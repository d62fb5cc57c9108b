"""Bodies of Cohere's second interface, and vectors in the types that its clients name."""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta
from pydantic import BaseModel, Field

from api.bodies.reranking import RankedDocument
from api.queries.exchange import Answered
from api.streams.decimal_tables import write_wholes
from vectormill.batches.endpoints import (
    DOCUMENT,
    MAX_INPUTS,
    QUERY,
    Document,
    EncodingRequest,
    read_documents,
)
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions
from vectormill.domain.task import EMBED
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.vectors.decimals import write_decimals

Vectors = npt.NDArray[np.float32]
InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary"]
# A request ranks once, however many documents it has.
RANK_META: Final = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
PROMPT_OF: Final = {"search_document": DOCUMENT, "search_query": QUERY}


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v2/embed and /v1/embed. int8 and uint8 are of measured ranges here, and of jobs."""

    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str = DEFAULT_MODEL
    input_type: Annotated[
        InputType | None, Meta(description="For a search, the model's prompt for it, if it has one.")
    ] = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] | None = None
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    truncate: Annotated[
        Literal["END", "NONE", "START"] | None,
        Meta(description="END, the default, cuts what is too long; NONE refuses it. START is refused."),
    ] = None

    def encoding(self) -> EncodingRequest:
        options = EncodingOptions(
            dimensions=self.output_dimension,
            long_texts=FAIL if self.truncate == "NONE" else TRUNCATE,
            task=EMBED,
        )
        return EncodingRequest(self.model, options, PROMPT_OF.get(self.input_type or ""))


def write_floats(vectors: Vectors) -> list[Any]:
    return [msgspec.Raw(b"[" + row.tobytes()) for row in write_decimals(vectors)]


def write_base64(vectors: Vectors) -> list[Any]:
    return [row.tobytes() for row in vectors.astype("<f4", copy=False)]


def write_bits(vectors: Vectors) -> list[Any]:
    """Eight values a number, whether each is above 0."""
    return [msgspec.Raw(b"[" + row.tobytes()) for row in write_wholes(np.packbits(vectors > 0, axis=1))]


def write_signed_bits(vectors: Vectors) -> list[Any]:
    """Return the signs of vectors as signed bytes: the unsigned ones less 128."""
    numbers = np.packbits(vectors > 0, axis=1).astype(np.int16) - 128
    return [msgspec.Raw(b"[" + row.tobytes()) for row in write_wholes(numbers.astype(np.int8))]


WRITERS: Final[dict[str, Callable[[Vectors], list[Any]]]] = {
    "float": write_floats,
    "base64": write_base64,
    "binary": write_signed_bits,
    "ubinary": write_bits,
}


def write_cohere_answer(
    wanted: CohereEmbedRequest, answered: Answered, num_tokens: int, answer_id: str, version: str = "2"
) -> bytes:
    """Write the answer as JSON."""
    kinds = dict.fromkeys(wanted.embedding_types or ["float"])
    return msgspec.json.encode(
        {
            "id": answer_id,
            "embeddings": {kind: WRITERS[kind](answered.vectors) for kind in kinds},
            "texts": wanted.texts,
            "meta": write_meta(num_tokens, version),
            "response_type": "embeddings_by_type",
        }
    )


def write_first_answer(
    wanted: CohereEmbedRequest, answered: Answered, num_tokens: int, answer_id: str
) -> bytes:
    """Write what the first interface answers, which has rows alone where no types are asked for, as JSON."""
    if wanted.embedding_types is not None:
        return write_cohere_answer(wanted, answered, num_tokens, answer_id, version="1")
    return msgspec.json.encode(
        {
            "id": answer_id,
            "embeddings": write_floats(answered.vectors),
            "texts": wanted.texts,
            "meta": write_meta(num_tokens, "1"),
            "response_type": "embeddings_floats",
        }
    )


def write_meta(num_tokens: int, version: str) -> dict[str, Any]:
    return {"api_version": {"version": version}, "billed_units": {"input_tokens": num_tokens}}


class EmbeddingsByType(BaseModel):
    """A list for each type that was asked for, in the order of the texts."""

    floats: list[list[float]] | None = Field(default=None, alias="float")
    base64: list[str] | None = Field(default=None, description="float32, little-endian.")
    binary: list[list[int]] | None = Field(default=None, description="Eight values a number, less 128.")
    ubinary: list[list[int]] | None = Field(default=None, description="Eight values a number.")


class CohereAnswer(BaseModel):
    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


class CohereFirstAnswer(BaseModel):
    """The answer of Cohere's v1 embed: plain rows, or rows by type where the request names types."""

    id: str
    embeddings: list[list[float]] | EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


class CohereRankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v2/rerank, with what clients of the first interface send along."""

    query: str
    documents: list[str | Document]
    model: str = DEFAULT_MODEL
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: Annotated[bool | None, Meta(description="Repeat the texts in the answer.")] = None
    max_tokens_per_doc: (
        Annotated[
            int,
            Meta(ge=1, description="Read at most so many tokens of a query and a document together."),
        ]
        | None
    ) = None
    rank_fields: Annotated[list[str] | None, Meta(description="Only `text` is read.")] = None
    max_chunks_per_doc: Annotated[int | None, Meta(description="Taken, and not used.")] = None
    priority: Annotated[int | None, Meta(description="Taken, and not used.")] = None

    def texts(self) -> list[str]:
        return read_documents(self.documents)


class CohereRankAnswer(BaseModel):
    """The documents by relevance, the best first."""

    id: str
    results: list[RankedDocument]
    meta: dict[str, Any]


COHERE_RANK_DECODER: Final = msgspec.json.Decoder(CohereRankRequest)
COHERE_DECODER: Final = msgspec.json.Decoder(CohereEmbedRequest)
