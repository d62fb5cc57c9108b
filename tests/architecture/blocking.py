"""The client that blocks, made from the asynchronous one by replacing words; what is more than words is in `flow`."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.architecture.sources import ROOT

SOURCE: Final = "vectormill/client/aio"
MADE: Final = "vectormill/client/sync"
BY_HAND: Final = "flow.py"
WORDS: Final = (
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAwaitable\[([^\[\]]*)\]", r"\1"),
    (r"AsyncIterable\[(\w+)\] \| Iterable\[\1\]", r"Iterable[\1]"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\ba(close|read|next|iter_bytes)\b", r"\1"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\bvectormill\.client\.aio\b", "vectormill.client.sync"),
    (r"\bfor_aio\b", "for_sync"),
)
NOTE: Final = "# Made of the same file in `aio` by `python -m tests.architecture.derived`: change that one.\n"


def list_files() -> tuple[str, ...]:
    """Of the asynchronous client those that are translated, by their path below it."""
    folder = ROOT / SOURCE
    return tuple(
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != BY_HAND)
    )


def make_blocking(file: str) -> str:
    text = (ROOT / SOURCE / file).read_text(encoding="utf-8")
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    return arrange(NOTE + text, Path(MADE) / file)


def arrange(text: str, path: Path) -> str:
    """The text as the linter wants imports and lines."""
    ruff = (sys.executable, "-m", "ruff")
    for command in (("check", "--select", "I,F401", "--fix-only", "--quiet"), ("format", "--quiet")):
        text = subprocess.run(
            [*ruff, *command, "--stdin-filename", str(path), "-"],
            input=text, capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout  # fmt: skip
    return text
