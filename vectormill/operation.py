"""Operation: one thing that a client can ask of the API, described once.

The route, the scope that a key needs, the OpenAPI document and the methods of the client come from it. Bodies and
answers are types of msgspec: a body is a Struct, an answer a TypedDict with the values of JSON, so that one type says
what the API writes and what the client returns. The rows of a feature stand in its folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, Generic, TypeVar, cast
from uuid import UUID

import msgspec
from msgspec import Meta

from vectormill.moments import tell_moment

Answer = TypeVar("Answer")

Identifier = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
NextCursor = Annotated[str | None, Meta(description="Given as `after` for the next page; null on the last.")]


@dataclass(frozen=True, slots=True)
class Operation(Generic[Answer]):
    """A method on a path, with names in braces, that a key of `scope` may use; None where none is needed.

    Where `line` is the type of a line, a body is or may be a stream of NDJSON; where `form` is a JSON schema, it is a
    multipart form. `query` has the query parameters. An answer in one of `media_types` is a stream of bytes; an answer
    may also be of the type `other_answer`. `location` is the path of what was made, fields of the answer in braces.
    `other_status` has an answer of the same type. An operation that `is_repeatable` does no harm when it is sent again
    because no answer came.
    """

    method: str
    path: str
    scope: str | None
    answer: type[Answer]
    body: type[msgspec.Struct] | None = None
    query: type[msgspec.Struct] | None = None
    line: type[msgspec.Struct] | None = None
    form: Mapping[str, Any] | None = None
    example: Mapping[str, Any] = field(default_factory=dict)
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    line_example: str = ""
    status: int = 200
    other_status: int | None = None
    other_answer: type[Any] | None = None
    media_types: tuple[str, ...] = ()
    location: str | None = None
    is_repeatable: bool = True


class Nothing(msgspec.Struct):
    """An answer without a body."""


NO_CONTENT: Final = 204
# Sixteen hexadecimal digits below 2^63: every string of the pattern is a position, so that the description is the rule.
CURSOR: Final = "[0-7][0-9a-f]{15}"
After = Annotated[
    str | None,
    Meta(description="The `next` of the page before.", extra_json_schema={"pattern": f"^{CURSOR}$"}),
]


class PageQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The page of a list that a client asks for."""

    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    after: After = None


def one_of(values: tuple[str | None, ...]) -> Meta:
    """Return what says in the OpenAPI document that a string is one of these values."""
    return Meta(extra_json_schema={"type": "string", "enum": list(values)})


def describe(kind: type[Answer], thing: object, /, **others: Any) -> Answer:
    """Return an answer of this kind: the attributes of the thing that are called as its fields, and these others."""
    names = kind.__annotations__
    told = {name: others[name] if name in others else tell_value(getattr(thing, name)) for name in names}
    return cast(Answer, told)


def tell_value(value: object) -> object:
    """Return a value as JSON has it."""
    if isinstance(value, datetime):
        return tell_moment(value)
    return str(value) if isinstance(value, UUID) else value
