"""Bodies, answers and operations in the formats of text-embeddings-inference and of Cohere."""

from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict, cast

import msgspec
from msgspec import Meta

from vectormill.batches.endpoints import (
    DOCUMENT,
    MAX_INPUTS,
    QUERY,
    Document,
    EncodingRequest,
    RankedDocument,
    RankFields,
    RerankAnswer,
    RerankRequest,
    read_documents,
)
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import DENSE, EMBED, JUDGE, MULTI_VECTOR, SPARSE
from vectormill.keys.api_key import READ
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.operation import Operation

MODEL_HELP: Final = "Ours: if omitted, the only registered model, or else the packaged one."

# text-embeddings-inference documents the capital form, and accepts both.
Direction = Annotated[
    Literal["Right", "right", "Left", "left"] | None, Meta(description="Texts are truncated at the end only.")
]


def check_direction(direction: str | None) -> None:
    """Raise InvalidOption if texts are to be truncated at their start, which no model here supports."""
    if direction in {"Left", "left", "START"}:
        raise InvalidOption(
            "Texts that are too long are truncated at the end here, never at the start; truncate them "
            "before sending."
        )


def choose_model(registry: Registry, asked: str | None) -> str:
    """Return the model `asked`; if it is None, the only registered model, or else the packaged one."""
    names = registry.names()
    return asked or (names[0] if len(names) == 1 else DEFAULT_MODEL)


class TextsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The fields that a request for vectors and one for sparse vectors share."""

    inputs: str | list[str]
    truncate: Annotated[
        bool | None,
        Meta(description="Truncate texts that are too long; otherwise they are refused, as theirs does."),
    ] = False
    truncation_direction: Direction = None
    prompt_name: Annotated[str | None, Meta(description="The name of one of the model's prompts.")] = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    def encoding(self, registry: Registry) -> EncodingRequest:
        long_texts = TRUNCATE if self.truncate else FAIL
        options = EncodingOptions(
            prompt=self.prompt_name, long_texts=long_texts, task=EMBED, **self.own_options()
        )
        return EncodingRequest(choose_model(registry, self.model), options)

    def own_options(self) -> dict[str, Any]:
        """Return the encoding options that only this kind of request has."""
        raise NotImplementedError  # abstract: the metaclass of ABC conflicts with that of Struct


class EmbedRequest(TextsRequest, forbid_unknown_fields=True):
    """The JSON body of POST /embed and of POST /."""

    normalize: bool = True
    dimensions: Annotated[int, Meta(ge=1)] | None = None

    def own_options(self) -> dict[str, Any]:
        return {"outputs": DENSE, "dimensions": self.dimensions, "normalize": self.normalize}


class SparseRequest(TextsRequest, forbid_unknown_fields=True):
    """The JSON body of POST /embed_sparse."""

    def own_options(self) -> dict[str, Any]:
        return {"outputs": SPARSE}


class RankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /rerank."""

    query: str
    texts: list[str] | None = None
    documents: Annotated[
        list[str | Document] | None, Meta(description="The name of `texts` in other rerankers.")
    ] = None
    raw_scores: Annotated[bool, Meta(description="Return a classifier's numbers unchanged.")] = False
    return_text: bool = False
    truncate: Annotated[
        bool | None,
        Meta(description="Truncate texts that are too long; by default they are refused, as theirs does."),
    ] = None
    truncation_direction: Direction = None
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Ours: return only this many of the best texts.")
    ] = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None
    return_documents: Annotated[
        bool | None,
        Meta(
            description="vLLM's: given, as true or false, the request means what it does at /v1/rerank, and the answer "
            "is in that form."
        ),
    ] = None
    rank_fields: RankFields = None

    def as_rerank_request(self, registry: Registry) -> RerankRequest:
        """Return the request of /v1/rerank that this one is. Raise InvalidOption for what that one cannot express."""
        if self.raw_scores:
            raise InvalidOption(
                "raw_scores and return_documents belong to different APIs; send only one of them."
            )
        if self.truncate is False:
            raise InvalidOption(
                "With return_documents, texts that are too long are truncated: omit truncate, or omit return_documents."
            )
        _, texts = self.read_texts()
        return RerankRequest(
            query=self.query,
            documents=list(texts),
            model=choose_model(registry, self.model),
            top_n=self.top_n,
            return_documents=bool(self.return_documents or self.return_text),
        )

    def read_texts(self) -> tuple[str, list[str]]:
        """Return the name of the field that has the texts, and the texts.

        Raise InvalidOption if two fields have texts.
        """
        if self.documents is None:
            return "texts", self.texts or []
        if self.texts is not None:
            raise InvalidOption("texts and documents are the same field; send only one of them.")
        return "documents", read_documents(self.documents)


class Sentences(msgspec.Struct, forbid_unknown_fields=True):
    """A text, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Options for reading the texts of POST /similarity."""

    truncate: bool | None = False
    truncation_direction: Direction = None
    prompt_name: Annotated[str | None, Meta(description="The name of one of the model's prompts.")] = None


class SimilarityRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /similarity."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    def as_embed_request(self) -> EmbedRequest:
        """Return a request for the vectors of all texts, the source sentence first."""
        how = self.parameters or SimilarityParameters()
        return EmbedRequest(
            inputs=[self.inputs.source_sentence, *self.inputs.sentences],
            truncate=how.truncate,
            truncation_direction=how.truncation_direction,
            prompt_name=how.prompt_name,
            model=self.model,
        )


class PredictRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /predict."""

    inputs: Annotated[
        str | list[str | list[str]],
        Meta(
            description="A text, a pair as a list of two texts, or a list of lists of one text or one "
            "pair each."
        ),
    ]
    raw_scores: Annotated[bool, Meta(description="Return a classifier's numbers unchanged.")] = False
    truncate: bool | None = False
    truncation_direction: Direction = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    @property
    def is_many(self) -> bool:
        """Return True if the answer is a list with one list of predictions for each input."""
        return not isinstance(self.inputs, str) and any(isinstance(each, list) for each in self.inputs)

    def read_sequences(self) -> list[list[str]]:
        """Return each input as a list of one text or of two texts. Raise InvalidOption."""
        given = self.inputs if self.is_many else [self.inputs]
        sequences = [[each] if isinstance(each, str) else each for each in given]
        texts = [text for each in sequences for text in each]
        if not all(isinstance(text, str) for text in texts) or any(
            len(each) not in (1, 2) for each in sequences
        ):
            raise InvalidOption("inputs must be a text, a pair of texts, or lists of one or two texts.")
        return cast("list[list[str]]", sequences)

    def encoding(self, registry: Registry) -> EncodingRequest:
        """Return the request for the scores of all labels.

        Raise UnknownModel, ModelError, and InvalidOption if the model has no labels.
        """
        model = choose_model(registry, self.model)
        classifier = registry.card(model).classifier
        if classifier is None or classifier.template is not None:
            raise InvalidOption(
                f"The model {model!r} has no labels to predict; name a text classifier in model, or use "
                "/embed for vectors."
            )
        options = EncodingOptions(
            task=JUDGE,
            activation="raw" if self.raw_scores else None,
            long_texts=TRUNCATE if self.truncate else FAIL,
        )
        return EncodingRequest(model, options)


class PredictionBody(TypedDict):
    """A classifier's score for one label."""

    score: float
    label: str


class RankBody(TypedDict):
    """One text's score."""

    index: Annotated[int, Meta(description="The index of the text in the request.")]
    score: float
    text: NotRequired[Annotated[str, Meta(description="Present if requested.")]]


class WeightBody(TypedDict):
    """A weight of a sparse vector."""

    index: Annotated[int, Meta(description="The place in the vocabulary, from 0.")]
    value: float


class InfoBody(TypedDict):
    """The facts about the model that text-embeddings-inference reports, as far as they are known here."""

    model_id: str
    model_sha: str | None
    max_input_length: int
    max_client_batch_size: int
    version: str


InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "binary", "ubinary", "sparse", "multi_vector"]
# Cohere bills by search units; a request counts as one, however many documents it has.
RANK_META: Final = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
PROMPT_OF: Final = {"search_document": DOCUMENT, "search_query": QUERY}


class CohereEmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v2/embed and /v1/embed. int8 and uint8 need measured ranges, so only jobs have them."""

    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str = DEFAULT_MODEL
    input_type: Annotated[
        InputType | None, Meta(description="For a search, the model's prompt for it is used, if it has one.")
    ] = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] | None = None
    output_dimension: Annotated[int, Meta(ge=1)] | None = None
    truncate: Annotated[
        Literal["END", "NONE", "START"] | None,
        Meta(
            description="END, the default, truncates texts that are too long; NONE refuses them. START "
            "is not supported."
        ),
    ] = None

    def encoding(self, _: Registry | None = None) -> EncodingRequest:
        types = self.embedding_types or ["float"]
        outputs = {name if name in (SPARSE, MULTI_VECTOR) else DENSE for name in types}
        options = EncodingOptions(
            outputs=",".join(sorted(outputs)),
            dimensions=self.output_dimension,
            long_texts=FAIL if self.truncate == "NONE" else TRUNCATE,
            task=EMBED,
        )
        return EncodingRequest(self.model, options, PROMPT_OF.get(self.input_type or ""))


class CohereRankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v2/rerank, with the fields that clients of the first interface send as well."""

    query: str
    documents: list[str | Document]
    model: str = DEFAULT_MODEL
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: Annotated[bool | None, Meta(description="Return the texts in the response.")] = None
    max_tokens_per_doc: (
        Annotated[
            int,
            Meta(ge=1, description="Read at most this many tokens of a query and a document together."),
        ]
        | None
    ) = None
    rank_fields: RankFields = None
    max_chunks_per_doc: Annotated[int | None, Meta(description="Accepted, but not used.")] = None
    priority: Annotated[int | None, Meta(description="Accepted, but not used.")] = None

    def as_rerank_request(self, registry: Registry) -> RerankRequest:
        """Return the request of /v1/rerank that this one is."""
        max_tokens = self.max_tokens_per_doc
        if max_tokens is not None:  # a cap that clients may set higher than this model's own limit
            max_tokens = min(max_tokens, registry.card(self.model).max_tokens)
        return RerankRequest(
            query=self.query,
            documents=self.documents,
            model=self.model,
            top_n=self.top_n,
            max_tokens=max_tokens,
            return_documents=bool(self.return_documents),
        )


class SparseBody(TypedDict):
    """A sparse vector: places in the vocabulary, from 0 and ascending, and their weights."""

    indices: list[int]
    weights: list[float]


# Fields have Cohere's names of the types. `float` as an annotation still means the builtin.
class EmbeddingsByType(TypedDict):
    float: NotRequired[list[list[float]]]
    base64: NotRequired[Annotated[list[str], Meta(description="float32, little-endian.")]]
    binary: NotRequired[Annotated[list[list[int]], Meta(description="Eight values per number, minus 128.")]]
    ubinary: NotRequired[Annotated[list[list[int]], Meta(description="Eight values per number.")]]
    sparse: NotRequired[Annotated[list[SparseBody], Meta(description="Ours.")]]
    multi_vector: NotRequired[
        Annotated[list[list[list[float]]], Meta(description="Ours: a vector for each token.")]
    ]


EmbeddingsByType.__doc__ = "A list for each requested type, in the order of the texts."


class CohereAnswer(TypedDict):
    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


class CohereFirstAnswer(TypedDict):
    """The response of Cohere's v1 embed: plain rows, or rows by type if the request names types."""

    id: str
    embeddings: list[list[float]] | EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]
    response_type: str


class CohereRankAnswer(TypedDict):
    """The answer of Cohere's rerank endpoint: the documents, the most relevant one first."""

    id: str
    results: list[RankedDocument]
    meta: dict[str, Any]


VECTORS: Final = list[list[float]]
WEIGHTS: Final = list[list[WeightBody]]
PREDICTIONS: Final[type[Any]] = cast(Any, list[PredictionBody] | list[list[PredictionBody]])
DATES: Final = {"inputs": ["dates"]}

TEI_ROOT: Final = Operation("POST", "/", READ, VECTORS, EmbedRequest, example=DATES)
TEI_EMBED: Final = Operation("POST", "/embed", READ, VECTORS, EmbedRequest, example=DATES)
TEI_SPARSE: Final = Operation("POST", "/embed_sparse", READ, WEIGHTS, SparseRequest, example=DATES)
TEI_SIMILARITY: Final = Operation(
    "POST", "/similarity", READ, list[float], SimilarityRequest,
    example={"inputs": {"source_sentence": "dates", "sentences": ["strptime", "zlib"]}},
)  # fmt: skip
TEI_RERANK: Final = Operation(
    "POST", "/rerank", READ, list[RankBody], RankRequest, other_answer=RerankAnswer,
    example={"query": "dates", "texts": ["strptime", "zlib"]},
)  # fmt: skip
TEI_PREDICT: Final = Operation(
    "POST", "/predict", READ, PREDICTIONS, PredictRequest,
    example={"inputs": [["a question", "an answer"], ["a text"]]},
)  # fmt: skip
TEI_INFO: Final = Operation("GET", "/info", READ, InfoBody)
COHERE_EMBED: Final = Operation(
    "POST", "/v2/embed", READ, CohereAnswer, CohereEmbedRequest,
    example={"texts": ["dates"], "embedding_types": ["float"]},
)  # fmt: skip
COHERE_FIRST_EMBED: Final = Operation(
    "POST", "/v1/embed", READ, CohereFirstAnswer, CohereEmbedRequest, example={"texts": ["dates"]}
)
COHERE_RERANK: Final = Operation(
    "POST", "/v2/rerank", READ, CohereRankAnswer, CohereRankRequest,
    example={"query": "dates", "documents": ["strptime", "zlib"]},
)  # fmt: skip
