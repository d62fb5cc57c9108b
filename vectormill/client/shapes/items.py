"""Answers about items, as the API describes them. Made by `python -m tools.client`."""

from typing import Any, NotRequired, TypedDict


class PutAnswer(TypedDict):
    """The outcome of a put."""

    key: str
    job: str
    is_searchable: bool
    searchable_at: str | None


class PassageBody(TypedDict):
    """The place of a passage in its document, in code points."""

    index: int
    start: int
    end: int


class ItemAnswer(TypedDict):
    """An item of a collection, with the result fields of the collection's kind."""

    key: str
    text: str | None
    text_pair: NotRequired[str | None]
    metadata: dict[str, Any] | None
    document: str | None
    passage: PassageBody | None
    content_hash: str
    job_seq: int
    embedding: NotRequired[list[float] | None]
    score: NotRequired[float | None]
    label: NotRequired[str | None]
    probabilities: NotRequired[dict[str, float] | None]
    output: NotRequired[dict[str, Any] | None]


class DeleteAnswer(TypedDict):
    """The outcome of a deletion."""

    num_keys: int
    num_deleted: int
