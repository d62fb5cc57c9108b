"""Corpus: every docstring of the running Python's standard library, found by reading its source.

Some 8,700 real texts that every machine has: the demo, the tests and the benchmarks encode them. Imports nothing of
what it reads, and knows nothing of jobs.
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

# Python's own tests and what was installed besides; `lib2to3` is gone since 3.13.
LEFT_OUT: Final = ("test", "idlelib/idle_test", "lib2to3/tests", "site-packages", "dist-packages")


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Docstring:
    """One docstring. `key` is the qualified name of what it documents: `module.Class.method`."""

    key: str
    text: str


def standard_library() -> Path:
    """Return the directory of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_docstrings(directory: Path | None = None) -> Iterator[Docstring]:
    """Yield every docstring below the directory, folder by folder in alphabetical order, from top to bottom.

    A name that is defined again (under another condition, or as a property's setter) gets `#2`, `#3`, … Files that
    this Python cannot parse (some packages carry such) are passed over. Empty docstrings are none.
    """
    root = standard_library() if directory is None else directory
    for path in _source_files(root):
        yield from _read_module(path, _module_name(path.relative_to(root)))


def split_first_sentence(text: str) -> tuple[str, str]:
    """Return the first sentence in one line, without its full stop, and the rest, which may be empty."""
    paragraph, _, paragraphs = text.strip().partition("\n\n")
    sentence, _, sentences = " ".join(paragraph.split()).partition(". ")
    return sentence.removesuffix("."), f"{sentences}\n\n{paragraphs}".strip()


def take_evenly(values: Sequence[T], count: int) -> list[T]:
    """Return `count` values in their order, equally far apart; all of them when there are no more."""
    if count >= len(values):
        return list(values)
    return [values[number * len(values) // count] for number in range(count)]


def _source_files(root: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(root):
        folder = Path(name)
        # Pruned here, not filtered afterwards: site-packages may hold a hundred thousand files.
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
            warnings.simplefilter("ignore")  # invalid escapes in what others wrote
            tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError):
        return
    num_seen: Counter[str] = Counter()
    for key, text in _walk(tree, module):
        num_seen[key] += 1
        yield Docstring(key if num_seen[key] == 1 else f"{key}#{num_seen[key]}", text)


def _walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield qualified names and docstrings below a node, in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text and text.strip():
            yield name, text
    # Statements hold statements in these lists alone; expressions, most of a tree, define nothing with a docstring.
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(node, field, ()):
            is_definition = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _walk(child, f"{name}.{child.name}" if is_definition else name)
