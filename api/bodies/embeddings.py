"""Embeddings as OpenAI's clients ask for them, and the answer, of which no number is written by Python."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

from api.openai.errors import name_parameter
from api.problems import Place, Problem
from api.queries.lanes import Answered
from api.queries.wishes import Wish
from vectormill.domain.encoding import EncodingOptions, list_options
from vectormill.domain.errors import InvalidItem, InvalidOption
from vectormill.domain.jobs.item import find_text_failure
from vectormill.domain.tasks.token_ids import write_token_ids
from vectormill.models.registry import DEFAULT_MODEL
from vectormill.vectors.decimals import write_decimals

# As many as OpenAI takes. More are a job, or a batch.
MAX_INPUTS: Final = 2_048
BASE64: Final = "base64"
HELP: Final = {option.name: option.help.description for option in list_options(EncodingOptions)}


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/embeddings: OpenAI's, and what our models can do beyond."""

    input: Annotated[
        str | list[str | int | list[int]],
        Meta(
            description="A text, texts, the ids of a text's tokens in the model's own vocabulary, or such lists; "
            f"{MAX_INPUTS:,} at the most."
        ),
    ]
    model: str = DEFAULT_MODEL
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        Meta(description="Numbers (the default), or float32, little-endian, as base64."),
    ] = None
    dimensions: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description=HELP["dimensions"])] = None
    user: Annotated[str | None, Meta(description="Taken, and not used.")] = None
    input_type: Annotated[
        Literal["query", "document"] | None,
        Meta(description="Ours: the model's prompt for these, if it has one; else its default."),
    ] = None
    prompt: Annotated[str | None, Meta(description=f"Ours: {HELP['prompt']}")] = None
    normalize: Annotated[bool | None, Meta(description=f"Ours: {HELP['normalize']}")] = None
    long_texts: Annotated[
        Literal["truncate", "fail", "passages"] | None, Meta(description=f"Ours: {HELP['long_texts']}")
    ] = None

    @property
    def has_list(self) -> bool:
        """Whether each text, or list of ids, has a place of its own."""
        return not (isinstance(self.input, str) or isinstance(self.input[0], int))

    def wish(self) -> Wish:
        return Wish(
            self.model, self.dimensions, self.prompt, self.input_type, self.normalize, self.long_texts
        )


# Of `input`, what the types cannot say.
INPUT_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_INPUTS},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_INPUTS,
        },
    ]
}
EMBEDDINGS_DECODER: Final = msgspec.json.Decoder(EmbeddingsRequest)


def read_inputs(request: EmbeddingsRequest, max_chars: int) -> list[bytes]:
    """The texts, or what stands for those that are token ids. Raises Problem and InvalidOption."""
    if isinstance(request.input, str):
        return [read_text(request.input, max_chars, "/input")]
    kinds = set(map(type, request.input))
    if len(kinds) != 1:
        raise InvalidOption(
            "input has texts, or lists of token ids, or is one such list; it is empty or has several of these."
        )
    if kinds == {int}:
        return [read_ids(request.input, "/input")]
    if len(request.input) > MAX_INPUTS:
        raise InvalidOption(
            f"input has {len(request.input):,} texts, and {MAX_INPUTS:,} are answered at once; send more in several "
            "requests, or as a job."
        )
    return [
        read_text(each, max_chars, f"/input/{number}")
        if isinstance(each, str)
        else read_ids(each, f"/input/{number}")
        for number, each in enumerate(request.input)
    ]


def read_text(text: str, max_chars: int, pointer: str) -> bytes:
    """`pointer` says where it stands in the body. Raises Problem."""
    encoded = text.encode("utf-8", "surrogatepass")
    failure = find_text_failure(encoded, max_chars)
    if failure is not None:
        raise refuse_text(pointer, failure.detail)
    return encoded


def read_ids(ids: Any, pointer: str) -> bytes:
    """Raises Problem. Which ids the model has, the worker knows."""
    if not ids:
        raise refuse_text(pointer, "the list of token ids is empty")
    return write_token_ids(ids)


def refuse_text(pointer: str, reason: str) -> Problem:
    detail = f"{name_parameter(pointer)} cannot be encoded: {reason}."
    return Problem(422, InvalidItem.code, detail, errors=[Place(reason, pointer=pointer)])


def refuse_failures(field: str, answered: Answered, *, is_list: bool) -> None:
    """Raises Problem for the first text of the field that a worker could not encode."""
    for row, reason in answered.failures.items():
        raise refuse_text(f"/{field}/{row}" if is_list else f"/{field}", reason)


class Usage(msgspec.Struct):
    """What the model read."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int


class EncodedEmbedding(msgspec.Struct):
    """A row as bytes, which msgspec writes as base64."""

    index: int
    embedding: bytes | msgspec.Raw
    object: str = "embedding"


class EncodedAnswer(msgspec.Struct):
    """In the order in which OpenAI writes them, but for `object`, which says the same in all."""

    data: list[EncodedEmbedding]
    model: str
    usage: Usage
    object: str = "list"


ENCODER: Final = msgspec.json.Encoder()


def write_answer(request: EmbeddingsRequest, answered: Answered, num_tokens: int) -> bytes:
    """As JSON."""
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


class UsageBody(BaseModel):
    """What the model read: special tokens and the prompt's counted, what was cut off not."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int = Field(description="Ours: inputs that had more tokens than the model reads.")


class EmbeddingsAnswer(BaseModel):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: UsageBody
