"""Turn functions into commands of Typer, with arguments, options, help and output. Contains no command.

The parameters before `*` are the command's arguments, the others its options. The docstring is the help; its
`Args:` section explains each parameter that is not in ARGUMENTS or OPTIONS, with the placeholder and the
bounds of the value in parentheses, or the flags if they are not named like the parameter:

    limit (N, 1 to 100): Show at most N matches.  [default: 10]
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_origin

import typer

from vectormill.cli.printing import View, print_answer
from vectormill.domain.options import Help, Option, list_options, strip_none
from vectormill.files.formats import INPUT_HELP, OUTPUT_HELP, describe_outputs
from vectormill.jobs.job import RequestedJob

if TYPE_CHECKING:
    from vectormill.client import Client as Client
else:
    Client = Any  # the client takes long to import, and commands need it only to run

# The commands that belong to no group.
top: Final = typer.Typer()

ROWS_HELP: Final = f"{describe_outputs(of_rows=True)}; or - for stdout."
# The type of an option that takes several names: it is repeated, or its value separates them by commas. Patterns and
# conditions, in which a comma may occur, are `list[str]` and only repeated.
Names = Annotated[list[str], "names"]
# An entry of `Args:`: the name, the text in parentheses, the help, and the default to show in the help.
ENTRY: Final = re.compile(r"(\w+)(?: \(([^)]*)\))?:(?: (.*?))?(?:\s*\[default: (.*)\])?")


def read_docstring(docstring: str) -> tuple[str, dict[str, Help]]:
    """Split a docstring into the help of a command and the help of its parameters."""
    text, _, entries = inspect.cleandoc(docstring).partition("\n\nArgs:\n")
    return text, dict(read_entries(entries))


def read_entries(text: str) -> Iterator[tuple[str, Help]]:
    """Yield the name and the help of each parameter; indented lines continue the entry above."""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(text).strip("\n")):
        if matched := ENTRY.fullmatch(" ".join(entry.split())):
            name, value, help, unset = matched.groups()
            told: dict[str, Any] = {}
            for part in filter(None, (value or "").split(", ")):
                if part.startswith("-"):
                    told["flag"] = part
                elif part.startswith("from "):
                    told["least"] = int(part.removeprefix("from "))
                elif " to " in part:
                    told["least"], told["most"] = map(int, part.split(" to "))
                else:
                    told["metavar"] = part
            yield name, Help((help or "").replace("{rows}", ROWS_HELP), unset=unset, **told)


# The help of parameters that a command's docstring does not explain.
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
OPTIONS: Final = {option.name: option.help for option in list_options(RequestedJob)} | dict(
    read_entries(f"""
    api_url (URL): The API to use. By default VECTORMILL_API_URL, or the stack on the data directory.
    data_dir (DIR): The embedded stack's directory. By default VECTORMILL_DATA_DIR, or ~/.vectormill.
    errors (FILE): Write every failed item here, as NDJSON.
    format: By default, the extension of OUT.
    gzip: Compress the upload, for slow networks.
    host (HOST): The address to listen on. Requests from other machines need an API key (`vectormill keys create NAME`).
        [default: 127.0.0.1]
    json: Print JSON on stdout.
    keep_text: Keep texts alongside their results, for full-text search and answers that show them.
    key_field (FIELD): The field with the key. By default key, or id, or the line number.
    language (NAME): The language of full-text search, such as german; simple by default.
    limit (N, from 1): Show at most N, newest first.
    metadata (JSON): A JSON object to keep with the job.
    out (--out -o, OUT): {OUTPUT_HELP}
    pair_field (FIELD): The field with the second text of a pair.
    price (MONEY): The price of the machines for an hour, in any currency.
    strict: Fail on input that is not UTF-8, instead of failing only that item.
    text_field (FIELD): The field with the text.
    text_pair (COLUMN): The column with the second text of a pair.
    wait: Follow the run until it ends.
    yes: Do not ask.
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
        taken = [each for name, each in own.items() if name not in ("client", "json")]
        taken += [API_URL, DATA_DIR] if "client" in own else []
        taken += [JSON] if view or "json" in own else []
        parameters = [made for each in taken for made in make_parameters(each, told)]

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

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # which Typer reads
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

            context = make_optional("context", typer.Context, inspect.Parameter.empty)
            run_group.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
            app.callback(invoke_without_command=True)(run_group)
        return function

    return add


def make_optional(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


API_URL: Final = make_optional("api_url", str | None, None)
DATA_DIR: Final = make_optional("data_dir", Path | None, None)
JSON: Final = make_optional("json", bool, False)


def make_parameters(own: inspect.Parameter, told: dict[str, Help]) -> list[inspect.Parameter]:
    """Return the parameters that Typer expects for one of a command: itself, or one for each field of a dataclass.

    The help of the command's docstring comes first.
    """
    kind: Any = own.annotation
    if is_dataclass(own.annotation):
        if not (options := list_options(kind)):
            fields = inspect.signature(kind).parameters.values()
            return [made for each in fields for made in make_parameters(each, told)]
        texts = {name: each.text for name, each in told.items()}
        return [
            make_flag(replace(each, help=replace(each.help, text=texts.get(each.name, each.help.text))))
            for each in options
        ]
    is_argument = own.kind is not own.KEYWORD_ONLY
    help = told.get(own.name) or (ARGUMENTS if is_argument else OPTIONS).get(own.name) or Help("")
    if not is_argument:
        return [make_flag(Option(own.name, strip_none(kind), help, own.default))]
    metavar = help.metavar or own.name.upper()
    argument = typer.Argument(metavar=metavar, help=help.text, show_default=help.unset or True)
    return [make_optional(own.name, Annotated[kind, argument], own.default)]


def find_flag(option: Option) -> str:
    """Return the name of an option on the command line."""
    return option.help.flag or f"--{option.name.strip('_').replace('_', '-')}"


def make_flag(option: Option) -> inspect.Parameter:
    """Return the parameter that Typer expects for an option, such as `--long-texts <truncate|fail>`."""
    told, default, flag = option.help, option.default, find_flag(option)
    kind: Any = Literal[told.choices] if told.choices else option.kind
    help = told.text
    are_names = told.are_names or kind == Names
    if are_names or get_origin(kind) is tuple:
        kind = list[str]
        help += f" May be repeated{', or several separated by commas' if are_names else ''}."
    if kind is bool and default is not False and "/" not in flag:
        flag += f"/--no-{flag[2:]}"
    is_number = kind in (int, float)
    made = typer.Option(
        *flag.split(),
        metavar=told.metavar,
        help=help,
        min=told.least if is_number else None,
        max=told.most if is_number else None,
        show_default=told.unset or (default is not None and default is not False),
        hidden=told.is_older_name,
        callback=split_names if are_names else None,
    )
    return make_optional(option.name, Annotated[kind | None if default is None else kind, made], default)


def split_names(given: list[str] | None) -> list[str] | None:
    return [name for each in given for name in map(str.strip, each.split(",")) if name] if given else None
