"""Answers about sources, as the API describes them. Made by `python -m tools.client`."""

from typing import Any, Literal, NotRequired, TypedDict


class SourceRowBody(TypedDict):
    key: str
    text: str
    text_pair: NotRequired[str | None]
    metadata: dict[str, Any] | None


class SourceCheckBody(TypedDict):
    """Findings from reading the first rows of a source."""

    num_sampled: int
    is_whole: bool
    num_rows: int | None
    rows: list[SourceRowBody]
    complaints: dict[str, Any]


class SourceBody(TypedDict):
    """The source of a collection's texts. Secrets are named, never shown."""

    collection: str
    kind: Literal["sql", "files", "tree", "push", "own_texts"]
    options: dict[str, Any]
    split: dict[str, Any]
    created_at: str
    updated_at: str
    check: SourceCheckBody | None


class PushBody(TypedDict):
    """The push waits for an indexer; GET /v1/runs/{run} tells what becomes of it."""

    run: str
    collection: str
    num_items: int
    is_complete: bool


class FollowingBody(TypedDict):
    """The table that a collection follows, and how far behind it is."""

    collection: str
    table: str | None
    key_column: str | None
    waiting_changes: int
    lag_seconds: float
