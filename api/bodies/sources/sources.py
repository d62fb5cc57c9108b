"""Sources as clients set and see them, what a look at one found, and what became of a push."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self
from uuid import UUID

import msgspec
from msgspec import Meta
from pydantic import BaseModel, Field

from vectormill.sources.checking import SourceReport
from vectormill.sources.source import SOURCE_KINDS, SavedSource, hide_files

OPTIONS_DESCRIPTION = (
    "Options of its kind, as listed in docs/SOURCES.md. sql: query, key, text, text_pair, "
    "metadata or metadata_json, url_env or url_file; files: files, key, text, text_pair, metadata or metadata_json, "
    "format; tree: folder, include, exclude."
)
SPLIT_DESCRIPTION = (
    "How documents become passages: by (none, paragraphs or tokens), min_chars, max_chars, tokens, overlap, "
    "markdown."
)


class SourceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON body that sets or checks a source."""

    kind: Literal["sql", "files", "tree", "push", "own_texts"]
    options: Annotated[dict[str, Any], Meta(description=OPTIONS_DESCRIPTION)] = msgspec.field(
        default_factory=dict
    )
    split: Annotated[dict[str, Any], Meta(description=SPLIT_DESCRIPTION)] = msgspec.field(
        default_factory=dict
    )


class SourceRowBody(BaseModel):
    key: str
    text: str = Field(description="Its first 200 characters.")
    text_pair: str | None = Field(default=None, description="Likewise, where rows are pairs.")
    metadata: dict[str, Any] | None


class SourceCheckBody(BaseModel):
    """Findings from reading the first rows of a source."""

    num_sampled: int = Field(description="So many rows were read; their keys are unique.")
    is_whole: bool = Field(description="True if these are all rows.")
    num_rows: int | None = Field(description="About how many there are, where that is cheap to know.")
    rows: list[SourceRowBody] = Field(description="The first three.")
    complaints: dict[str, Any] = Field(description="Faults of single rows in the sample, with examples.")

    @classmethod
    def from_report(cls, report: SourceReport) -> Self:
        return cls(
            num_sampled=report.num_sampled,
            is_whole=report.is_whole,
            num_rows=report.num_rows,
            rows=[
                SourceRowBody(
                    key=row.key,
                    text=row.text,
                    text_pair=row.text_pair,
                    metadata=msgspec.json.decode(row.metadata) if row.metadata else None,
                )
                for row in report.rows
            ],
            complaints=report.complaints,
        )


class SourceBody(BaseModel):
    """The source of a collection's texts. Secrets are named, never shown."""

    collection: str
    kind: str = Field(json_schema_extra={"enum": list(SOURCE_KINDS)})
    options: dict[str, Any]
    split: dict[str, Any]
    created_at: datetime
    updated_at: datetime
    check: SourceCheckBody | None = Field(
        description="Findings of the check before it was saved; null if there was none."
    )

    @classmethod
    def from_saved(cls, saved: SavedSource, report: SourceReport | None = None) -> Self:
        return cls(
            collection=saved.collection,
            kind=saved.source.kind,
            options=hide_files(saved.source.options),
            split=dict(saved.source.split),
            created_at=saved.created_at.astimezone(UTC),
            updated_at=saved.updated_at.astimezone(UTC),
            check=None if report is None else SourceCheckBody.from_report(report),
        )


class PushBody(BaseModel):
    """The push waits for an indexer; GET /v1/runs/{run} tells what becomes of it."""

    run: UUID
    collection: str
    num_items: int
    is_complete: bool
