"""Options: the flags that several commands share, each explained once. Knows no command."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, ParamSpec, get_type_hints

import typer

from vectormill.domain.encoding import EncodingOptions, Option, list_options
from vectormill.domain.errors import InvalidOption
from vectormill.files.formats import RowsName, describe_outputs

ApiUrl = Annotated[
    str | None,
    typer.Option(
        "--api-url",
        metavar="URL",
        help="The API to use. By default VECTORMILL_API_URL, or the stack on the data directory.",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="The embedded stack's directory. By default VECTORMILL_DATA_DIR, or ~/.vectormill.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
NewestFirst = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, help="Show at most N, newest first.")
]

Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="A registered model; see `vectormill models`.", show_default=False
    ),
]
Collection = Annotated[
    str | None,
    typer.Option(
        "--collection", metavar="NAME", help="Keep the results under this name, for search and SQL."
    ),
]
Priority = Annotated[
    int, typer.Option("--priority", metavar="N", min=0, max=9, help="0 is the most urgent, 9 the least.")
]
KeyField = Annotated[
    str | None,
    typer.Option(
        "--key-field",
        metavar="FIELD",
        help="The field with the key. By default key, or id, or the line number.",
    ),
]
TextField = Annotated[str, typer.Option("--text-field", metavar="FIELD", help="The field with the text.")]
PairField = Annotated[
    str,
    typer.Option("--pair-field", metavar="FIELD", help="The field with the second text of a pair."),
]
TextPair = Annotated[
    str | None,
    typer.Option("--text-pair", metavar="COLUMN", help="The column with the second text of a pair."),
]
ErrorsFile = Annotated[
    Path | None, typer.Option("--errors", metavar="FILE", help="Write every failed item here, as NDJSON.")
]
RowsFormat = Annotated[RowsName | None, typer.Option("--format", help="By default, the extension of OUT.")]
RowsOut = Annotated[
    Path, typer.Option("--out", "-o", metavar="OUT", help=f"{describe_outputs(of_rows=True)}.")
]
ExportOut = Annotated[
    str, typer.Option("--out", "-o", metavar="OUT", help="A file, or - for NDJSON on stdout.")
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Fail on input that is not UTF-8, instead of failing only that item."),
]
Metadata = Annotated[
    str | None,
    typer.Option("--metadata", metavar="JSON", help="A JSON object to keep with the job."),
]


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which Python's reader takes and JSON does not know."""
    raise ValueError(f"{name} is not a JSON number")


def parse_metadata(text: str | None) -> dict[str, Any] | None:
    """Return the object that --metadata gives. Raise InvalidOption."""
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise InvalidOption(f"--metadata is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidOption('--metadata must be a JSON object, as {"source": "arxiv"}.')
    return value


PARAMETER: Final = "options"

P = ParamSpec("P")


def take_encoding_flags(command: Callable[P, None]) -> Callable[P, None]:
    """Return the command with one flag for each field of its parameter `options`, filled from those flags.

    Typer reads a command's flags from its signature, so the new signature has them.
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
    """Return the annotation of a flag as Typer expects it, such as `--long-texts [truncate|fail|passages]`."""
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
    """Return the parameter as keyword-only, which is how Typer calls commands."""
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


def with_client(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name the API, and call it with a client of that API as its first argument."""

    @functools.wraps(command)
    def connecting(*, api_url: str | None, data_dir: Path | None, **arguments: Any) -> None:
        from vectormill.cli.endpoint import connected

        with connected(api_url, data_dir) as client:
            command(client, **arguments)

    signature = inspect.signature(command)
    own = [each for each in list(signature.parameters.values())[1:] if each.name != "json"]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("api_url", ApiUrl), ("data_dir", DataDir))
    ]
    # Printed last by every help.
    last = [signature.parameters["json"]] if "json" in signature.parameters else []
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *added, *last)]
    connecting.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    connecting.__annotations__ = {each.name: each.annotation for each in parameters}
    return connecting
