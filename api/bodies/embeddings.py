"""Embeddings as OpenAI's clients ask for them: their texts are checked, and no number is written by Python."""

from typing import Any, Final, Literal

import msgspec
from pydantic import BaseModel, Field

from api.openai.errors import name_parameter
from api.problems import Place, Problem
from api.queries.exchange import Answered
from vectormill.batches.endpoints import BASE64, EmbeddingsRequest, read_inputs
from vectormill.domain.errors import InvalidItem
from vectormill.domain.task import has_token_ids
from vectormill.jobs.item import find_text_failure
from vectormill.vectors.decimals import write_decimals


def check_text(text: bytes, max_chars: int, pointer: str) -> None:
    """Raise Problem for a text that can have no vector. `pointer` says where it stands in the body."""
    failure = find_text_failure(text, max_chars)
    if failure is not None:
        raise refuse_text(pointer, failure.detail)


def read_checked_inputs(request: EmbeddingsRequest, max_chars: int) -> list[bytes]:
    """Give the inputs as read_inputs does, all texts checked. Raises Problem and InvalidOption."""
    texts = read_inputs(request)
    for number, text in enumerate(texts):
        if not has_token_ids(text):
            check_text(text, max_chars, f"/input/{number}" if request.has_list else "/input")
    return texts


def refuse_text(pointer: str, reason: str) -> Problem:
    detail = f"{name_parameter(pointer)} cannot be encoded: {reason}."
    return Problem(422, InvalidItem.code, detail, errors=[Place(reason, pointer=pointer)])


def refuse_failures(field: str, answered: Answered, *, is_list: bool) -> None:
    """Raises Problem for the first text of the field that a worker could not encode."""
    for row, reason in answered.failures.items():
        raise refuse_text(f"/{field}/{row}" if is_list else f"/{field}", reason)


class Usage(msgspec.Struct):
    """Numbers of tokens that the model read."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int


class EncodedEmbedding(msgspec.Struct):
    """A row as bytes, which msgspec writes as base64."""

    index: int
    embedding: bytes | msgspec.Raw
    object: str = "embedding"


class EncodedAnswer(msgspec.Struct):
    """The answer, its fields in OpenAI's order but for `object`, which is the same in all."""

    data: list[EncodedEmbedding]
    model: str
    usage: Usage
    object: str = "list"


ENCODER: Final = msgspec.json.Encoder()


def write_answer(request: EmbeddingsRequest, answered: Answered, num_tokens: int) -> bytes:
    """Encode as JSON."""
    rows: list[Any]
    if request.encoding_format == BASE64:
        rows = [row.tobytes() for row in answered.vectors.astype("<f4", copy=False)]
    else:
        rows = [msgspec.Raw(b"[" + row.tobytes()) for row in write_decimals(answered.vectors)]
    return ENCODER.encode(
        EncodedAnswer(
            [EncodedEmbedding(index, row) for index, row in enumerate(rows)],
            request.model,
            Usage(num_tokens, num_tokens, answered.num_truncated),
        )
    )


class EmbeddingBody(BaseModel):
    """One input's vector."""

    object: Literal["embedding"]
    index: int = Field(description="Its place among the inputs.")
    embedding: list[float] | str = Field(description="Numbers, or base64 of float32, little-endian.")


class EmbeddingsUsage(BaseModel):
    """Tokens that the model read, with special tokens and the prompt, without what was cut off."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int = Field(description="Ours: inputs that had more tokens than the model reads.")


class EmbeddingsAnswer(BaseModel):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingsUsage
