"""Bodies of text-embeddings-inference: texts and documents for one model, and what its clients read."""

from typing import Annotated, Final, Literal, cast

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

from vectormill.batches.endpoints import Document, EncodingRequest, read_documents
from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import EMBED, JUDGE
from vectormill.models.registry import DEFAULT_MODEL, Registry

MODEL_HELP: Final = "Ours: the only model, or the packaged one, when it is left out."

# Theirs writes it with a capital, and takes either.
Direction = Annotated[
    Literal["Right", "right", "Left", "left"] | None, Meta(description="Only the end of a text is cut.")
]


def check_direction(direction: str | None) -> None:
    """Raises InvalidOption for what no model here does: cutting the start of a text."""
    if direction in {"Left", "left", "START"}:
        raise InvalidOption(
            "A text that is too long is cut at its end here, never at its start; cut its start before it is sent."
        )


def choose_model(registry: Registry, asked: str | None) -> str:
    """Theirs has one model, which nobody names."""
    names = registry.names()
    return asked or (names[0] if len(names) == 1 else DEFAULT_MODEL)


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /embed and of POST /."""

    inputs: str | list[str]
    normalize: bool = True
    truncate: Annotated[
        bool | None, Meta(description="Cut what is too long; else it is refused, as theirs does.")
    ] = False
    truncation_direction: Direction = None
    prompt_name: Annotated[str | None, Meta(description="A prompt of the model, by name.")] = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    def encoding(self, registry: Registry) -> EncodingRequest:
        options = EncodingOptions(
            dimensions=self.dimensions,
            prompt=self.prompt_name,
            normalize=self.normalize,
            long_texts=TRUNCATE if self.truncate else FAIL,
            task=EMBED,
        )
        return EncodingRequest(choose_model(registry, self.model), options)


class RankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /rerank."""

    query: str
    texts: list[str] | None = None
    documents: Annotated[
        list[str | Document] | None, Meta(description="Other rerankers' name of `texts`.")
    ] = None
    raw_scores: Annotated[bool, Meta(description="A classifier's numbers as they are.")] = False
    return_text: bool = False
    truncate: bool | None = False
    truncation_direction: Direction = None
    top_n: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Ours: only so many of the best.")
    ] = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    def read_texts(self) -> tuple[str, list[str]]:
        """Return the name of the field that has the texts, and the texts. Raises InvalidOption."""
        if self.documents is None:
            return "texts", self.texts or []
        if self.texts is not None:
            raise InvalidOption("texts and documents say the same; send one of them.")
        return "documents", read_documents(self.documents)


class Sentences(msgspec.Struct, forbid_unknown_fields=True):
    """A text, and those that it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(msgspec.Struct, forbid_unknown_fields=True):
    """Options for reading the texts of POST /similarity."""

    truncate: bool | None = False
    truncation_direction: Direction = None
    prompt_name: Annotated[str | None, Meta(description="A prompt of the model, by name.")] = None


class SimilarityRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /similarity."""

    inputs: Sentences
    parameters: SimilarityParameters | None = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    def as_embed_request(self) -> EmbedRequest:
        """Ask for the vectors of all its texts, the source sentence first."""
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
            description="A text, a list that is one pair of texts, or lists of one text or of one pair each."
        ),
    ]
    raw_scores: Annotated[bool, Meta(description="A classifier's numbers as they are.")] = False
    truncate: bool | None = False
    truncation_direction: Direction = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    @property
    def is_many(self) -> bool:
        """Return whether the answer is a list of predictions for each input."""
        return not isinstance(self.inputs, str) and any(isinstance(each, list) for each in self.inputs)

    def read_sequences(self) -> list[list[str]]:
        """Return the text, or the two texts, of each input. Raises InvalidOption."""
        given = self.inputs if self.is_many else [self.inputs]
        sequences = [[each] if isinstance(each, str) else each for each in given]
        texts = [text for each in sequences for text in each]
        if not all(isinstance(text, str) for text in texts) or any(
            len(each) not in (1, 2) for each in sequences
        ):
            raise InvalidOption("inputs must be a text, a pair of texts, or lists of one text or of two.")
        return cast("list[list[str]]", sequences)

    def encoding(self, registry: Registry) -> EncodingRequest:
        """Ask for the numbers of all labels. Raises UnknownModel, ModelError, and InvalidOption if it has none."""
        model = choose_model(registry, self.model)
        if registry.card(model).classifier is None:
            raise InvalidOption(
                f"The model {model!r} has no labels, so it predicts nothing; name a classifier of texts in model, or "
                "ask /embed for vectors."
            )
        options = EncodingOptions(
            task=JUDGE,
            activation="raw" if self.raw_scores else None,
            long_texts=TRUNCATE if self.truncate else FAIL,
        )
        return EncodingRequest(model, options)


class PredictionBody(BaseModel):
    """A classifier's score for one label."""

    score: float
    label: str


class RankBody(BaseModel):
    """One text's score."""

    index: int = Field(description="Its place among the texts.")
    score: float
    text: str | None = Field(default=None, description="If it was asked for.")


class InfoBody(BaseModel):
    """The facts about the model that text-embeddings-inference tells, as far as they are known here."""

    model_id: str
    model_sha: str | None
    max_input_length: int
    max_client_batch_size: int
    version: str


EMBED_DECODER: Final = msgspec.json.Decoder(EmbedRequest)
RANK_DECODER: Final = msgspec.json.Decoder(RankRequest)
SIMILARITY_DECODER: Final = msgspec.json.Decoder(SimilarityRequest)
PREDICT_DECODER: Final = msgspec.json.Decoder(PredictRequest)
