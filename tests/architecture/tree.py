"""Print the folders with their lines of code, as `make check` does: `python -m tests.architecture.tree`."""

from collections import Counter
from pathlib import Path
from typing import Final

from tests.architecture.sources import FOLDERS, ROOT, find_sources

DEPTH: Final = 2


def count_lines(folders: tuple[str, ...] = FOLDERS) -> Counter[Path]:
    """Count the lines of Python by folder, including the folders below it, down to DEPTH."""
    lines: Counter[Path] = Counter()
    for path in find_sources(*folders):
        num_lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for depth in range(1, min(DEPTH, len(path.parts) - 1) + 1):
            lines[Path(*path.parts[:depth])] += num_lines
    return lines


def main() -> None:
    lines = count_lines()
    for top in sorted(folder for folder in lines if len(folder.parts) == 1):
        parts = ", ".join(
            f"{folder.name} {lines[folder]:,}" for folder in sorted(lines) if folder.parent == top
        )
        print(f"{lines[top]:>7,}  {top}" + (f": {parts}" if parts else ""))
    print(f"{sum(lines[folder] for folder in lines if len(folder.parts) == 1):>7,}  lines of Python")


if __name__ == "__main__":
    main()
