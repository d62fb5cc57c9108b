"""Answers to rerank requests, in the shape that Cohere and Jina share, and in Voyage's."""

from pydantic import BaseModel, Field


class RankedDocument(BaseModel):
    """One document's relevance."""

    index: int = Field(description="Its place among the documents that were sent.")
    relevance_score: float
    document: dict[str, str] | None = Field(default=None, description="Its `text`, if it was asked for.")


class RerankAnswer(BaseModel):
    """The documents by relevance, the best first."""

    id: str = Field(description="ID of this answer.")
    model: str
    results: list[RankedDocument]
    usage: dict[str, int] = Field(description="The tokens of all pairs, twice.")


class VoyageRankedDocument(BaseModel):
    """One document's relevance, as Voyage tells it."""

    index: int = Field(description="Its place among the documents that were sent.")
    relevance_score: float
    document: str | None = Field(default=None, description="Its text, if it was asked for.")


class VoyageRerankAnswer(BaseModel):
    """The answer to a request with Voyage's field names."""

    object: str = "list"
    data: list[VoyageRankedDocument]
    model: str
    usage: dict[str, int] = Field(description="The tokens of all pairs, twice.")
