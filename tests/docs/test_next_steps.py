"""What the product tells people to do can be done: its commands are accepted, and its settings and paths exist.

That commands also work where they are printed is tested in tests/acceptance/test_next_steps.py.
"""

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest
import typer
from sqlalchemy import create_engine

from api.app import create_app
from deploy.site.routes import NOWHERE
from tests.architecture.facts import find_settings
from tests.architecture.sources import ROOT
from tests.docs.next_steps import FIELD, Sentence, find_prose, find_sentences, find_strings
from tests.docs.pages import split_words
from tests.docs.test_commands import parse
from vectormill.cli.app import app
from vectormill.settings import Settings

SENTENCES: Final = list(find_sentences())
PROSE: Final = list(find_prose())
COMMANDS: Final = sorted({tuple(words) for each in SENTENCES for words in each.list_commands()})
SETTING: Final = re.compile(r"(?<![\w$])VECTORMILL_[A-Z][A-Z0-9_]*[A-Z0-9]\b(?!_|…)")
OPTION: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
PATH: Final = re.compile(r"\b(GET|POST|PUT|PATCH|DELETE) (/v[12]/[\w/{}:-]*\w}?)")
PAGE: Final = re.compile(r"\bdocs/[A-Z]+\.md")

# Commands in sentences that are only parsed, by the reason.
PARSED: Final = {
    "It begins a process, which tests/unit/cli/test_cli_stack.py shows to find the stack.": (
        "api", "indexer", "scheduler", "worker", "up", "up --open",
    ),
    "It looks, changes nothing, and needs nothing of the situation.": (
        "--debug", "--debug doctor", "doctor", "models", "plan", "quote", "roles", "status", "webhooks list", "workers",
    ),
    "It looks at what the sentence names; tests/blackbox/test_pages.py runs it as the pages show it.": (
        "collections index 1", "errors 1", "runs show 1", "status 1",
    ),
    "tests/blackbox/test_pages.py runs it on a service as the pages show it.": (
        "collections export 1 -o 1", "collections index 1 --policy hnsw --wait", "export 1 -o 1",
        "schedules create 1 --cron 0 2 * * *", "submit texts.jsonl --collection docs",
        "submit 1 --collection 1 --api-url 1",
    ),
    "What it calls is tested without it (tests/integration/engine/test_tuning.py).": ("tune 1",),
    "Its own tests run it: test_api_sources.py, test_items_command.py, test_models_command.py, test_certify.py.": (
        "certify 1", "items delete docs --from keys.txt", "models remove 1", "push 1 1", "sources set 1 --push",
    ),
    "Its situation takes a faulty index, a re-index or a failed load; tests/integration do the same over HTTP.": (
        "cancel 1", "collections change 1 --keep-text", "collections discard 1 1", "collections index 1 --rebuild",
        "reindex 1", "runs cancel 1", "runs confirm 1",
    ),
    "It is keys create with a scope, which tests/integration/cli/test_keys_command.py runs.": (
        "keys create 1 --scope read",
    ),
}  # fmt: skip


def accept(words: Iterable[str]) -> None:
    with contextlib.suppress(typer.Exit):  # --help and --version print and end
        parse(list(words))


def find_covered() -> Iterator[str]:
    """Yield the commands that the tests of situations take from what is printed, and run."""
    tree = ast.parse((ROOT / "tests/acceptance/test_next_steps.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("Situation", "place.take"):
            continue
        if isinstance(advice := node.args[0], ast.Constant):
            yield " ".join(split_words(str(advice.value)))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_in_a_sentence_is_whole(words: tuple[str, ...]) -> None:
    assert not any("{" in word for word in words), "the string is no f-string"
    accept(words)


def test_each_command_in_a_sentence_is_run_in_its_situation_or_it_is_said_why_not() -> None:
    parsed = [command for commands in PARSED.values() for command in commands]
    covered = set(find_covered())
    assert not covered & set(parsed)
    assert covered | set(parsed) == {" ".join(words) for words in COMMANDS}, (
        "add a situation to tests/acceptance/test_next_steps.py, or a reason to PARSED"
    )


def test_examples_of_help_texts_are_accepted() -> None:
    examples = [words for each in SENTENCES for words in each.list_examples()]
    assert len(examples) > 100
    for words in examples:
        accept(words)


def test_commands_in_the_text_of_pages_exist() -> None:
    for sentence in PROSE:
        for words in sentence.list_commands():
            if words[0] == FIELD:  # `vectormill COMMAND --help`
                continue
            try:
                accept(words)
            except Exception as error:  # the class of usage errors is Typer's own
                # A page names a command without its arguments too.
                if type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                    pytest.fail(f"{sentence.place}: {words}: {error!r}")


def test_a_command_in_a_sentence_stands_in_backticks() -> None:
    bare = re.compile(r": vectormill [a-z]+ (?![a-z]+ )|(?<!Example): vectormill [a-z]+ ")
    assert [each.place for each in SENTENCES if bare.search(each.text)] == []


def test_settings_in_sentences_and_pages_exist() -> None:
    known = find_settings()
    unknown = {(each.place, name) for each in [*SENTENCES, *PROSE] for name in SETTING.findall(each.text)}
    assert {(place, name) for place, name in unknown if name not in known} == set()


def list_options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from list_options(below)


def test_options_in_sentences_exist() -> None:
    known = {*list_options(typer.main.get_command(app)), "--help"}
    named = {
        (each.place, option)
        for each in SENTENCES
        if len(each.text.split()) > 2
        for option in OPTION.findall(re.sub("`(python -m|docker) [^`]*`", "", each.text))
    }
    assert len(named) > 50
    assert {(place, option) for place, option in named if option not in known} == set()


def test_paths_in_sentences_and_pages_exist() -> None:
    document = create_app(Settings.model_construct(), create_engine(NOWHERE)).openapi()
    known = {
        (method.upper(), re.sub(r"\{[^}]*\}", "{}", path))
        for path, methods in document["paths"].items()
        for method in methods
    }
    for sentence in [*SENTENCES, *PROSE]:
        for method, path in PATH.findall(sentence.text):
            general = re.sub(rf"\{{[^}}]*\}}|(?<=/){FIELD}(?=/|$)", "{}", path)
            if not general.endswith("{}/{}"):  # the results of a job, by their kind
                assert (method, general) in known, f"{sentence.place}: {method} {path}"


def test_a_sentence_names_no_page_because_a_wheel_has_none() -> None:
    assert [each.place for each in SENTENCES if PAGE.search(each.text)] == []


def test_sentences_are_found_in_all_kinds_of_strings() -> None:
    code = 'def f(name, option):\n    """See `vectormill up`."""\n    return f"run `vectormill status {name}{option}`"'
    (found,) = find_strings("f.py", ast.parse(code))
    assert list(found.list_commands()) == [["status", FIELD]]
    assert list(Sentence("a.html", 1, "<code>vectormill keys create NAME</code>").list_commands()) == [
        ["keys", "create", FIELD]
    ]
