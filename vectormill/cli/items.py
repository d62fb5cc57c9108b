"""Commands that put, get and delete single items of a collection."""

from collections.abc import Iterator
from pathlib import Path

import typer

from vectormill.cli.command import Client, command
from vectormill.cli.files import read_lines
from vectormill.cli.jobs import parse_metadata
from vectormill.cli.printing import print_json
from vectormill.domain.errors import InvalidOption

app = typer.Typer(
    no_args_is_help=True,
    epilog='Example: vectormill items put docs readme "How to begin."',
    help="Put, get and delete single items of a collection.",
)


@command(
    app,
    'vectormill items put docs readme "How to begin." --metadata \'{"lang": "en"}\'',
    note="Put -- before a text that begins with a dash. Read a file's text from stdin: … put docs readme - < README.md",
)
def put(
    client: Client,
    collection: str,
    key: str,
    text: str,
    *,
    pair: str | None = None,
    metadata: str | None = None,
    wait: float | None = None,
    json: bool = False,
) -> str | None:
    """Encode a text, or score a pair, and store the result under the key.

    Args:
        text (TEXT): The text, or - to read it from stdin.
        pair (TEXT): The second text of a pair, in a collection of scores.
        metadata (JSON): A JSON object to keep with the result.
        wait (SECONDS, 0 to 60): Wait at most this long for the item to become searchable.
    """
    found = parse_metadata(metadata)
    content = "".join(read_lines(text)) if text == "-" else text
    answer = client.put_item(collection, key, content, text_pair=pair, metadata=found, wait_seconds=wait)
    if json:
        print_json(answer)
        return None
    if answer["is_searchable"]:
        return f"{key} is searchable in {collection}."
    return f"{key} is not searchable yet; `vectormill status {answer['job']}` shows its progress."


@command(app, "vectormill items get docs readme --vector")
def get(client: Client, collection: str, key: str, *, vector: bool = False) -> None:
    """Print the collection's item with this key as JSON.

    Args:
        vector: Print its vector too.
    """
    print_json(client.get_item(collection, key, has_vector=vector))


@command(
    app,
    "vectormill items delete docs readme licence",
    note="For many keys, one per line: `vectormill items delete docs --from keys.txt` (- reads stdin).",
)
def delete(
    client: Client,
    collection: str,
    keys: list[str] | None = None,
    *,
    from_: Path | None = None,
    json: bool = False,
) -> str | None:
    """Delete the items with these keys; jobs submitted earlier do not bring them back.

    Args:
        keys ([KEY]...):
        from_ (FILE): Read further keys from a file, one per line.
    """
    if not keys and from_ is None:
        raise InvalidOption("Give the keys to delete, or a file of keys with --from.")
    answer = client.delete_items(collection, read_keys(keys or [], from_))
    if json:
        print_json(answer)
        return None
    return f"Deleted {answer['num_deleted']:,} of {answer['num_keys']:,} keys from {collection}."


def read_keys(keys: list[str], source: Path | None) -> Iterator[str]:
    """Yield the given keys, then those of the file, one per line; empty lines are skipped."""
    yield from keys
    if source is not None:
        yield from filter(None, (line.rstrip("\r\n") for line in read_lines(str(source))))
