"""Source options: what the flags of `vectormill sources set` say, as the API takes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vectormill.domain.errors import InvalidOption

# With which a query begins.
QUERY_WORDS: Final = ("SELECT", "WITH", "TABLE", "VALUES")


def choose_kind(said: Mapping[str, Mapping[str, Any] | None]) -> tuple[str, dict[str, Any]]:
    """The one kind that options were given of, and those of them that were given. Raises InvalidOption."""
    given = {kind: options for kind, options in said.items() if options is not None}
    if len(given) != 1:
        raise InvalidOption("Name one source: --sql, --files, --tree, --push or --own-texts.")
    ((kind, options),) = given.items()
    return kind, {name: value for name, value in options.items() if value not in (None, [])}


def read_source(
    where: str,
    *,
    key: str | None,
    text: str | None,
    metadata: list[str] | None,
    text_pair: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Kind and options of a source that is said in a word: a query by its first one, a folder by being one."""
    columns = {"key": key, "text": text, "text_pair": text_pair, "metadata": metadata}
    words = where.split(None, 1)
    is_query = len(words) > 1 and words[0].upper() in QUERY_WORDS
    is_tree = not is_query and (where.endswith("/") or Path(where).expanduser().is_dir())
    return choose_kind(
        {
            "sql": {"query": where, **columns, "key": key or "key", "text": text or "text"}
            if is_query
            else None,
            "tree": {"folder": absolute(where)} if is_tree else None,
            "files": None if is_query or is_tree else {"files": [absolute(where)], **columns},
        }
    )


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
