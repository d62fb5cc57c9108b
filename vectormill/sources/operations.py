"""Operations on sources, their quotes, pushes and followed tables, with the bodies that API and client exchange.

A source makes the server read the files and databases that it can reach, and following a table creates
triggers on a user's table. Both therefore need a key of the scope sources.
"""

from typing import Annotated, Any, Final, TypedDict

import msgspec
from msgspec import Meta, Struct

from vectormill.domain.credentials import hide_in_options
from vectormill.domain.options import list_options
from vectormill.jobs.job import RequestedJob
from vectormill.jobs.operations import LINES_EXAMPLE, ItemBody, OptionsBody, QuoteBody
from vectormill.keys.api_key import READ, SOURCES, WRITE
from vectormill.moments import Moment
from vectormill.operation import NO_CONTENT, Identifier, Nothing, Operation, describe, one_of, struct_of
from vectormill.sources.source import KINDS, SOURCE_KINDS, SavedSource

Kind = Annotated[str, one_of(SOURCE_KINDS)]
OPTION_NAMES: Final = {kind: [each.name for each in list_options(KINDS[kind])] for kind in KINDS}


class SourceRequest(Struct, forbid_unknown_fields=True):
    """The JSON body that sets or checks a source."""

    kind: Kind
    options: Annotated[
        dict[str, Any],
        Meta(
            description="Options of its kind. "
            + "; ".join(f"{kind}: {', '.join(each)}" for kind, each in OPTION_NAMES.items() if each)
            + "."
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
    """Options for saving a source."""

    check: Annotated[bool, Meta(description="Read the first rows of the source before saving it.")] = True


class PushQuery(Struct, forbid_unknown_fields=True):
    """Options of a push."""

    complete: Annotated[
        bool, Meta(description="The push contains all rows; rows that are missing from it are deleted.")
    ] = False


class SourceRowBody(TypedDict):
    key: str
    text: Annotated[str, Meta(description="Its first 200 characters.")]
    text_pair: Annotated[str | None, Meta(description="Likewise, if rows are pairs.")]
    metadata: dict[str, Any] | None


class SourceCheckBody(TypedDict):
    """Findings from reading the first rows of a source."""

    num_sampled: Annotated[int, Meta(description="The number of rows that were read; their keys are unique.")]
    is_whole: Annotated[bool, Meta(description="True if these are all rows.")]
    num_rows: Annotated[
        int | None, Meta(description="The approximate number of rows; null if no cheap estimate exists.")
    ]
    rows: Annotated[list[SourceRowBody], Meta(description="The first three.")]
    complaints: Annotated[
        dict[str, Any], Meta(description="Problems with single rows of the sample, with examples.")
    ]


class SourceBody(TypedDict):
    """The source of a collection's texts. Secrets are referenced by name, never shown."""

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
    """A push that waits for an indexer; GET /v1/runs/{run} shows its progress."""

    run: Identifier
    collection: str
    num_items: int
    is_complete: bool


class FollowRequest(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The table and column to follow. By default, those from which the source's query takes its keys."""

    table: Annotated[
        Annotated[str, Meta(max_length=200)] | None,
        Meta(description="The table's name as in SQL, with its schema."),
    ] = None
    key_column: Annotated[
        Annotated[str, Meta(max_length=63)] | None,
        Meta(description="The column with the keys of the items, or of the documents."),
    ] = None


class FollowingBody(TypedDict):
    """The table that a collection follows, and how far behind it is."""

    collection: str
    table: Annotated[str | None, Meta(description="Null if it follows none.")]
    key_column: str | None
    waiting_changes: Annotated[
        int, Meta(description="Changes that are not yet submitted; at most 1,000 are counted.")
    ]
    lag_seconds: Annotated[
        float, Meta(description="Seconds since the oldest of these changes; 0 if there are none.")
    ]


def describe_source(saved: SavedSource, check: SourceCheckBody | None = None) -> SourceBody:
    """Return the response body of a source, with the findings of a check that was made before saving it."""
    return describe(
        SourceBody,
        saved,
        kind=saved.source.kind,
        options=hide_in_options(saved.source.options),
        split=dict(saved.source.split),
        check=check,
    )


ONE: Final = "/v1/collections/{name}/source"

SET: Final = Operation(
    "PUT", ONE, SOURCES, SourceBody, SourceRequest, query=SourceQuery, is_slow=True,
    example={
        "kind": "sql",
        "options": {
            "query": "SELECT id, body, lang FROM articles",
            "key": "id",
            "text": "body",
            "metadata": ["lang"],
            "url_env": "ARTICLES_URL",
        },
        "split": {"by": "paragraphs"},
    },
)  # fmt: skip
SHOW: Final = Operation("GET", ONE, READ, SourceBody)
DELETE: Final = Operation("DELETE", ONE, SOURCES, Nothing, status=NO_CONTENT)
CHECK: Final = Operation("POST", ONE + "/check", SOURCES, SourceCheckBody, is_slow=True)
FOLLOWING: Final = Operation("GET", ONE + "/following", READ, FollowingBody)
FOLLOW: Final = Operation(
    "POST", ONE + "/follow", SOURCES, FollowingBody, FollowRequest,
    example={"table": "public.papers", "key_column": "id"},
)  # fmt: skip
UNFOLLOW: Final = Operation("POST", ONE + "/unfollow", SOURCES, FollowingBody)
PUSH: Final = Operation(
    "POST", "/v1/collections/{name}/push", WRITE, PushBody, query=PushQuery, line=ItemBody, line_example=LINES_EXAMPLE,
    status=202, location="/v1/runs/{run}", is_slow=True,
)  # fmt: skip


class QuoteRequest(struct_of(RequestedJob, SourceRequest)):  # type: ignore[misc]  # of its fields
    """A source of rows, and how they would be encoded."""

    encoding: OptionsBody = msgspec.field(default_factory=OptionsBody)


QUOTE: Final = Operation(
    "POST", "/v1/quotes", SOURCES, QuoteBody, QuoteRequest, is_slow=True,
    example={
        "kind": "sql",
        "options": {"query": "SELECT id, body FROM articles", "key": "id", "text": "body", "url_env": "ARTICLES_URL"},
        "collection": "articles",
    },
)  # fmt: skip
