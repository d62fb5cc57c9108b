"""Answers about searches, as the API describes them. Made by `python -m tools.client`."""

from typing import Any, NotRequired, TypedDict

from vectormill.client.shapes.items import PassageBody


class MatchBody(TypedDict):
    """One result. What was not asked for, or is not there, is left out."""

    key: str
    score: float
    metadata: NotRequired[dict[str, Any] | None]
    text: NotRequired[str | None]
    embedding: NotRequired[list[float] | None]
    document: NotRequired[str | None]
    passage: NotRequired[PassageBody | None]
    vector_rank: NotRequired[int | None]
    text_rank: NotRequired[int | None]


class SearchAnswer(TypedDict):
    data: list[MatchBody]
    num_rows_read: int | None
    next_offset: NotRequired[int | None]
    repeated_because: NotRequired[str | None]


class ManySearchesAnswer(TypedDict):
    """The answers to each of `queries`, in their order."""

    data: list[SearchAnswer]


class RankedDocument(TypedDict):
    """One document's relevance."""

    index: int
    relevance_score: float
    document: NotRequired[dict[str, str] | None]


class RerankAnswer(TypedDict):
    """The documents by relevance, the best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: dict[str, int]


class EmbeddingBody(TypedDict):
    """One input's vector."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(TypedDict):
    """Tokens that the model read, with special tokens and the prompt, without what was cut off."""

    prompt_tokens: int
    total_tokens: int
    truncated_inputs: int


class EmbeddingsAnswer(TypedDict):
    """The vectors in the order of the inputs."""

    object: str
    data: list[EmbeddingBody]
    model: str
    usage: EmbeddingsUsage
