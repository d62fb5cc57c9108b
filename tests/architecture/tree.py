"""Print the folders with their lines of code and the figures of the product's structure, as `make check` does.

`python -m tests.architecture.tree REVISION` compares the structure with that of an older commit.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Final

from tests.architecture.sources import FOLDERS, PACKAGES, ROOT, find_imports, find_sources

DEPTH: Final = 2
GENERATED: Final = "vectormill/client/sync/"  # by `python -m tools.client`
MAX_HELPER_LINES: Final = 8
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Product:
    """The Python files of the product, by path; what is generated is left out."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self.sources = {path: text for path, text in sources.items() if not path.startswith(GENERATED)}
        self.trees = {path: ast.parse(text, filename=path) for path, text in self.sources.items()}
        self.functions: list[Function] = [
            node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, Function)
        ]

    def find_helpers(self) -> list[str]:
        """Return the names of short functions that occur once in the whole product beside their definition.

        Decorated functions and methods with a name of the language's own, such as `__exit__`, have other callers.
        """
        words = Counter(word for text in self.sources.values() for word in re.findall(r"\w+", text))
        return [
            function.name
            for function in self.functions
            if words[function.name] == 2
            and not function.decorator_list
            and not function.name.startswith("__")
            and count_function_lines(function) <= MAX_HELPER_LINES
        ]

    def find_circle(self) -> list[str]:
        """Return the modules of one circle of imports, or an empty list if there is none."""
        modules = {path.removesuffix(".py").replace("/", "."): tree for path, tree in self.trees.items()}
        graph = {name: set(find_imports(tree)) & modules.keys() for name, tree in modules.items()}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle: list[str] = error.args[1]
            return circle
        return []


def count_function_lines(function: Function) -> int:
    """Count the lines of a function with its docstring, without its decorators."""
    assert function.end_lineno
    return function.end_lineno - function.lineno + 1


def is_one_statement(function: Function) -> bool:
    return len(function.body) - (ast.get_docstring(function) is not None) == 1


FIGURES: Final[Mapping[str, Callable[[Product], float]]] = {
    "lines of product": lambda product: sum(map(len, map(str.splitlines, product.sources.values()))),
    "files": lambda product: len(product.sources),
    "functions": lambda product: len(product.functions),
    "lines of a function, median": lambda product: median(map(count_function_lines, product.functions)),
    "functions of one statement": lambda product: sum(map(is_one_statement, product.functions)),
    f"helpers of up to {MAX_HELPER_LINES} lines with one use": lambda product: len(product.find_helpers()),
    "modules in circles of imports": lambda product: len(product.find_circle()),
}


def read_product() -> Product:
    """Return the product as it is in the working tree."""
    return Product({str(path): (ROOT / path).read_text(encoding="utf-8") for path in find_sources(*PACKAGES)})


def read_older_product(revision: str) -> Product:
    """Return the product of a commit; git reports an unknown one."""
    command = ("git", "archive", revision, "--", *PACKAGES)
    archive = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        return Product(
            {
                member.name: content.read().decode()
                for member in files
                if member.name.endswith(".py") and (content := files.extractfile(member))
            }
        )


def count_lines(folders: tuple[str, ...] = FOLDERS) -> Counter[Path]:
    """Count the lines of Python by folder, including the folders below it, down to DEPTH."""
    lines: Counter[Path] = Counter()
    for path in find_sources(*folders):
        num_lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for depth in range(1, min(DEPTH, len(path.parts) - 1) + 1):
            lines[Path(*path.parts[:depth])] += num_lines
    return lines


def main(revisions: list[str]) -> None:
    lines = count_lines()
    for top in sorted(folder for folder in lines if len(folder.parts) == 1):
        parts = ", ".join(
            f"{folder.name} {lines[folder]:,}" for folder in sorted(lines) if folder.parent == top
        )
        print(f"{lines[top]:>7,}  {top}" + (f": {parts}" if parts else ""))
    print(f"{sum(lines[folder] for folder in lines if len(folder.parts) == 1):>7,}  lines of Python")
    products = [*map(read_older_product, revisions), read_product()]
    for figure, measure in FIGURES.items():
        print(" → ".join(f"{measure(product):>7,.0f}" for product in products), "", figure)


if __name__ == "__main__":
    main(sys.argv[1:])
