"""Answers about collections, as the API describes them. Made by `python -m tools.client`."""

from typing import Any, Literal, TypedDict


class CollectionBody(TypedDict):
    """A collection in a list; its page has the same fields and more."""

    name: str
    kind: Literal["vectors", "scores", "records"]
    model: str
    dimensions: int
    options: dict[str, Any]
    num_rows: int
    num_bytes: int
    num_generations: int
    keep_text: bool
    language: str
    created_at: str
    synced_at: str | None
    stale_seconds: float | None


class CollectionIndexBody(TypedDict):
    name: str
    method: str
    state: Literal["ready", "building", "invalid"]
    definition: str
    num_bytes: int


class GenerationBody(TypedDict):
    id: int
    state: Literal["building", "live", "retired", "pruned"]
    fingerprint: str
    model: str
    options: dict[str, Any]
    table: str
    num_rows: int
    table_bytes: int
    index_bytes: int
    attribute_bytes: int
    indexes: list[CollectionIndexBody]
    report: dict[str, Any]
    created_at: str
    live_at: str | None
    retired_at: str | None


class CoverageBody(TypedDict):
    """Coverage as of the last re-index that completed."""

    run_id: str
    at: str
    num_seen: int
    num_failed: int
    share: float
    failed_keys: list[str]


class StalenessBody(TypedDict):
    synced_at: str | None
    stale_seconds: float | None
    num_waiting_changes: int
    oldest_change_at: str | None


class OpenJobBody(TypedDict):
    id: str
    state: str
    num_items: int
    num_done: int
    num_failed: int


class RunLine(TypedDict):
    """A run in one line; `/v1/runs/{id}` has it whole."""

    id: str
    kind: str
    state: str
    phase: str | None
    num_seen: int
    num_failed: int
    error: str | None
    created_at: str
    finished_at: str | None


class SourceLine(TypedDict):
    kind: str
    options: dict[str, Any]
    split: dict[str, Any]


class ScheduleLine(TypedDict):
    """A schedule in one line; `/v1/schedules/{name}` has it whole."""

    name: str
    cron: str
    timezone: str
    next_due_at: str | None
    is_paused: bool


class CollectionDetail(TypedDict):
    """A collection whole."""

    name: str
    kind: Literal["vectors", "scores", "records"]
    model: str
    dimensions: int
    options: dict[str, Any]
    num_rows: int
    num_bytes: int
    num_generations: int
    keep_text: bool
    language: str
    created_at: str
    synced_at: str | None
    stale_seconds: float | None
    exact_rows: int | None
    fingerprint: str
    index_policy: str
    index_options: dict[str, Any]
    filters: list[Any]
    generations: list[GenerationBody]
    coverage: CoverageBody | None
    staleness: StalenessBody
    open_jobs: list[OpenJobBody]
    runs: list[RunLine]
    source: SourceLine | None
    schedules: list[ScheduleLine]


class LiveGenerationBody(TypedDict):
    """One generation, by what tells it from another."""

    id: int
    fingerprint: str
    options: dict[str, Any]


class RollbackAnswer(TypedDict):
    """The changes that a rollback made."""

    collection: str
    live: LiveGenerationBody
    retired: LiveGenerationBody
    num_newer_rows: int | None
    num_missing_rows: int | None
    run_id: str
