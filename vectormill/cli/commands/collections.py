"""Collections: list them, look at one."""

from typing import Annotated, Final

import typer

from vectormill.cli.commands.generations import discard, rollback
from vectormill.cli.commands.indexes import EXAMPLES, index
from vectormill.cli.options import ApiUrl, DataDir, Json

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill collections show docs",
    help="Make, look at, export, check and delete collections.",
)

COLUMNS: Final = ("name", "model", "rows", "size", "generations", "last re-index")

Name = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection's name.")]


@app.command("list", epilog="Example: vectormill collections list --json | jq -r .name")
def list_all(api_url: ApiUrl = None, data_dir: DataDir = None, json: Json = False) -> None:
    """List collections by name, with about how many rows each has."""
    from vectormill.cli.collection_page import describe_age, describe_bytes
    from vectormill.cli.endpoint import connected
    from vectormill.cli.listing import print_json, print_table

    with connected(api_url, data_dir) as client:
        found = list(client.collections())
    if json:
        for collection in found:
            print_json(collection)
        return
    rows = [
        (
            collection["name"],
            collection["model"],
            f"{collection['num_rows']:,}",
            describe_bytes(collection["num_bytes"]),
            collection["num_generations"],
            describe_age(collection["stale_seconds"]),
        )
        for collection in found
    ]
    print_table(COLUMNS, rows)


@app.command(epilog="Examples: vectormill collections show docs\n\nvectormill collections show docs --exact")
def show(
    name: Name,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count the rows one by one, instead of Postgres' estimate.")
    ] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show all about a collection: rows, generations, indexes, coverage, staleness, and what works on it."""
    from vectormill.cli.collection_page import print_page
    from vectormill.cli.endpoint import connected
    from vectormill.cli.listing import print_json

    with connected(api_url, data_dir) as client:
        collection = client.collection(name, exact=exact)
    if json:
        print_json(collection)
        return
    print_page(collection)


app.command(epilog="Example: vectormill collections rollback docs")(rollback)
app.command(epilog=EXAMPLES)(index)
app.command(epilog="Example: vectormill collections discard docs 12")(discard)
