"""The docstrings of the running Python's standard library, read from its source, as a corpus of texts.

The demo, the tests and the benchmarks encode these 8,700 real texts, which every machine has. The modules are
parsed and not imported.
"""

import ast
import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

# Folders to skip: Python's own tests and installed packages. `lib2to3` was removed in 3.13.
LEFT_OUT: Final = ("test", "idlelib/idle_test", "lib2to3/tests", "site-packages", "dist-packages")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Docstring:
    """A docstring. `key` is the qualified name of the documented object: `module.Class.method`."""

    key: str
    text: str


def read_docstrings(directory: Path | None = None) -> Iterator[Docstring]:
    """Yield every docstring below the directory, folder by folder in alphabetical order, from top to bottom.

    A name that is defined again (under another condition, or as a property's setter) gets `#2`, `#3`, … Files
    that this Python cannot parse, which some packages contain, and empty docstrings are skipped.
    """
    root = Path(sysconfig.get_path("stdlib")) if directory is None else directory
    for path in _source_files(root):
        yield from _read_module(path, _module_name(path.relative_to(root)))


def take_evenly(values: Sequence[T], count: int) -> list[T]:
    """Return `count` evenly spaced values, in their order; all values if there are no more than `count`."""
    if count >= len(values):
        return list(values)
    return [values[number * len(values) // count] for number in range(count)]


def _source_files(root: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(root):
        folder = Path(name)
        # Prune folders instead of filtering files: site-packages may hold a hundred thousand files.
        folders[:] = sorted(
            child for child in folders if (folder / child).relative_to(root).as_posix() not in LEFT_OUT
        )
        yield from (folder / file for file in sorted(files) if file.endswith(".py"))


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _read_module(path: Path, module: str) -> Iterator[Docstring]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the files may contain invalid escapes
            tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError):
        return
    num_seen: Counter[str] = Counter()
    for key, text in _walk(tree, module):
        num_seen[key] += 1
        yield Docstring(key if num_seen[key] == 1 else f"{key}#{num_seen[key]}", text)


def _walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield the qualified names and docstrings below a node, in source order."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield name, text
    # Only these fields contain statements. Expressions, most of a tree, contain no docstrings.
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            is_definition = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _walk(child, f"{name}.{child.name}" if is_definition else name)
