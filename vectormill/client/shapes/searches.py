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
