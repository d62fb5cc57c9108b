"""Options of encoding in requests: fields and query parameters, made from the dataclass of the domain, one for each.

What an option can be of a given model is not said here: `make_spec` refuses it with the model's limits.
"""

from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import AfterValidator, Field, create_model

from vectormill.domain.encoding import EncodingOptions, Option, list_options

JSON_TYPES: Final = {bool: "boolean", int: "integer", str: "string"}


def type_of(option: Option) -> Any:
    """bool, int, str or Literal["truncate", …]."""
    return Literal[option.help.choices] if option.help.choices else option.kind


def struct_of(options: type[EncodingOptions]) -> Any:
    """The base of a msgspec struct: each field is its type or None, which it is when it is left out."""
    fields = [
        (
            option.name,
            Annotated[type_of(option) | None, msgspec.Meta(description=option.help.description)],
            None,
        )
        for option in list_options(options)
    ]
    return msgspec.defstruct(options.__name__, fields, forbid_unknown_fields=True)


def model_of(options: type[EncodingOptions]) -> Any:
    """The same as the base of a pydantic model."""
    fields: dict[str, Any] = {
        option.name: (
            StorableText if type_of(option) is str else type_of(option) | None,
            Field(default=None, description=option.help.description),
        )
        for option in list_options(options)
    }
    return create_model(options.__name__, **fields)


def parameters_of(options: type[EncodingOptions]) -> list[dict[str, Any]]:
    """The same as query parameters in OpenAPI."""
    return [describe_parameter(option) for option in list_options(options)]


def describe_parameter(option: Option) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": JSON_TYPES[option.kind]}
    if option.help.choices:
        schema["enum"] = list(option.help.choices)
    if option.help.least is not None:
        schema["minimum"] = option.help.least
    return {"name": option.name, "in": "query", "description": option.help.description, "schema": schema}


def refuse_unstorable(text: str | None) -> str | None:
    if text is not None and any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("it contains a NUL character or half of a UTF-16 surrogate pair")
    return text


StorableText = Annotated[str | None, AfterValidator(refuse_unstorable)]
