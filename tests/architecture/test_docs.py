"""What a user can meet (a setting, a metric, an error, a state) stands in the docs, and the docs name nothing else."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import vectormill.domain
import vectormill.domain.errors
from tests.architecture.sources import DOCS, PACKAGES, ROOT, find_sources, parse
from vectormill.cli.app import main
from vectormill.domain.errors import VectormillError
from vectormill.jobs.item import ITEM_ERROR_CODES

CODE = re.compile(r"`([^`\n]+)`")
# A block that shows a command and what it prints; a line of … stands for lines that are left out.
SHOWN = re.compile(r"^```\n\$ vectormill (plan .*)\n([^`]*)^```$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
# A file or folder of tests, or a test, which `::` says to be in the file named before it in the line.
NAMED_TEST = re.compile(r"(?P<path>tests/[\w/]+(?:\.py)?)|(?P<mark>::)?(?P<name>test_\w+)")


def read_doc(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def find_plans() -> Mapping[str, Sequence[str]]:
    """Return what the pages show of each plan, by the arguments that make it; some show it in short, some whole."""
    plans: dict[str, list[str]] = {}
    for arguments, shown in SHOWN.findall(read_doc("PLANS.md")):
        plans.setdefault(arguments, []).append(shown)
    return plans


PLANS = find_plans()


def find_words(name: str) -> set[str]:
    """Everything a page sets in code type."""
    return set(CODE.findall(read_doc(name)))


def find_error_names() -> set[str]:
    """Every class that descends from VectormillError, wherever it stands."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for path in find_sources(*PACKAGES)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
    }
    errors = {VectormillError.__name__}
    while found := {name for name, parents in bases.items() if parents & errors} - errors:
        errors |= found
    return errors


def find_error_codes() -> set[str]:
    """The last parts of problem types, and the codes of item errors."""
    kinds = vars(vectormill.domain.errors).values()
    errors = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, VectormillError)]
    return {error.code for error in errors} | set(ITEM_ERROR_CODES)


def test_every_error_is_explained_to_whoever_meets_it() -> None:
    errors = find_error_names()
    assert {"VectormillError", "LeaseLost", "ApiError"} <= errors
    assert errors <= find_words("ERRORS.md")


def test_every_stable_code_is_explained() -> None:
    assert find_error_codes() <= find_words("ERRORS.md")


@pytest.mark.parametrize("arguments", sorted(PLANS))
def test_the_docs_show_the_plans_that_are_made(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit):
        main(arguments.split())
    printed = capsys.readouterr()
    for shown in PLANS[arguments]:
        rest = printed.out + printed.err
        for part in filter(None, shown.split("…\n")):
            assert part in rest
            rest = rest.partition(part)[2]
        assert "…" in shown or not rest


def test_every_link_leads_to_a_file() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert broken == [], "correct the link, or add the file"


@functools.cache
def find_names(path: Path) -> set[str]:
    """Return the functions of a file of tests, and the names that its module assigns, such as state machines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return functions | {
        ast.unparse(target) for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    }


def find_lost_tests(page: Path) -> Iterator[str]:
    """Yield what a page says of tests that is not so. Only the page of faults has to name the file of each test."""
    for number, line in enumerate(page.read_text(encoding="utf-8").split("\n"), start=1):
        path = ROOT
        for named in NAMED_TEST.finditer(line):
            if named["path"]:
                path = ROOT / named["path"]
                is_there = path.exists()
            else:
                is_there = path.is_file() and named["name"] in find_names(path)
                is_there |= named["mark"] is None and page.name != "FAULTS.md"
            if not is_there:
                yield f"{page.name}:{number}: {named[0]}"


def test_every_test_that_a_page_names_is_there() -> None:
    """All pages but the log, which quotes what was once true."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
    lost = [said for page in pages if page.name != "LOG.md" for said in find_lost_tests(page)]
    assert lost == [], "name the test that fails today if the fix is removed, or bring the test back"


def find_folders_of_the_tree() -> set[str]:
    """Folders that the tree in DEVELOPMENT names, with the one above them."""
    tree = read_doc("DEVELOPMENT.md").partition("## Repository layout\n\n```\n")[2].partition("\n```")[0]
    found, top = set(), ""
    for line in tree.split("\n"):
        names = re.findall(
            r"(?<!\S)([a-z_]+)/(?= )", re.split(r"    |(?<=/) {2,}(?=[a-zA-Z])", line.lstrip())[0] + " "
        )
        if not line.startswith(" "):
            top = names[0]
        found |= {f"{top}/{name}" if line.startswith(" ") else name for name in names}
    return found


def test_the_tree_names_the_folders_that_there_are() -> None:
    code = {
        path
        for name in ("vectormill", "worker")
        for path in (ROOT / name).iterdir()
        if (path / "__init__.py").exists()
    }
    tops = {"alembic", "benchmarks", "deploy", "docs", "examples", "tests", "tools", *PACKAGES}
    assert find_folders_of_the_tree() == tops | {path.relative_to(ROOT).as_posix() for path in code}
