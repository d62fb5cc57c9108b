"""Options: the flags that several commands share, each explained once. Knows no command."""

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from vectormill.domain.errors import InvalidOption

ApiUrl = Annotated[
    str | None,
    typer.Option(
        "--api-url",
        metavar="URL",
        help="The API to speak to; else VECTORMILL_API_URL, else the stack of the data directory.",
        show_default=False,
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="Where the embedded stack keeps its files; else VECTORMILL_DATA_DIR, else ~/.vectormill.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines on stdout.")]
NewestFirst = Annotated[
    int, typer.Option("--limit", metavar="N", min=1, help="At most so many, newest first.")
]

Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="A registered model; see `vectormill models`.", show_default=False
    ),
]
Collection = Annotated[
    str | None,
    typer.Option(
        "--collection", metavar="NAME", help="Keep the results under this name, for search and SQL."
    ),
]
Priority = Annotated[
    int, typer.Option("--priority", metavar="N", min=0, max=9, help="0 is the most urgent, 9 the least.")
]
KeyField = Annotated[
    str | None,
    typer.Option(
        "--key-field",
        metavar="FIELD",
        help="The field with the key; else key, else id, else the line number.",
    ),
]
TextField = Annotated[str, typer.Option("--text-field", metavar="FIELD", help="The field with the text.")]
PairField = Annotated[
    str,
    typer.Option(
        "--pair-field", metavar="FIELD", help="The field with a second text, in rows that are pairs."
    ),
]
TextPair = Annotated[
    str | None,
    typer.Option("--text-pair", metavar="COLUMN", help="With the second text, where rows are pairs."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Input that is not UTF-8 ends the command; else that item alone fails."),
]
Metadata = Annotated[
    str | None,
    typer.Option("--metadata", metavar="JSON", help="An object to keep with the job, to find it by."),
]


def refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity, which Python's reader takes and JSON does not know."""
    raise ValueError(f"{name} is no number of JSON")


def parse_metadata(text: str | None) -> dict[str, Any] | None:
    """The object that --metadata gives. Raises InvalidOption."""
    if text is None:
        return None
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise InvalidOption(f"--metadata is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidOption('--metadata must be a JSON object, as {"source": "arxiv"}.')
    return value
