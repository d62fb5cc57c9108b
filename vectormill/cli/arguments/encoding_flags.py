"""The flags of a command that encodes: one for each option of the dataclass that its parameter `options` is of."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, ParamSpec, get_type_hints

import typer

from vectormill.domain.encoding import EncodingOptions, Option, list_options

PARAMETER: Final = "options"

P = ParamSpec("P")


def take_encoding_flags(command: Callable[P, None]) -> Callable[P, None]:
    """The command with flags in the place of its parameter `options`, which it gets filled from them.

    Typer reads a command's flags from its signature, so it is given one that has them.
    """
    kind: type[EncodingOptions] = get_type_hints(command)[PARAMETER]
    flags = [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=make_flag(option)
        )
        for option in list_options(kind)
    ]

    @functools.wraps(command)
    def with_flags(*args: P.args, **given: P.kwargs) -> None:
        values: dict[str, Any] = {flag.name: given.pop(flag.name) for flag in flags}
        given[PARAMETER] = kind(**values)
        command(*args, **given)

    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        parameters += flags if parameter.name == PARAMETER else [keyword_only(parameter)]
    with_flags.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_flags


def make_flag(option: Option) -> Any:
    """`--long-texts [truncate|fail|passages]`, as Typer writes it."""
    told = option.help
    words = option.name.replace("_", "-")
    kind = Literal[told.choices] if told.choices else option.kind
    flag = typer.Option(
        f"--{words}/--no-{words}" if option.kind is bool else f"--{words}",
        metavar=told.metavar,
        help=told.text,
        min=told.least,
        show_default=told.unset or False,
        hidden=told.is_older_name,
    )
    return Annotated[kind | None, flag]


def keyword_only(parameter: inspect.Parameter) -> inspect.Parameter:
    """As Typer calls commands."""
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
