"""Options: each is declared once, as a field of a dataclass, with its help.

From it follow the bodies and query parameters of the API (`vectormill/operation.py`), the flags of commands
(`vectormill/cli/command.py`), the arguments of the client that editors complete, tables of the docs, and what a
repeated request is compared by.
"""

from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class Help:
    """The help of an option, as shown by commands, the API and the docs.

    Commands show `text`, the API and the docs `text` and `more`, and the docs also `default` of an option that has no
    value of its own by default. `unset` is the default that the help of a flag shows in brackets, and `flag` its name
    if that is not the option's. `choices` are all values that are possible with any model. `least` is the smallest
    useful number, which a model may raise; with a `most`, numbers outside of both are refused, and texts that are empty
    or longer. A list has at least `least` texts of at most `most` characters; if `are_names`, a command takes them
    separated by commas, too. Requests that differ only in what is not `is_compared` are repeats of each other.
    """

    text: str
    more: str = ""
    default: str = "the model's"
    unset: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    pattern: str | None = None
    example: str | None = None
    flag: str | None = None
    are_names: bool = False
    is_compared: bool = True
    is_older_name: bool = False

    @property
    def description(self) -> str:
        return f"{self.text} {self.more}".rstrip()


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a dataclass of options: its name, its type without None, its help, and its default or MISSING."""

    name: str
    kind: Any
    help: Help
    default: Any


def list_options(options: type[Any]) -> tuple[Option, ...]:
    """List the options in the order of their definition. Fields without a help are none."""
    hints = get_type_hints(options, include_extras=True)
    found = []
    for each in fields(options):
        if get_origin(hints[each.name]) is Annotated:
            kind, told = get_args(hints[each.name])
            found.append(Option(each.name, strip_none(kind), told, each.default))
    return tuple(found)


def strip_none(kind: Any) -> Any:
    """Return the first type of a union that is not None, or a type that is no union as it is."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    return next(each for each in get_args(kind) if each is not NoneType)


def read_options(options: type[Any], source: object) -> dict[str, Any]:
    """Return the values of these options in an object that has them as attributes."""
    return {option.name: getattr(source, option.name) for option in list_options(options)}


def find_given(options: object, *, compared: bool = False) -> dict[str, Any]:
    """Return the options whose values are not their defaults; with `compared` only those that repeats must share."""
    return {
        option.name: value
        for option in list_options(type(options))
        if (value := getattr(options, option.name)) != option.default
        and (option.help.is_compared or not compared)
    }
