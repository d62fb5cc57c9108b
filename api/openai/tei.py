"""Bodies of text-embeddings-inference: texts and documents for one model, and what its clients read."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

from vectormill.domain.encoding import FAIL, TRUNCATE, EncodingOptions
from vectormill.domain.tasks.task import EMBED
from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.requests.wishes import Wish

MODEL_HELP: Final = "Ours: the only model, or the packaged one, when it is left out."


def choose_model(registry: Registry, asked: str | None) -> str:
    """Theirs has one model, which nobody names."""
    names = registry.names()
    return asked or (names[0] if len(names) == 1 else DEFAULT_MODEL)


class EmbedRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /embed."""

    inputs: str | list[str]
    normalize: bool = True
    truncate: Annotated[
        bool | None, Meta(description="Cut what is too long; else it is refused, as theirs does.")
    ] = False
    prompt_name: Annotated[str | None, Meta(description="A prompt of the model, by name.")] = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None

    def wish(self, registry: Registry) -> Wish:
        options = EncodingOptions(
            dimensions=self.dimensions,
            prompt=self.prompt_name,
            normalize=self.normalize,
            long_texts=TRUNCATE if self.truncate else FAIL,
            task=EMBED,
        )
        return Wish(choose_model(registry, self.model), options)


class RankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /rerank."""

    query: str
    texts: list[str]
    raw_scores: Annotated[bool, Meta(description="A classifier's numbers as they are.")] = False
    return_text: bool = False
    truncate: bool | None = False
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None


class RankBody(BaseModel):
    """One text's score."""

    index: int = Field(description="Its place among the texts.")
    score: float
    text: str | None = Field(default=None, description="If it was asked for.")


class InfoBody(BaseModel):
    """What theirs tells of its model, as far as we know it."""

    model_id: str
    model_sha: str | None
    max_input_length: int
    max_client_batch_size: int
    version: str


EMBED_DECODER: Final = msgspec.json.Decoder(EmbedRequest)
RANK_DECODER: Final = msgspec.json.Decoder(RankRequest)
