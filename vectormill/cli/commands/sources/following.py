"""Following: a table whose changes are encoded within seconds. Commands of `vectormill sources`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from vectormill.cli.arguments.options import ApiUrl, DataDir, Json

app = typer.Typer()

Collection = Annotated[
    str, typer.Argument(metavar="COLLECTION", help="With a SQL source in our own Postgres.")
]


@app.command(
    epilog="Examples: vectormill sources follow docs\n\n"
    "vectormill sources follow docs --table public.papers --key-column id"
)
def follow(
    collection: Collection,
    table: Annotated[
        str | None,
        typer.Option("--table", metavar="TABLE", help="Else the one of the query.", show_default=False),
    ] = None,
    key_column: Annotated[
        str | None,
        typer.Option("--key-column", metavar="COLUMN", help="Else the query's key.", show_default=False),
    ] = None,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Put triggers on the source's table: what changes there is encoded or deleted within seconds.

    What changed before, a re-index brings; the nightly one stays as the truth.
    """
    from vectormill.cli.endpoint import connected

    with connected(api_url, data_dir) as client:
        _print_following(client.follow(collection, table=table, key_column=key_column), json)


@app.command(epilog="Example: vectormill sources unfollow docs")
def unfollow(
    collection: Collection, api_url: ApiUrl = None, data_dir: DataDir = None, json: Json = False
) -> None:
    """Remove the triggers. Rows of the collection stay."""
    from vectormill.cli.endpoint import connected

    with connected(api_url, data_dir) as client:
        _print_following(client.unfollow(collection), json)


@app.command(epilog="Example: vectormill sources following docs")
def following(
    collection: Collection, api_url: ApiUrl = None, data_dir: DataDir = None, json: Json = False
) -> None:
    """Show which table a collection follows, and how many of its changes wait."""
    from vectormill.cli.endpoint import connected

    with connected(api_url, data_dir) as client:
        _print_following(client.following(collection), json)


def _print_following(body: Mapping[str, Any], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json

    if is_json:
        print_json(body)
    elif body["table"] is None:
        typer.echo(f"{body['collection']} follows no table.")
    else:
        waiting = (
            f"{body['waiting_changes']:,} changes wait" if body["waiting_changes"] else "no change waits"
        )
        typer.echo(f"{body['collection']} follows {body['table']} by {body['key_column']}; {waiting}.")
