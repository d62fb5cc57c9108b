"""Generate the command-line reference: the help of every command as one page. Runs no command."""

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from vectormill.cli.app import app

WIDTH = 100


def describe_commands() -> str:
    """Return Markdown with a section for each command; a group comes before its commands."""
    command = get_command(app)
    parts = ["# Command line", "Generated from the commands; each prints the same with `--help`."]
    return "\n\n".join(
        [*parts, *describe(command, command.make_context("vectormill", ["--debug"], resilient_parsing=True))]
    )


def describe(command: Any, context: Any) -> Iterator[str]:
    context.terminal_width = context.max_content_width = WIDTH
    yield f"## {context.command_path}\n\n```text\n{command.get_help(context).strip()}\n```"
    for name, part in sorted(getattr(command, "commands", {}).items()):
        if not part.hidden:
            with type(context)(part, info_name=name, parent=context) as inner:
                yield from describe(part, inner)
