"""The project's own Python files, and what can be read from them without running them."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PACKAGES = ("api", "indexer", "scheduler", "vectormill", "worker")
FOLDERS = (*PACKAGES, "alembic", "benchmarks", "deploy", "tests")


def find_sources(*folders: str) -> list[Path]:
    """Every .py file below the folders, all of the project's when none is named; relative to the root, in order."""
    found = sorted(
        path.relative_to(ROOT) for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py")
    )
    assert found, f"there is no Python file in {folders or FOLDERS}"
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def find_imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of the modules that a file, or a part of one, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide which layer is imported"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def find_import_time_imports(tree: ast.Module) -> Iterator[str]:
    """Only what is imported when the file itself is: neither in a function nor for the type checker alone."""
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
