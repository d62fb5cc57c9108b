"""Reranking as clients send it, in the shape of Cohere's, Jina's and others, and what is answered."""

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

from vectormill.models.registry import DEFAULT_MODEL

# Of one request: all of them are in memory, and somebody waits.
MAX_DOCUMENTS: Final = 1_000


class Document(msgspec.Struct):
    """A document as an object, of which the text is read."""

    text: str


class RerankRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body of POST /v1/rerank."""

    query: Annotated[str, Meta(examples=["how to parse a date"])]
    documents: Annotated[
        list[str | Document],
        Meta(description=f"Texts, or objects with a `text`; {MAX_DOCUMENTS:,} at the most."),
    ]
    model: str = DEFAULT_MODEL
    top_n: Annotated[int, Meta(ge=1, description="Only so many of the best; else all.")] | None = None
    return_documents: Annotated[bool, Meta(description="Whether the answer repeats the texts.")] = False
    max_tokens: (
        Annotated[int, Meta(ge=1, description="Read so many tokens of a query and a document together.")]
        | None
    ) = None

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


RERANK_DECODER: Final = msgspec.json.Decoder(RerankRequest)


class RankedDocument(BaseModel):
    """One document's relevance."""

    index: int = Field(description="Its place among the documents that were sent.")
    relevance_score: float
    document: dict[str, str] | None = Field(default=None, description="Its `text`, if it was asked for.")


class RerankAnswer(BaseModel):
    """The documents by relevance, the best first."""

    id: str = Field(description="Of this answer alone.")
    model: str
    results: list[RankedDocument]
    usage: dict[str, int] = Field(description="The tokens of all pairs, twice.")
