"""Options: the flags that several commands share, each explained once. Knows no command."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

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
Format = Literal["parquet", "ndjson", "npy"]

Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="A registered model; see `vectormill models`.", show_default=False
    ),
]
Collection = Annotated[
    str | None,
    typer.Option(
        "--collection", metavar="NAME", help="Keep the vectors under this name, for search and SQL."
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
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Input that is not UTF-8 ends the command; else that item alone fails."),
]
Normalize = Annotated[
    bool | None,
    typer.Option(
        "--normalize/--no-normalize",
        help="Vectors of length 1; else as the model has it.",
        show_default=False,
    ),
]
Dimensions = Annotated[
    int | None,
    typer.Option("--dimensions", metavar="N", min=1, help="Keep only so many leading values (Matryoshka)."),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", metavar="TEXT", help="A prompt of the model by name, or text to put before every item."
    ),
]
MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Read so many tokens at once.")
]
LongTexts = Annotated[
    Literal["truncate", "fail", "passages"] | None,
    typer.Option(
        "--long-texts",
        help="Texts longer than the model reads: cut them, fail them one by one, or average their passages.",
        show_default="truncate",
    ),
]
PassageOverlap = Annotated[
    int | None,
    typer.Option(
        "--passage-overlap",
        metavar="N",
        min=0,
        help="Tokens that neighbouring passages share; else an eighth of a passage.",
    ),
]
Truncate = Annotated[
    bool | None,
    typer.Option(
        "--truncate/--no-truncate", help="The older name of --long-texts truncate or fail.", hidden=True
    ),
]
VectorType = Annotated[
    Literal["float32", "float16", "int8", "binary"] | None,
    typer.Option(
        "--vector-type",
        help="The numbers of a vector; else float16 in a collection, float32 without one.",
        show_default=False,
    ),
]

Metadata = Annotated[
    str | None,
    typer.Option("--metadata", metavar="JSON", help="An object to keep with the job, to find it by."),
]


def parse_metadata(text: str | None) -> dict[str, Any] | None:
    """The object that --metadata gives. Raises InvalidOption."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InvalidOption(f"--metadata is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidOption('--metadata must be a JSON object, as {"source": "arxiv"}.')
    return value
