"""Count the places that commits changed: `python -m tests.architecture.changes`, or with commits to count instead.

Without arguments the commits are those of the table in docs/CHANGES.md, and what is printed is that table.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Final

from tests.architecture.sources import DOCS, PACKAGES, ROOT
from tests.architecture.tree import GENERATED

PAGE: Final = DOCS / "CHANGES.md"
ROW: Final = re.compile(r"^\| `([0-9a-f]{8})` \|.*\|$", re.MULTILINE)
HEAD: Final = (
    "| commit | subject | files of product | hunks | files of docs and settings | hunks | files of tests | hunks |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)
PARTS: Final = ("product", "docs and settings", "tests")


def find_part(path: str) -> str | None:
    """Return the part of the repository that a file belongs to, or None for a generated file."""
    if path.startswith(GENERATED) or path == "requirements.lock":
        return None
    top = path.partition("/")[0]
    if top in PACKAGES or top == "alembic":
        return "product"
    return "tests" if top in ("tests", "benchmarks") else "docs and settings"


def count_hunks(diff: str) -> dict[str, Counter[str]]:
    """Return the hunks of a diff by part and file. A new file is one hunk."""
    hunks: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    file = ""
    for line in diff.splitlines():
        if line.startswith("diff --git "):
            file = line.rpartition(" b/")[2]
        elif line.startswith("@@ ") and (part := find_part(file)):
            hunks[part][file] += 1
    return hunks


def git(*words: str) -> str:
    return subprocess.run(("git", *words), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def make_row(commit: str) -> str:
    subject = git("show", "--no-patch", "--format=%s", commit).strip()
    hunks = count_hunks(git("show", "--format=", "--unified=3", "--no-renames", commit))
    numbers = [number for part in PARTS for number in (len(hunks[part]), hunks[part].total())]
    return f"| `{commit}` | {subject} | {' | '.join(map(str, numbers))} |"


def make_table(commits: Iterable[str]) -> str:
    return "\n".join([HEAD, *map(make_row, commits)])


def list_commits() -> list[str]:
    """Return the commits of the page's table."""
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    print(make_table(sys.argv[1:] or list_commits()))
