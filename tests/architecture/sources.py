"""The project's own Python files, and facts that can be read from them without running them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PACKAGES = ("api", "indexer", "scheduler", "vectormill", "worker")
# Folders that hold all of one feature, its SQL too (decision 0049).
FEATURES = (
    "vectormill/batches", "vectormill/collections", "vectormill/jobs", "vectormill/keys", "vectormill/objects",
    "vectormill/quotes", "vectormill/runs", "vectormill/schedules", "vectormill/search", "vectormill/sources",
    "vectormill/webhooks", "vectormill/workers",
)  # fmt: skip
FOLDERS = (*PACKAGES, "alembic", "benchmarks", "deploy", "examples", "tests", "tools")


def find_sources(*folders: str) -> list[Path]:
    """Return every .py file below the folders, or of the whole project, sorted and relative to the root."""
    found = sorted(
        path.relative_to(ROOT) for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py")
    )
    assert found, f"there is no Python file in {folders or FOLDERS}"
    return found


@cache
def read_source(path: Path) -> str:
    """Return the text of a file of the project; the path is relative to the root."""
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of a file of the project. It is shared between callers: do not change it."""
    return ast.parse(read_source(path), filename=str(path))


@cache
def find_imports_of(path: Path) -> frozenset[str]:
    """Return the dotted names of all modules that a file imports, inside its functions too."""
    return frozenset(find_imports(parse(path)))


def find_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names of the modules that a file, or a part of one, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide which layer is imported"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_import_time_imports(tree: ast.Module) -> Iterator[str]:
    """Yield the modules imported when the file is: neither those in functions nor those for type checkers."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from find_imports(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))
