"""EmbeddingsRequest: the body of /v1/embeddings, which means the same interactively and as a line of a batch."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from vectormill.batches.wishes import Wish
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions, list_options
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import EMBED
from vectormill.domain.tasks.token_ids import write_token_ids
from vectormill.models.registry import DEFAULT_MODEL

# As many as OpenAI takes. More are a job, or several lines of a batch.
MAX_INPUTS: Final = 2_048
HELP: Final = {option.name: option.help.description for option in list_options(EncodingOptions)}


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/embeddings: OpenAI's, and what our models can do beyond."""

    input: Annotated[
        str | list[str | int | list[int]],
        Meta(
            description="A text or texts; with `token_ids` the ids of a text's tokens, or such lists; "
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
    truncation: Annotated[bool | None, Meta(description="Voyage's: false refuses what is too long.")] = None
    output_dimension: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Voyage's: `dimensions`.")
    ] = None
    output_dtype: Annotated[Literal["float"] | None, Meta(description="Voyage's.")] = None
    token_ids: Annotated[
        bool,
        Meta(description="Ours: numbers in `input` are token ids of this model's own tokenizer."),
    ] = False

    @property
    def has_list(self) -> bool:
        """Return whether the input is a list of texts or of lists of ids."""
        return not (isinstance(self.input, str) or isinstance(self.input[0], int))

    def wish(self) -> Wish:
        """Say what is asked for. Raises InvalidOption for a wish that is spelled twice, in two ways."""
        long_texts = self.long_texts
        if self.truncation is not None:
            if long_texts is not None:
                raise InvalidOption("truncation and long_texts say the same; send one of them.")
            long_texts = TRUNCATE if self.truncation else FAIL
        if None not in (self.dimensions, self.output_dimension):
            raise InvalidOption("dimensions and output_dimension say the same; send one of them.")
        options = EncodingOptions(
            normalize=self.normalize,
            dimensions=self.dimensions or self.output_dimension,
            prompt=self.prompt,
            long_texts=long_texts,
            task=EMBED,
        )
        return Wish(self.model, options, self.input_type)


# The part of `input`'s description that types cannot express.
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


def read_inputs(request: EmbeddingsRequest) -> list[bytes]:
    """Give the texts in UTF-8, and what stands for those that are token ids. Raises InvalidOption.

    What a text contains is not looked at, and which ids the model has the worker knows.
    """
    if isinstance(request.input, str):
        return [write_input(request.input)]
    kinds = set(map(type, request.input))
    if len(kinds) != 1:
        raise InvalidOption(
            "input has texts, or lists of token ids, or is one such list; it is empty or has several of these."
        )
    if kinds != {str} and not request.token_ids:
        raise InvalidOption(
            "input has token ids, and nothing says that they are of this model's tokenizer; those of another mean "
            "other words. Send texts (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False), or say "
            '"token_ids": true beside input when they are the model\'s own.'
        )
    inputs: Sequence[Any] = [request.input] if kinds == {int} else request.input
    if len(inputs) > MAX_INPUTS:
        raise InvalidOption(
            f"input has {len(inputs):,} texts, and {MAX_INPUTS:,} are answered at once; send more in several "
            "requests, or as a job."
        )
    if not all(isinstance(each, str) or each for each in inputs):
        raise InvalidOption("input has an empty list of token ids; leave it out.")
    return [write_input(each) for each in inputs]


def write_input(given: str | Sequence[int]) -> bytes:
    return given.encode("utf-8", "surrogatepass") if isinstance(given, str) else write_token_ids(given)
