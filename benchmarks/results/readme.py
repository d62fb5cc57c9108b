"""The README's measured sections: replaced whole, between their markers. What stands around them is written by hand."""

from pathlib import Path
from typing import Final

README: Final = Path(__file__).resolve().parents[1] / "README.md"


def opening_marker(name: str) -> str:
    return f"<!-- {name}: written by --write -->"


def closing_marker(name: str) -> str:
    return f"<!-- end of {name} -->"


def replace_section(text: str, name: str, content: str) -> str:
    """The text with new content between the markers of one benchmark. Raises ValueError when they are not there."""
    opening, closing = opening_marker(name), closing_marker(name)
    before, has_opening, rest = text.partition(opening)
    _, has_closing, after = rest.partition(closing)
    if not has_opening or not has_closing:
        raise ValueError(f"The README has no place for {name}: it needs the lines {opening} and {closing}.")
    return f"{before}{opening}\n\n{content.strip()}\n\n{closing}{after}"


def write_section(name: str, content: str, path: Path = README) -> None:
    """Replaces one section of the file."""
    path.write_text(replace_section(path.read_text(encoding="utf-8"), name, content), encoding="utf-8")
