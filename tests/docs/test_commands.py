"""Every command of every page is one that the command line accepts, and every example in Python is Python."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import typer

import vectormill
from tests.docs.pages import find_blocks, find_commands, find_pages
from vectormill.cli.app import app

BLOCKS = [block for page in find_pages() for block in find_blocks(page)]
COMMANDS = [(block, words) for block in BLOCKS for words in find_commands(block)]


def parse(words: Sequence[str]) -> None:
    """Read a command's options and arguments as the command line does; run nothing. Raise its UsageError."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("vectormill", list(words))
    while rest := [*getattr(context, "_protected_args", ()), *context.args]:
        found = command.get_command(context, rest[0])
        assert found is not None, f"there is no command {rest[0]}"
        command, context = found, found.make_context(rest[0], rest[1:], parent=context)
        if not hasattr(command, "get_command"):
            return


def test_the_command_line_accepts_every_command() -> None:
    for block, words in COMMANDS:
        try:
            parse(words)
        except Exception as error:  # the class of usage errors is Typer's own
            pytest.fail(f"{block.place}: vectormill {' '.join(words)}: {error!r}")


@pytest.mark.parametrize("words", ["schedules run docs", "submit", "search docs word --nolimit", "teleport"])
def test_what_the_command_line_refuses_is_found(words: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|there is no"):
        parse(words.split())


def test_there_are_commands_on_most_pages() -> None:
    assert len({block.page for block, _ in COMMANDS}) > 15
    assert len(COMMANDS) > 100


def test_python_is_python_and_json_is_json() -> None:
    for block in BLOCKS:
        if block.language == "python":
            excerpt = "def excerpt():\n" if block.code.startswith(" ") else ""
            compile(excerpt + block.code, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        elif block.language == "json":
            for value in block.code.strip().replace("…", "").split("\n\n"):
                json.loads(value)


def test_no_page_installs_from_an_index_what_is_on_none() -> None:
    pages = {
        page.name
        for page in find_pages()
        if re.search(r"pip install\s+'?vectormill[\s`'\[]", page.read_text("utf-8"))
    }
    assert pages == set(), "name the wheel"


def test_the_pages_import_from_vectormill_what_is_there() -> None:
    flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    imports = [
        (block.place, node.module, alias.name)
        for block in BLOCKS
        if block.language == "python" and not block.code.startswith(" ")
        for node in ast.walk(compile(block.code, block.place, "exec", flags))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vectormill")
        for alias in node.names
    ]
    assert len(imports) > 10
    assert [
        each for each in imports if not re.fullmatch(r"vectormill(\.integrations(\.\w+)?)?", each[1])
    ] == []
    assert [each for each in imports if each[1] == "vectormill" and not hasattr(vectormill, each[2])] == []
