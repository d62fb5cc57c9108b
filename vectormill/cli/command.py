"""Turn functions into commands of Typer, with arguments, options, help and output. Contains no command.

The parameters before `*` are the command's arguments, the others its options. The docstring is the help; its
`Args:` section explains each parameter that is not in ARGUMENTS or OPTIONS, with the placeholder and the
bounds of the value in parentheses:

    limit (N, 1 to 100): Show at most N matches.  [default: 10]
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_origin

import typer

from vectormill.cli.printing import View, print_answer
from vectormill.domain.options import Option, list_options
from vectormill.files.formats import INPUT_HELP, OUTPUT_HELP, describe_outputs
from vectormill.jobs.job import RequestedJob

ROWS_HELP: Final = f"{describe_outputs(of_rows=True)}; or - for stdout."
# The type of an option that takes several names: it is repeated, or its value separates them by commas. Patterns and
# conditions, in which a comma may occur, are `list[str]` and only repeated.
Names = Annotated[list[str], "names"]
# An entry of `Args:`: the name, the text in parentheses, the help, and the default to show in the help.
ENTRY: Final = re.compile(r"(\w+)(?: \(([^)]*)\))?:(?: (.*?))?(?:\s*\[default: (.*)\])?")


@dataclass(frozen=True, slots=True)
class ParameterHelp:
    """The documentation of a parameter: its help, placeholder, flags, bounds and default."""

    help: str | None = None
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    default: str | None = None


def read_docstring(docstring: str) -> tuple[str, dict[str, ParameterHelp]]:
    """Split a docstring into the help of a command and the documentation of its parameters."""
    text, _, entries = inspect.cleandoc(docstring).partition("\n\nArgs:\n")
    return text, dict(read_entries(entries))


def read_entries(text: str) -> Iterator[tuple[str, ParameterHelp]]:
    """Yield the name and documentation of each parameter; indented lines continue the entry above."""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip("\n")):
        if matched := ENTRY.fullmatch(" ".join(entry.split())):
            name, value, help, default = matched.groups()
            yield name, read_value(value, help and help.replace("{rows}", ROWS_HELP), default)


def read_value(value: str | None, help: str | None, default: str | None) -> ParameterHelp:
    flags, metavar, least, most = [], None, None, None
    for part in filter(None, (value or "").split(", ")):
        if part.startswith("-"):
            flags.append(part)
        elif part.startswith("from "):
            least = int(part.removeprefix("from "))
        elif " to " in part:
            least, most = map(int, part.split(" to "))
        else:
            metavar = part
    return ParameterHelp(help, metavar, tuple(flags), least, most, default)


# The documentation of parameters that a command's docstring does not explain.
ARGUMENTS: Final = dict(
    read_entries(f"""
    collection (COLLECTION): The collection's name.
    folder (FOLDER): The folder with the job's output: s3://, gs://, az://, or a local folder.
    input (INPUT): {INPUT_HELP}
    job_id (JOB): The job's id, as printed by `submit` and `jobs`, or its first eight digits or more.
    key (KEY): The item's key. May contain any characters, slashes too.
    run_id (RUN): The run's id, as printed by `reindex` and `runs list`, or its first eight digits or more.
    schedule (NAME): The schedule's name, as shown by `schedules list`.
    webhook (ID): The webhook's id, as shown by `webhooks list`.
    """)
)
OPTIONS: Final = {
    option.name: ParameterHelp(
        option.help.text, option.help.metavar, least=option.help.least, most=option.help.most
    )
    for option in list_options(RequestedJob)
} | dict(
    read_entries(f"""
    api_url (URL): The API to use. By default VECTORMILL_API_URL, or the stack on the data directory.
    data_dir (DIR): The embedded stack's directory. By default VECTORMILL_DATA_DIR, or ~/.vectormill.
    errors (FILE): Write every failed item here, as NDJSON.
    format: By default, the extension of OUT.
    json: Print JSON on stdout.
    keep_text: Keep texts alongside their results, for full-text search and answers that show them.
    key_field (FIELD): The field with the key. By default key, or id, or the line number.
    language (NAME): The language of full-text search, such as german; simple by default.
    limit (N, from 1): Show at most N, newest first.
    metadata (JSON): A JSON object to keep with the job.
    out (-o, OUT): {OUTPUT_HELP}
    pair_field (FIELD): The field with the second text of a pair.
    strict: Fail on input that is not UTF-8, instead of failing only that item.
    text_field (FIELD): The field with the text.
    text_pair (COLUMN): The column with the second text of a pair.
    """)
)


def command(
    app: typer.Typer,
    *examples: str,
    name: str | None = None,
    note: str = "",
    view: View | None = None,
    is_default: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function to `app` as a command and returns the function unchanged.

    A parameter `client` receives a client of the API that the command's options name. A parameter of a dataclass
    becomes an option for each field; those that are declared as options (`vectormill/domain/options.py`) bring their
    help. With a `view` the command has `--json`: the returned value is printed as JSON, or else by the view. A returned
    string is printed on stderr. With `is_default` the group `app` runs the command, which has options alone, if no
    other is named.
    """
    said = [f"{'Examples' if len(examples) > 1 else 'Example'}: " + "\n\n".join(examples)] if examples else []
    epilog = "\n\n".join(said + ([note] if note else []))

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        help, told = read_docstring(function.__doc__ or "")
        own = inspect.signature(function).parameters
        groups: dict[str, Any] = {
            name: each.annotation for name, each in own.items() if is_dataclass(each.annotation)
        }
        last = [own["json"]] if "json" in own else []
        parameters = [
            each
            for name, parameter in own.items()
            if name not in ("client", "json")
            for each in (expand(groups[name], told) if name in groups else [make_parameter(parameter, told)])
        ]
        if "client" in own:
            parameters += [make_parameter(each, told) for each in (API_URL, DATA_DIR)]
        parameters += [make_parameter(each, told) for each in ([JSON] if view else last)]

        def run(**given: Any) -> None:
            is_json = given.pop("json") if view else False
            with ExitStack() as exits:
                if "client" in own:
                    from vectormill.cli.endpoint import connected

                    given["client"] = exits.enter_context(
                        connected(given.pop("api_url"), given.pop("data_dir"))
                    )
                for name, group in groups.items():
                    given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
                print_answer(function(**given), view, is_json=is_json)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        app.command(name or function.__name__.replace("_", "-"), help=help, epilog=epilog)(run)
        if is_default:

            def run_group(context: typer.Context, **given: Any) -> None:
                if context.invoked_subcommand is None:
                    run(**given)
                    return
                for option in given:  # it would be ignored
                    source = context.get_parameter_source(option)
                    if source is not None and source.name == "COMMANDLINE":
                        flag = f"--{option.replace('_', '-')}"
                        raise typer.BadParameter(
                            f"Write it after {context.invoked_subcommand}.", param_hint=flag
                        )

            context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
            run_group.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
            run_group.__annotations__ = {"context": typer.Context, **run.__annotations__}
            app.callback(invoke_without_command=True)(run_group)
        return function

    return add


def _optional(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


API_URL: Final = _optional("api_url", str | None, None)
DATA_DIR: Final = _optional("data_dir", Path | None, None)
JSON: Final = _optional("json", bool, False)


def expand(group: type[Any], told: dict[str, ParameterHelp]) -> list[inspect.Parameter]:
    """Return the parameters that Typer expects for the fields of a dataclass."""
    if options := list_options(group):
        return [make_flag(option, told.get(option.name, ParameterHelp()).help) for option in options]
    own = inspect.signature(group).parameters.values()
    return [make_parameter(_optional(each.name, each.annotation, each.default), told) for each in own]


def make_parameter(parameter: inspect.Parameter, explained: dict[str, ParameterHelp]) -> inspect.Parameter:
    """Convert a parameter to one that Typer expects: an argument, or an option named like the parameter."""
    is_argument = parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    told = (
        explained.get(parameter.name)
        or (ARGUMENTS if is_argument else OPTIONS).get(parameter.name)
        or ParameterHelp()
    )
    shown: Any = told.default or True
    kind: Any = parameter.annotation
    if is_argument:
        metavar = told.metavar or parameter.name.upper()
        info: Any = typer.Argument(metavar=metavar, help=told.help, show_default=shown)
    else:
        words = parameter.name.strip("_").replace("_", "-")
        has_opposite = parameter.annotation == bool | None or parameter.default is True
        flag = f"--{words}/--no-{words}" if has_opposite else f"--{words}"
        flags = told.flags if any(each.startswith("--") for each in told.flags) else (flag, *told.flags)
        help = told.help
        if is_names := kind == Names | None:
            kind, help = list[str] | None, f"{help} May be repeated, or several separated by commas."
        info = typer.Option(
            *flags, metavar=told.metavar, help=help, min=told.least, max=told.most, show_default=shown,
            callback=split_names if is_names else None,
        )  # fmt: skip
    return _optional(parameter.name, Annotated[kind, info], parameter.default)


def split_names(given: list[str] | None) -> list[str] | None:
    return [name for each in given for name in map(str.strip, each.split(",")) if name] if given else None


def find_flag(option: Option) -> str:
    """Return the name of an option on the command line."""
    return option.help.flag or f"--{option.name.replace('_', '-')}"


def make_flag(option: Option, help: str | None) -> inspect.Parameter:
    """Return the parameter that Typer expects for a declared option, such as `--long-texts <truncate|fail>`.

    `help` is that of the command's docstring, which comes first.
    """
    told, default = option.help, option.default
    words = find_flag(option)
    kind: Any = Literal[told.choices] if told.choices else option.kind
    help = help or told.text
    if get_origin(kind) is tuple:
        kind = list[str]
        help += f" May be repeated{', or several separated by commas' if told.are_names else ''}."
    is_number = kind in (int, float)
    flag = typer.Option(
        f"{words}/--no-{words[2:]}" if kind is bool and default is None else words,
        metavar=told.metavar,
        help=help,
        min=told.least if is_number else None,
        max=told.most if is_number else None,
        show_default=told.unset or default not in (None, False),
        hidden=told.is_older_name,
        callback=split_names if told.are_names else None,
    )
    return _optional(option.name, Annotated[kind | None if default is None else kind, flag], default)
