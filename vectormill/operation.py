"""Operation: the description of one operation of the API.

The route, the scope that a key needs, the OpenAPI document and the client's methods are made from it. Bodies
and answers are msgspec types: a body is a Struct, an answer a TypedDict of JSON values, so that one type
describes what the API writes and what the client returns. Each feature's folder has a table of its
operations.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Literal, TypeVar, cast, get_origin
from uuid import UUID

import msgspec
from msgspec import Meta

from vectormill.domain.options import Option, list_options
from vectormill.moments import format_moment

Answer = TypeVar("Answer")
# The most texts in the list of an option.
MOST_TEXTS: Final = 256

Identifier = Annotated[str, Meta(extra_json_schema={"format": "uuid"})]
NextCursor = Annotated[
    str | None, Meta(description="Pass it as `after` to get the next page; null on the last page.")
]


@dataclass(frozen=True, slots=True)
class Operation(Generic[Answer]):
    """An operation of the API: a method and a path with placeholders in braces.

    An API key needs `scope`; None means that no key is needed. If `line` is given, the body may be a stream
    of NDJSON with lines of that type; if `form`, a JSON schema, is given, the body is a multipart form.
    `query` has the query parameters. An answer in one of `media_types` is a stream of bytes; an answer may
    also have the type `other_answer`, or be bytes of `other_media_types` if the request asks for them.
    `location` is the path of the created resource, with fields of the answer in braces. An answer with
    `other_status` has the same type, or `other_answer` if both are given. An operation that `is_repeatable` may safely
    be sent again after a lost answer; to one that `is_slow` the server may say nothing for minutes. A DELETE is carried
    out only if the header CONFIRMATION repeats the last value of its path, unless it
    `skips_confirmation` (decision 0096).
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
    other_media_types: tuple[str, ...] = ()
    location: str | None = None
    is_repeatable: bool = True
    is_slow: bool = False
    skips_confirmation: bool = False

    @property
    def is_confirmed(self) -> bool:
        """Return True if a request has to repeat the last value of its path in the header CONFIRMATION."""
        return self.method == "DELETE" and not self.skips_confirmation


class Nothing(msgspec.Struct):
    """An answer without a body."""


NO_CONTENT: Final = 204
# Percent-encoded like the value in the path, so that every value can be sent.
CONFIRMATION: Final = "Vectormill-Confirm"
# Sixteen hexadecimal digits below 2^63, so that every string that matches the pattern is a valid cursor.
CURSOR: Final = "[0-7][0-9a-f]{15}"
After = Annotated[
    str | None,
    Meta(description="The `next` of the previous page.", extra_json_schema={"pattern": f"^{CURSOR}$"}),
]


class PageQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The page of a list that a client asks for."""

    limit: Annotated[int, Meta(ge=1, le=200)] = 50
    after: After = None


def one_of(values: tuple[str | None, ...]) -> Meta:
    """Return msgspec metadata that lists the allowed values of a string in the OpenAPI document."""
    return Meta(extra_json_schema={"type": "string", "enum": list(values)})


def describe(kind: type[Answer], thing: object, /, **others: Any) -> Answer:
    """Build an answer of type `kind` from attributes of the object and the other given fields.

    An attribute is used for the field of the same name.
    """
    names = kind.__annotations__
    told = {name: others[name] if name in others else to_json_value(getattr(thing, name)) for name in names}
    return cast(Answer, told)


def to_json_value(value: object) -> object:
    """Convert a value to one of JSON: times to RFC 3339 and UUIDs to strings."""
    if isinstance(value, datetime):
        return format_moment(value)
    return str(value) if isinstance(value, UUID) else value


def struct_of(options: type[Any], *bases: type[msgspec.Struct]) -> Any:
    """Return a msgspec struct with a field for each option, behind those of its bases, all with their defaults.

    A default of None means that the option was not given.
    """
    fields: list[Any] = [
        (each.name, annotate(each)) + (() if each.default is MISSING else (each.default,))
        for each in sorted(list_options(options), key=lambda each: each.default is not MISSING)
    ]
    return msgspec.defstruct(
        options.__name__, fields, bases=bases, forbid_unknown_fields=True, omit_defaults=True
    )


def annotate(option: Option) -> Any:
    """Return the type of an option as msgspec reads and describes it."""
    told = option.help
    kind: Any = Literal[told.choices] if told.choices else option.kind
    hint = None
    if get_origin(kind) is tuple:
        texts = tuple[Annotated[str, Meta(min_length=1, max_length=told.most)], ...]
        kind = Annotated[texts, Meta(min_length=told.least, max_length=MOST_TEXTS)]
    elif kind is str and told.most is not None:
        kind = Annotated[str, Meta(min_length=1, max_length=told.most, pattern=told.pattern)]
    elif told.most is not None:
        kind = Annotated[kind, Meta(ge=told.least, le=told.most)]
    elif told.least is not None:
        hint = {"minimum": told.least}
    examples = None if told.example is None else [told.example]
    described = Meta(description=told.description, examples=examples, extra_json_schema=hint)
    return Annotated[kind | None if option.default is None else kind, described]
