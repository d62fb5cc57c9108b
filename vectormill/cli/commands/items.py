"""Items of a collection: put, get and delete one by one."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vectormill.cli.options import Json, with_client

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer(
    no_args_is_help=True,
    epilog='Example: vectormill items put docs readme "How to begin."',
    help="Put, get and delete single items of a collection.",
)

Collection = Annotated[str, typer.Argument(metavar="COLLECTION")]
Key = Annotated[
    str, typer.Argument(metavar="KEY", help="The item's key. May contain any characters, slashes too.")
]


@app.command(
    epilog='Example: vectormill items put docs readme "How to begin." --metadata \'{"lang": "en"}\'\n\n'
    "A text that begins with a dash stands behind --; that of a file comes by TEXT -: … put docs readme - < README.md"
)
@with_client
def put(
    client: "Client",
    collection: Collection,
    key: Key,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text, or - to read it from stdin.")],
    pair: Annotated[
        str | None,
        typer.Option("--pair", metavar="TEXT", help="The second text of a pair, in a collection of scores."),
    ] = None,
    metadata: Annotated[
        str | None, typer.Option("--metadata", metavar="JSON", help="A JSON object to keep with the result.")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            max=60,
            help="Wait at most so long until the item is searchable.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Encode a text, or score a pair, and store the result under the key."""
    from vectormill.cli.options import parse_metadata
    from vectormill.cli.views.listing import print_json

    found = parse_metadata(metadata)
    content = sys.stdin.read() if text == "-" else text
    answer = client.put_item(collection, key, content, text_pair=pair, metadata=found, wait_seconds=wait)
    if json:
        print_json(answer)
    elif answer["is_searchable"]:
        typer.echo(f"{key} is searchable in {collection}.", err=True)
    else:
        typer.echo(
            f"{key} is not searchable yet; `vectormill status {answer['job']}` tells why and when.", err=True
        )


@app.command(epilog="Example: vectormill items get docs readme --vector")
@with_client
def get(
    client: "Client",
    collection: Collection,
    key: Key,
    vector: Annotated[bool, typer.Option("--vector", help="Print its vector too.")] = False,
) -> None:
    """Print the collection's item with this key as JSON."""
    from vectormill.cli.views.listing import print_json

    print_json(client.get_item(collection, key, has_vector=vector))


@app.command(
    epilog="Example: vectormill items delete docs readme licence\n\n"
    "Many: vectormill items delete docs --from keys.txt, a key a line; - is stdin."
)
@with_client
def delete(
    client: "Client",
    collection: Collection,
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", show_default=False)] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Read further keys from a file, one per line."),
    ] = None,
    json: Json = False,
) -> None:
    """Delete the items with these keys; jobs submitted earlier do not bring them back."""
    from vectormill.cli.views.listing import print_json
    from vectormill.domain.errors import InvalidOption

    if not keys and source is None:
        raise InvalidOption("Give keys to delete, or a file with keys by --from.")
    answer = client.delete_items(collection, _read_keys(keys or [], source))
    if json:
        print_json(answer)
        return
    typer.echo(
        f"Deleted {answer['num_deleted']:,} of {answer['num_keys']:,} keys from {collection}.", err=True
    )


def _read_keys(keys: list[str], source: Path | None) -> Iterator[str]:
    yield from keys
    if source is None:
        return
    if str(source) == "-":
        yield from _read_lines(sys.stdin)
        return
    with source.open(encoding="utf-8") as file:
        yield from _read_lines(file)


def _read_lines(lines: Iterator[str]) -> Iterator[str]:
    """Empty ones are no keys."""
    for line in lines:
        key = line.rstrip("\r\n")
        if key:
            yield key
