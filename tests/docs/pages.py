"""The fenced blocks of the pages, and the commands in them."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.architecture.sources import DOCS, ROOT

BLOCK: Final = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n)?^(?P<fence>```)(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND: Final = re.compile(
    r"(?:^|[;|(]\s*|&&\s*)(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/)?vectormill (?P<rest>[a-z].*)$"
)
WHOLE_PAGE: Final = re.compile(r"^<!-- nothing of this page is run: (?P<why>.+?) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its language, its text, and why it is not run, if a comment before it says so."""

    page: str
    line: int
    language: str
    code: str
    why_not: str | None

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def find_pages() -> list[Path]:
    """Return the README and the pages of docs/ but the log, which quotes what was once true, and the decisions."""
    return [ROOT / "README.md", *sorted(page for page in DOCS.glob("*.md") if page.name != "LOG.md")]


def find_blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page. A reason why the whole page is not run is that of all its blocks."""
    content = page.read_text(encoding="utf-8")
    whole = WHOLE_PAGE.search(content)
    for found in BLOCK.finditer(content):
        line = content.count("\n", 0, found.start("fence")) + 1
        yield Block(
            page.name, line, found["language"], found["code"], found["why"] or (whole and whole["why"])
        )


def find_commands(block: Block) -> Iterator[Sequence[str]]:
    """Yield the arguments of each `vectormill` command of a block."""
    for line in block.code.replace("\\\n", " ").split("\n"):
        for part in re.split(r"(?<=\S); (?=vectormill)", line):
            if found := COMMAND.search(part):
                yield split_words(found["rest"])


def split_words(command: str) -> list[str]:
    """Return the words of a command, up to a comment, a pipe or another command."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("();<>|&"):
            break
        words.append(word)
    return words
