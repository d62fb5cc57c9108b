"""Options of encoding in requests: fields and query parameters, made from the dataclass of the domain, one for each.

What an option can be of a given model is not said here: `make_spec` refuses it with the model's limits.
"""

from typing import Annotated, Any, Literal

import msgspec

from vectormill.domain.encoding import EncodingOptions, Option, list_options


def type_of(option: Option) -> Any:
    """Return the type of an option: bool, int, str or Literal["truncate", …]."""
    return Literal[option.help.choices] if option.help.choices else option.kind


def struct_of(options: type[EncodingOptions]) -> Any:
    """Return the base of a msgspec struct: each field is its type or None, which it is when it is left out."""
    fields = [
        (
            option.name,
            Annotated[
                type_of(option) | None,
                msgspec.Meta(
                    description=option.help.description,
                    extra_json_schema=None if option.help.least is None else {"minimum": option.help.least},
                ),
            ],
            None,
        )
        for option in list_options(options)
    ]
    return msgspec.defstruct(options.__name__, fields, forbid_unknown_fields=True, omit_defaults=True)
