"""Request and response bodies of sources, checks, pushes and followed tables, shared by API and client."""

from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
from msgspec import Meta, Struct

from vectormill.moments import Moment
from vectormill.operation import Identifier, describe, one_of
from vectormill.sources.source import SOURCE_KINDS, SavedSource, hide_files

if TYPE_CHECKING:  # the client imports this module, and these come with the server only
    from vectormill.sources.following import Following
    from vectormill.sources.opening import SourceReport

Kind = Annotated[str, one_of(SOURCE_KINDS)]


class SourceRequest(Struct, forbid_unknown_fields=True):
    """The JSON body that sets or checks a source."""

    kind: Kind
    options: Annotated[
        dict[str, Any],
        Meta(
            description="Options of its kind, as listed in docs/SOURCES.md. sql: query, key, text, text_pair, "
            "metadata or metadata_json, url_env or url_file; files: files, key, text, text_pair, metadata or "
            "metadata_json, format; tree: folder, include, exclude."
        ),
    ] = msgspec.field(default_factory=dict)
    split: Annotated[
        dict[str, Any],
        Meta(
            description="How documents become passages: by (none, paragraphs or tokens), min_chars, max_chars, tokens, "
            "overlap, markdown."
        ),
    ] = msgspec.field(default_factory=dict)


class SourceQuery(Struct, forbid_unknown_fields=True):
    """How a source is set."""

    check: Annotated[bool, Meta(description="Read a little of the source before it is kept.")] = True


class PushQuery(Struct, forbid_unknown_fields=True):
    """How pushed rows are taken."""

    complete: Annotated[
        bool, Meta(description="These are all rows: rows that are not among them are deleted.")
    ] = False


class SourceRowBody(TypedDict):
    key: str
    text: Annotated[str, Meta(description="Its first 200 characters.")]
    text_pair: Annotated[str | None, Meta(description="Likewise, where rows are pairs.")]
    metadata: dict[str, Any] | None


class SourceCheckBody(TypedDict):
    """Findings from reading the first rows of a source."""

    num_sampled: Annotated[int, Meta(description="So many rows were read; their keys are unique.")]
    is_whole: Annotated[bool, Meta(description="True if these are all rows.")]
    num_rows: Annotated[
        int | None, Meta(description="About how many there are, where that is cheap to know.")
    ]
    rows: Annotated[list[SourceRowBody], Meta(description="The first three.")]
    complaints: Annotated[
        dict[str, Any], Meta(description="Faults of single rows in the sample, with examples.")
    ]


class SourceBody(TypedDict):
    """The source of a collection's texts. Secrets are named, never shown."""

    collection: str
    kind: Kind
    options: dict[str, Any]
    split: dict[str, Any]
    created_at: Moment
    updated_at: Moment
    check: Annotated[
        SourceCheckBody | None,
        Meta(description="Findings of the check before it was saved; null if there was none."),
    ]


class PushBody(TypedDict):
    """The push waits for an indexer; GET /v1/runs/{run} tells what becomes of it."""

    run: Identifier
    collection: str
    num_items: int
    is_complete: bool


class FollowRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Without names, table and column are those that the source's query takes its keys from."""

    table: Annotated[
        Annotated[str, Meta(max_length=200)] | None, Meta(description="As SQL writes it, with its schema.")
    ] = None
    key_column: Annotated[
        Annotated[str, Meta(max_length=63)] | None,
        Meta(description="Whose values are the keys, or those of the documents."),
    ] = None


class FollowingBody(TypedDict):
    """The table that a collection follows, and how far behind it is."""

    collection: str
    table: Annotated[str | None, Meta(description="Null when it follows none.")]
    key_column: str | None
    waiting_changes: Annotated[
        int, Meta(description="That are not yet submitted; at most 1,000 are counted.")
    ]
    lag_seconds: Annotated[float, Meta(description="Since the oldest of them; 0 when none waits.")]


def describe_check(report: "SourceReport") -> SourceCheckBody:
    """Return the response body of a source's check."""
    return describe(SourceCheckBody, report, rows=[describe(SourceRowBody, row) for row in report.rows])


def describe_source(saved: SavedSource, report: "SourceReport | None" = None) -> SourceBody:
    """Return the response body of a source, with the findings of a check that was made before saving it."""
    return describe(
        SourceBody,
        saved,
        kind=saved.source.kind,
        options=hide_files(saved.source.options),
        split=dict(saved.source.split),
        check=None if report is None else describe_check(report),
    )


def describe_following(collection: str, following: "Following") -> FollowingBody:
    """Return the response body of the table that a collection follows."""
    table = following.table
    return FollowingBody(
        collection=collection,
        table=None if table is None else str(table),
        key_column=None if table is None else table.key_column,
        waiting_changes=following.num_waiting,
        lag_seconds=following.oldest_seconds,
    )
