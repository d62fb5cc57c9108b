"""Generate the blocking client from the asynchronous one: `python -m tools.client`.

`vectormill/client/sync` is generated from `vectormill/client/aio` by replacing words; what differs by more
than words is in `flow`. A test generates it again and compares.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ASYNC: Final = "vectormill/client/aio"
BLOCKING: Final = "vectormill/client/sync"
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
NOTE: Final = "# Made of the same file in `aio` by `python -m tools.client`: change that one.\n"


def list_files() -> tuple[str, ...]:
    """Return the files of the asynchronous client that are translated, as paths relative to its folder."""
    folder = ROOT / ASYNC
    return tuple(
        sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != BY_HAND)
    )


def make_blocking(file: str) -> str:
    text = (ROOT / ASYNC / file).read_text(encoding="utf-8")
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    return arrange(NOTE + text, Path(BLOCKING) / file)


def arrange(text: str, path: Path) -> str:
    """Return the text with imports sorted and lines formatted by ruff."""
    ruff = (sys.executable, "-m", "ruff")
    for command in (("check", "--select", "I,F401", "--fix-only", "--quiet"), ("format", "--quiet")):
        text = subprocess.run(
            [*ruff, *command, "--stdin-filename", str(path), "-"],
            input=text, capture_output=True, text=True, check=True, cwd=ROOT,
        ).stdout  # fmt: skip
    return text


def make_files() -> dict[str, str]:
    """Return the text of every generated file by its path from the repository root."""
    return {f"{BLOCKING}/{file}": make_blocking(file) for file in list_files()}


def main() -> None:
    for file, text in make_files().items():
        (ROOT / file).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
