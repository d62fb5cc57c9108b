"""The Typer app and `main`, the console script. Registers the commands and contains none.

Typer's Rich help is switched off because it doubles the time of --help (0.2 s without, 0.4 s with, on a slow
core).
"""

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from vectormill.cli import (  # noqa: F401 - an import adds the commands that belong to no group
    certify,
    collections,
    demo,
    doctor,
    encode,
    estimate,
    exits,
    imports,
    items,
    jobs,
    keys,
    load,
    models,
    processes,
    runs,
    schedules,
    searches,
    service,
    settings,
    sources,
    tuning,
    webhooks,
)
from vectormill.cli.command import top
from vectormill.extras import EXTRA_OF_COMMAND, refuse_hidden_packages

# The commands as the help lists them, in the order in which a newcomer meets them.
GROUPS: Final = {
    "First steps": "demo doctor encode score extract",
    "A service": "up status workers models",
    "Before a job": "plan estimate quote",
    "Jobs": "submit jobs pause resume cancel retry errors truncated export delete load",
    "Collections": "collections search rerank items sources push reindex runs schedules",
    "Operation": "migrate roles backup restore keys webhooks api scheduler indexer worker flower tune",
    "Trust": "certify verify certificate suspects",
}


@contextmanager
def raising_broken_pipes() -> Iterator[None]:
    """Raise CommandFailed for a broken pipe, which Typer would make exit code 1 without a word."""
    try:
        yield
    except BrokenPipeError as error:
        raise exits.CommandFailed(exits.describe(error), exits.OUTPUT_CLOSED) from error


class Commands(TyperGroup):
    """Lists the commands by GROUPS in the help, and tells of a refused value without the words of pydantic before it.

    Typer's panels need Rich, which is switched off.
    """

    def format_commands(self, context: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(formatter.width - 6 - width))
                for name in names.split()
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def make_context(self, *arguments: Any, **more: Any) -> Any:  # which prints the help
        with raising_broken_pipes():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        try:
            with raising_broken_pipes():
                return super().invoke(ctx)
        except typer.BadParameter as error:
            from vectormill.settings import VALUE_ERROR

            error.message = error.message.removeprefix(VALUE_ERROR)
            raise


app = typer.Typer(
    name="vectormill",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@dataclass(slots=True)
class Globals:
    """The global options and the name of the command; `main` reads them after a command has failed."""

    is_debugging: bool = False
    command: str | None = None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from vectormill.cli.doctor import describe_installation

        for line in describe_installation():
            typer.echo(line)
        raise typer.Exit


@app.callback(
    epilog="For the options of a command: vectormill COMMAND --help.\n\n"
    "Exit codes: 0 done, 2 bad usage or input, 3 service unavailable, 70 a bug in Vectormill, "
    "74 disk full, 130 interrupted, 141 output closed; encode, demo and status --watch also report how the job ended."
)
def vectormill(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and what it runs on.",
        ),
    ] = False,
) -> None:
    """Text in, vectors out, in bulk: encoding jobs that survive anything, vectors in Postgres.

    Try `vectormill demo` for a look, `vectormill encode FILE -o OUT` for one file, and `vectormill up` for a
    service on this machine.
    """
    if isinstance(context.obj, Globals):
        context.obj.is_debugging = debug
        context.obj.command = context.invoked_subcommand
    if context.invoked_subcommand in EXTRA_OF_COMMAND:
        refuse_hidden_packages()


app.add_typer(top)
for group in (items, keys, load, models, runs, schedules, collections, sources, webhooks):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. Every error becomes one sentence on stderr and an exit code.

    Without arguments it is the command of this process, and takes nothing from the folder in which it was started.
    """
    given = Globals()
    if arguments is None:
        exits.prepare_streams()
        settings.ignore_project()
    code = exits.SUCCESS
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        code = app(words, prog_name="vectormill", obj=given, standalone_mode=False) or exits.SUCCESS
        sys.stdout.flush()
        if code == exits.INTERRUPTED:
            raise KeyboardInterrupt
    except typer.TyperException as refused:
        refused.show()  # type: ignore[attr-defined]
        code = refused.exit_code
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - users see a traceback only if they ask for one
        error = KeyboardInterrupt() if isinstance(raised, typer.Abort) else raised
        with suppress(OSError):  # stderr may be closed too
            if given.is_debugging or _is_logging_debug():
                traceback.print_exception(error)
            typer.echo(f"vectormill: {exits.describe(error, given.command)}", err=True)
        code = exits.exit_code_of(error)
    if arguments is None:
        exits.end_streams()
    sys.exit(code)


def _is_logging_debug() -> bool:
    from vectormill.domain.errors import ConfigurationError
    from vectormill.settings import load_settings

    try:
        return load_settings().log_level == "DEBUG"
    except ConfigurationError:  # the error being reported may itself come from the settings
        return False
