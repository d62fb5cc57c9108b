"""What the product tells people to do: the commands, settings and options in its sentences.

A sentence is a string of the product that is no docstring, or a line of a template of the console, or the text of a
page beside its fenced blocks. Fields of f-strings and templates are replaced by `FIELD`.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tests.architecture.sources import PACKAGES, ROOT, find_sources, parse
from tests.docs.pages import COMMAND, find_pages, split_words

FIELD: Final = "1"  # the command line can read it as the name of anything, and as a number
QUOTED: Final = re.compile(r"`(?:[A-Z_]+=\S* )*vectormill ([^`…]+)…?`|<code>vectormill ([^<]+)</code>")
# A word in capitals, or several with | between them, stands for a value.
PLACEHOLDER: Final = re.compile(r"\b[A-Z]{2,}(\\?\|[A-Z]+)*\b|\b[A-Z]\b")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence and the file that it is in."""

    file: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    def list_commands(self) -> Iterator[list[str]]:
        """Yield the words of each quoted command after the program's name, with `FIELD` for what it depends on."""
        for found in QUOTED.finditer(" ".join(self.text.split())):
            yield split_words(PLACEHOLDER.sub(FIELD, found[1] or found[2]))

    def list_examples(self) -> Iterator[list[str]]:
        """Yield the words of each command that begins a line, as the examples of a help text do."""
        for line in re.sub("^Examples?: ", "", self.text).split("\n"):
            if (found := COMMAND.search(line.strip())) is not None and not QUOTED.search(line):
                yield split_words(found["rest"])


def find_sentences() -> Iterator[Sentence]:
    """Yield the sentences of the product: those that it prints or answers."""
    for path in find_sources(*PACKAGES):
        yield from find_strings(path.as_posix(), parse(path))
    for template in sorted((ROOT / "api/console/templates").rglob("*.html")):
        text = re.sub(r"\{\{.*?\}\}", FIELD, template.read_text(encoding="utf-8"))
        for number, line in enumerate(text.split("\n"), 1):
            yield Sentence(template.name, number, line)


def find_prose() -> Iterator[Sentence]:
    """Yield the text of each page beside its fenced blocks."""
    for page in find_pages():
        text = page.read_text(encoding="utf-8")
        yield Sentence(page.name, 1, re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def find_strings(file: str, tree: ast.AST) -> Iterator[Sentence]:
    """Yield the strings of a module but its docstrings, names of connections and formats, and parts of f-strings."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg == "application_name"):
            skipped.add(node.value)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ("APPLICATION_NAME", "FORMAT"):
            skipped.add(node.value or node)
        elif isinstance(node, ast.JoinedStr) and node not in skipped:
            skipped.update(each for value in node.values for each in ast.walk(value))
            text = "".join(
                str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values
            )
            # What is joined to a word or a closed quotation mark are further options, or nothing.
            yield Sentence(file, node.lineno, re.sub(r'(?<=[\w"\0])\0', "", text).replace("\0", FIELD))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield Sentence(file, node.lineno, node.value)
