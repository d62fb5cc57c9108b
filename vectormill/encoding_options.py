"""Fields and query parameters for encoding options, generated from the options' dataclass.

Limits that depend on the model are not checked here, but in `make_spec`.
"""

from typing import Annotated, Any, Literal

import msgspec

from vectormill.domain.encoding import EncodingOptions, Option, list_options


def type_of(option: Option) -> Any:
    """Return the type of an option: bool, int, str or Literal["truncate", …]."""
    return Literal[option.help.choices] if option.help.choices else option.kind


def struct_of(options: type[EncodingOptions]) -> Any:
    """Return a msgspec struct with one optional field for each encoding option.

    None, the default, means that the option was not given.
    """
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
