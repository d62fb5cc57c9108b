"""The bodies of /v1/embeddings and /v1/rerank, and the encoding specs that they request.

A body means the same when it is answered at once and when it is a line of a batch. Independent of the
database.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from vectormill.batches.request_batch import EMBEDDINGS, RERANK
from vectormill.collections.index_plan import is_storable
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.options import list_options
from vectormill.domain.task import EMBED, JUDGE, write_token_ids
from vectormill.domain.vector_type import DEFAULT_TYPE
from vectormill.jobs.item import pair_with_each
from vectormill.models.registry import DEFAULT_MODEL, Registry, make_spec
from vectormill.models.suggestions import find_need

QUERY: Final = "query"
DOCUMENT: Final = "document"
# The names under which models keep their prompts for queries and for documents.
PROMPT_NAMES: Final = {QUERY: ("query",), DOCUMENT: ("document", "passage")}
# Specs are cached, because making one is slow and most requests use the same few.
SPECS_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """The model and the options that a request names.

    `input_type` is a key of PROMPT_NAMES, and chooses one of the model's prompts.
    """

    model: str
    options: EncodingOptions
    input_type: str | None = None

    def find(self, name: str) -> Any:
        """Return the value of the option `name`, or of input_type."""
        return self.input_type if name == "input_type" else getattr(self.options, name)


@functools.lru_cache(maxsize=SPECS_KEPT)
def resolve_spec(registry: Registry, encoding: EncodingRequest) -> EncodingSpec:
    """Return the encoding spec of a request; this may wait for a model hub.

    Raise UnknownModel, InvalidOption, and ModelError if the model's files are unavailable.
    """
    options = encoding.options
    card = registry.card(encoding.model, need=find_need(options))
    if not is_storable(options.prompt or ""):
        raise InvalidOption("prompt must not contain a NUL character or an unpaired UTF-16 surrogate.")
    if encoding.input_type is not None:
        if options.prompt is not None:
            raise InvalidOption("input_type and prompt both choose the prompt; send only one of them.")
        named = next((name for name in PROMPT_NAMES[encoding.input_type] if name in card.prompts), None)
        options = replace(options, prompt=named)
    return make_spec(card, options)


# OpenAI's limit. More inputs belong in a job, or in several lines of a batch.
MAX_INPUTS: Final = 2_048
BASE64: Final = "base64"
BYTES: Final = "bytes"
HELP: Final = {option.name: option.help.description for option in list_options(EncodingOptions)}


OutputName = Literal["dense", "sparse", "multi_vector"]


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/embeddings: OpenAI's fields, and more that our models support."""

    input: Annotated[
        str | list[str | int | list[int]],
        Meta(
            description="A text or a list of texts; with `token_ids`, a list of token ids or a list of such lists. "
            f"At most {MAX_INPUTS:,}."
        ),
    ]
    model: str = DEFAULT_MODEL
    encoding_format: Annotated[
        Literal["float", "base64", "bytes"] | None,
        Meta(
            description="Numbers (the default), or little-endian numbers of `embed_dtype` as base64. vLLM's: `bytes` "
            "answers with these numbers alone, row after row; the header `metadata` has the rest. Not in batches."
        ),
    ] = None
    embed_dtype: Annotated[
        Literal["float32", "float16"],
        Meta(description="vLLM's: the type of the numbers in base64 and bytes. Not in batches."),
    ] = "float32"
    endianness: Annotated[
        Literal["little", "native"] | None, Meta(description="vLLM's: the numbers are always little-endian.")
    ] = None
    dimensions: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description=HELP["dimensions"])] = None
    user: Annotated[str | None, Meta(description="Accepted but ignored.")] = None
    input_type: Annotated[
        Literal["query", "document"] | None,
        Meta(
            description="Ours: use the model's prompt for this kind of input, if it has one; else its default."
        ),
    ] = None
    prompt: Annotated[str | None, Meta(description=f"Ours: {HELP['prompt']}")] = None
    normalize: Annotated[bool | None, Meta(description=f"Ours: {HELP['normalize']}")] = None
    long_texts: Annotated[
        Literal["truncate", "fail", "passages"] | None, Meta(description=f"Ours: {HELP['long_texts']}")
    ] = None
    truncation: Annotated[
        bool | None, Meta(description="Voyage's: false rejects texts that are too long.")
    ] = None
    output_dimension: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Voyage's: `dimensions`.")
    ] = None
    output_dtype: Annotated[Literal["float"] | None, Meta(description="Voyage's.")] = None
    outputs: Annotated[
        Annotated[list[OutputName], Meta(min_length=1)] | None,
        Meta(
            description="Ours: the outputs to compute in one pass; `embedding` is that of dense, and sparse and "
            "multi_vector are fields beside it. By default the model's first. Not in batches."
        ),
    ] = None
    token_ids: Annotated[
        bool,
        Meta(description="Ours: the numbers in `input` are token ids of this model's tokenizer."),
    ] = False

    @property
    def has_list(self) -> bool:
        """Return True if `input` is a list of texts or of lists of token ids, not a single input."""
        return not (isinstance(self.input, str) or isinstance(self.input[0], int))

    def encoding(self) -> EncodingRequest:
        """Return the model and options of the request.

        Raise InvalidOption if an option is given under two names, or contradicts another one.
        """
        if self.embed_dtype != DEFAULT_TYPE.name and self.encoding_format not in (BASE64, BYTES):
            raise InvalidOption(
                "embed_dtype is the type of numbers in base64 and bytes: set encoding_format to one of these, or omit "
                "embed_dtype."
            )
        long_texts = self.long_texts
        if self.truncation is not None:
            if long_texts is not None:
                raise InvalidOption("truncation and long_texts are aliases; specify only one.")
            long_texts = TRUNCATE if self.truncation else FAIL
        if None not in (self.dimensions, self.output_dimension):
            raise InvalidOption("dimensions and output_dimension are aliases; specify only one.")
        options = EncodingOptions(
            normalize=self.normalize,
            dimensions=self.dimensions or self.output_dimension,
            prompt=self.prompt,
            long_texts=long_texts,
            outputs=None if self.outputs is None else ",".join(self.outputs),
            task=EMBED,
        )
        return EncodingRequest(self.model, options, self.input_type)


# The constraints on `input` that its type cannot express.
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
    """Return each input as UTF-8 text, or as token ids in the form that workers read. Raise InvalidOption.

    The texts are not checked here; the worker checks whether the model has these token ids.
    """
    if isinstance(request.input, str):
        return [write_input(request.input)]
    kinds = set(map(type, request.input))
    if len(kinds) != 1:
        raise InvalidOption(
            "input must be a list of texts, a list of token ids or a list of such lists; it must not be empty or mixed."
        )
    if kinds != {str} and not request.token_ids:
        raise InvalidOption(
            "input has token ids, which mean other words unless they are from this model's tokenizer. Send texts "
            "(LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False), or set "
            '"token_ids": true if the ids are from the model\'s own tokenizer.'
        )
    inputs: Sequence[Any] = [request.input] if kinds == {int} else request.input
    if len(inputs) > MAX_INPUTS:
        raise InvalidOption(
            f"input has {len(inputs):,} texts; at most {MAX_INPUTS:,} are allowed. Send several requests, or submit "
            "a job."
        )
    if not all(isinstance(each, str) or each for each in inputs):
        raise InvalidOption("input has an empty list of token ids; remove it.")
    return [write_input(each) for each in inputs]


def write_input(given: str | Sequence[int]) -> bytes:
    return given.encode("utf-8", "surrogatepass") if isinstance(given, str) else write_token_ids(given)


# The limit of one request or one line, whose documents are all in memory at once.
MAX_DOCUMENTS: Final = 1_000


class Document(msgspec.Struct):
    """A document as an object, of which the text is read."""

    text: str


RankFields = Annotated[list[str] | None, Meta(description="Cohere's: only `text` is read.")]


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/rerank."""

    query: Annotated[str, Meta(examples=["how to parse a date"])]
    documents: Annotated[
        list[str | Document],
        Meta(description=f"Texts, or objects with a `text`; at most {MAX_DOCUMENTS:,}."),
    ]
    model: str = DEFAULT_MODEL
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Return only this many of the best documents; all by default."),
    ] = None
    return_documents: Annotated[bool, Meta(description="Include the texts in the answer.")] = False
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="The maximum number of tokens of a query and a document together."),
    ] = None
    top_k: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="Voyage's: `top_n`.")] = None
    truncation: Annotated[
        bool | None, Meta(description="Voyage's: false rejects texts that are too long.")
    ] = None
    rank_fields: RankFields = None

    @property
    def is_voyages(self) -> bool:
        """Return True if the request uses Voyage's field names.

        Its client then reads `data` instead of `results`.
        """
        return self.top_k is not None or self.truncation is not None

    @property
    def limit(self) -> int | None:
        return self.top_n or self.top_k

    def encoding(self) -> EncodingRequest:
        long_texts = FAIL if self.truncation is False else TRUNCATE
        return EncodingRequest(
            self.model, EncodingOptions(task=JUDGE, max_tokens=self.max_tokens, long_texts=long_texts)
        )

    def texts(self) -> list[str]:
        """Return the texts of the documents.

        Raise InvalidOption for no or too many texts, or for both top_n and top_k.
        """
        if None not in (self.top_n, self.top_k):
            raise InvalidOption("top_n and top_k are aliases; specify only one.")
        return check_documents(read_documents(self.documents))


RERANK_DECODER: Final = msgspec.json.Decoder(RerankRequest)


def read_documents(documents: Sequence[str | Document]) -> list[str]:
    return [each if isinstance(each, str) else each.text for each in documents]


def check_documents(texts: list[str], field: str = "documents") -> list[str]:
    """Return the texts of the field. Raise InvalidOption if there are none or too many."""
    if not 1 <= len(texts) <= MAX_DOCUMENTS:
        raise InvalidOption(f"{field} must have 1 to {MAX_DOCUMENTS:,} entries, not {len(texts):,}.")
    return texts


def check_ranks(spec: EncodingSpec) -> None:
    """Raise InvalidOption if the classifier has more than two labels: none is known to mean relevance."""
    if len(spec.labels) > 2:
        raise InvalidOption(
            f"The model {spec.model!r} has {len(spec.labels)} labels ({', '.join(spec.labels[:3])}, …), and it is not "
            "known which of them means relevance; use a model with one or two labels."
        )


class EmbeddingBody(TypedDict):
    """One input's vector."""

    object: Literal["embedding"]
    index: Annotated[int, Meta(description="Its position among the inputs.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or little-endian float32 as base64.")]


class EmbeddingsUsage(TypedDict):
    """Tokens that the model read, including special tokens and the prompt, but not what was cut off."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: Annotated[
        int, Meta(description="Ours: the number of inputs with more tokens than the model reads.")
    ]


class EmbeddingsAnswer(TypedDict):
    """The vectors in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingsUsage


Usage = Annotated[dict[str, int], Meta(description="The tokens of all pairs, under two names.")]


class RankedDocument(TypedDict):
    """One document's relevance."""

    index: Annotated[int, Meta(description="Its position among the documents in the request.")]
    relevance_score: float
    document: NotRequired[
        Annotated[dict[str, str] | None, Meta(description="Its `text`, if it was requested.")]
    ]


class RerankAnswer(TypedDict):
    """The documents by relevance, the best first, in the shape that Cohere and Jina share."""

    id: Annotated[str, Meta(description="ID of this answer.")]
    model: str
    results: list[RankedDocument]
    usage: Usage


class VoyageRankedDocument(TypedDict):
    """One document's relevance, in Voyage's format."""

    index: Annotated[int, Meta(description="Its position among the documents in the request.")]
    relevance_score: float
    document: NotRequired[Annotated[str | None, Meta(description="Its text, if it was requested.")]]


class VoyageRerankAnswer(TypedDict):
    """The answer to a request with Voyage's field names."""

    object: str
    data: list[VoyageRankedDocument]
    model: str
    usage: Usage


# Bytes of an item's key that are not available to its custom_id.
KEY_ROOM: Final = 32


# Options that must be equal in all lines of a batch.
SHARED_OPTIONS: Final = ("dimensions", "prompt", "input_type", "normalize", "long_texts", "max_tokens")


class RefusedLine(Exception):
    """A line of a request file cannot be answered, for the reason in `message`."""

    def __init__(
        self, code: str, message: str, *, custom_id: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id
        self.param = param


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A parsed line of a request file.

    `texts` become items of the job; `facts` are kept for writing the answer.
    """

    custom_id: str
    encoding: EncodingRequest
    texts: Sequence[bytes]
    facts: Mapping[str, Any]


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _CustomId(msgspec.Struct):
    custom_id: str


_ENVELOPE: Final = msgspec.json.Decoder(_Envelope)
_CUSTOM_ID: Final = msgspec.json.Decoder(_CustomId)
_ERRORS: Final = (msgspec.DecodeError, ValueError, RecursionError)


def find_custom_id(line: bytes) -> str | None:
    """Return the custom_id of a line even if the line is otherwise invalid; None if it has none."""
    try:
        return _CUSTOM_ID.decode(line).custom_id
    except _ERRORS:
        return None


def parse_line(line: bytes, endpoint: str, max_key_bytes: int) -> RequestLine:
    """Parse a line of a batch whose endpoint is `endpoint`. Raise RefusedLine."""
    try:
        envelope = _ENVELOPE.decode(line)
    except _ERRORS as error:
        raise _describe(error, "the line", find_custom_id(line)) from error
    custom_id = envelope.custom_id
    max_bytes = max_key_bytes - KEY_ROOM
    if "\0" in custom_id or not 0 < len(custom_id.encode()) <= max_bytes:
        raise RefusedLine(
            "invalid_custom_id",
            f"custom_id must have 1 to {max_bytes} bytes and no NUL character.",
            param="custom_id",
        )
    if envelope.method != "POST":
        raise RefusedLine(
            "invalid_method",
            f"method must be POST, not {envelope.method[:20]!r}.",
            custom_id=custom_id,
            param="method",
        )
    if envelope.url != endpoint:
        raise RefusedLine(
            "mismatched_endpoint",
            f"url is {envelope.url[:50]!r}, but the batch's endpoint is {endpoint}; all lines must have the same url.",
            custom_id=custom_id,
            param="url",
        )
    try:
        encoding, texts, facts = PARSERS[endpoint](bytes(envelope.body))
    except RefusedLine as refused:
        refused.custom_id = custom_id
        raise
    except _ERRORS as error:
        raise _describe(error, "body", custom_id) from error
    return RequestLine(custom_id, encoding, texts, facts)


def _describe(error: Exception, subject: str, custom_id: str | None) -> RefusedLine:
    if not isinstance(error, msgspec.ValidationError):
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        return RefusedLine(
            "invalid_json_line", f"{subject} is not valid JSON: {reason}.", custom_id=custom_id
        )
    reason, _, path = str(error).partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    where = f"{subject}, {path}" if path else subject
    return RefusedLine("invalid_request", f"{where}: {reason}.", custom_id=custom_id, param=path or None)


Parsed = tuple[EncodingRequest, Sequence[bytes], Mapping[str, Any]]


def _parse_embeddings(content: bytes) -> Parsed:
    body = EMBEDDINGS_DECODER.decode(content)
    if body.encoding_format == BYTES or body.embed_dtype != DEFAULT_TYPE.name:
        raise RefusedLine(
            "invalid_request",
            "A batch returns numbers, or float32 as base64: set encoding_format to float or base64, and omit "
            "embed_dtype.",
            param="encoding_format",
        )
    facts = {"encoding_format": BASE64} if body.encoding_format == BASE64 else {}
    try:
        return body.encoding(), read_inputs(body), facts
    except InvalidOption as error:
        raise RefusedLine("invalid_request", str(error), param="input") from error


def _parse_rerank(content: bytes) -> Parsed:
    body = RERANK_DECODER.decode(content)
    facts: dict[str, Any] = {}
    if body.limit is not None:
        facts["top_n"] = body.limit
    if body.return_documents:
        facts["return_documents"] = True
    if body.is_voyages:
        facts["is_voyages"] = True
    try:
        pairs = pair_with_each(body.query.encode(), [text.encode() for text in body.texts()])
    except InvalidOption as error:
        raise RefusedLine("invalid_request", str(error), param="documents") from None
    return body.encoding(), pairs, facts


PARSERS: Final = {EMBEDDINGS: _parse_embeddings, RERANK: _parse_rerank}


def make_key(line: int, index: int, custom_id: str) -> str:
    """Return an item's key, which is unique in its job and made of the line number, index and custom_id."""
    return f"{line}.{index}:{custom_id}"


def split_key(key: str) -> tuple[int, int, str]:
    """Split an item's key into its line number, its index within the line, and its custom_id."""
    place, _, custom_id = key.partition(":")
    line, _, index = place.partition(".")
    return int(line), int(index), custom_id
