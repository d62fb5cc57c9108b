"""Source options: what the flags of `vectormill sources set` say, as the API takes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vectormill.domain.errors import InvalidOption


def choose_kind(said: Mapping[str, Mapping[str, Any] | None]) -> tuple[str, dict[str, Any]]:
    """The one kind that options were given of, and those of them that were given. Raises InvalidOption."""
    given = {kind: options for kind, options in said.items() if options is not None}
    if len(given) != 1:
        raise InvalidOption("Name one source: --sql, --files, --tree, --push or --own-texts.")
    ((kind, options),) = given.items()
    return kind, {name: value for name, value in options.items() if value not in (None, [])}


def absolute(name: str) -> str:
    """A local path from the root, as another process has another working directory; a URL as it is."""
    return name if "://" in name else str(Path(name).expanduser().absolute())


def parse_split(how: str | None) -> dict[str, Any]:
    """`paragraphs`, `paragraphs:200:1500`, `tokens:256`, `tokens:256:32` or `none`. Raises InvalidOption."""
    if how in (None, "none"):
        return {}
    by, *numbers = how.split(":")
    names = {"paragraphs": ("min_chars", "max_chars"), "tokens": ("tokens", "overlap")}.get(by, ())
    if not names or len(numbers) > len(names) or not all(number.isdecimal() for number in numbers):
        raise InvalidOption(
            f"{how!r} is no way to split: give paragraphs, paragraphs:MIN:MAX (characters), tokens:N or "
            "tokens:N:OVERLAP."
        )
    return {"by": by, **dict(zip(names, map(int, numbers), strict=False))}
