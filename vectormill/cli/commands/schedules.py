"""Schedules: when collections are re-indexed. Each command speaks to one API."""

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vectormill.cli.options import Json, NewestFirst, TextPair, with_client

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer(
    no_args_is_help=True,
    epilog='Example: vectormill schedules create docs --cron "0 2 * * *" --timezone Europe/Berlin',
    help="Re-index collections at the times of a cron expression.",
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The schedule's name, as shown by `schedules list`.")
]
Timezone = Annotated[
    str | None,
    typer.Option("--timezone", metavar="ZONE", help="The time zone of the expression.", show_default="UTC"),
]
Overlap = Annotated[
    Literal["skip", "queue"] | None,
    typer.Option(
        "--overlap",
        help="When a run is due while another run of the collection is active: skip it, or queue it.",
        show_default="skip",
    ),
]


@app.command(
    epilog='Examples: vectormill schedules create docs --cron "0 2 * * *" --timezone Europe/Berlin\n\n'
    'vectormill schedules create docs --cron "*/15 8-18 * * MON-FRI" --name office --overlap queue\n\n'
    'vectormill schedules create docs --cron @daily --source "SELECT id, body FROM articles" --key id --text body'
)
@with_client
def create(
    client: "Client",
    collection: Annotated[
        str, typer.Argument(metavar="COLLECTION", help="The collection to re-index; it needs a source.")
    ],
    cron: Annotated[
        str,
        typer.Option(
            "--cron",
            metavar="EXPRESSION",
            help="Minute, hour, day of the month, month, day of the week; or @hourly, @daily, @weekly.",
        ),
    ],
    timezone: Timezone = None,
    overlap: Overlap = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="The schedule's name. By default, the collection's.",
            show_default="the collection's",
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            metavar="WHERE",
            help="Also set the source: a query, a folder, or files. `sources set` has more options.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", metavar="COLUMN", help="The source's column with the keys.", show_default="key"
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--text", metavar="COLUMN", help="The source's column with the texts.", show_default="text"
        ),
    ] = None,
    text_pair: TextPair = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", metavar="COLUMN", help="A column to keep as metadata. May be repeated."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="HOW", help="Split texts into passages, as for `sources set`."),
    ] = None,
    json: Json = False,
) -> None:
    """Re-index a collection from its source at every due time from now on."""
    from vectormill.cli.commands.sources import parse_split, read_source

    if source is not None:
        kind, options = read_source(source, key=key, text=text, metadata=metadata, text_pair=text_pair)
        client.set_source(collection, kind, options, split=parse_split(split))
    made = client.create_schedule(collection, cron, timezone=timezone, overlap=overlap, name=name)
    _print_schedule(made, json)


@app.command("list", epilog="Example: vectormill schedules list")
@with_client
def list_all(client: "Client", json: Json = False) -> None:
    """List the schedules: when each is due, and the results of their runs."""
    from vectormill.cli.views.listing import print_json, print_table
    from vectormill.cli.views.schedule_lines import describe_due, describe_success

    found = list(client.schedules())
    if json:
        for schedule in found:
            print_json(schedule)
        return
    columns = ("name", "collection", "cron", "next due", "last run", "last success", "failures")
    rows = [
        (
            schedule["name"],
            schedule["collection"],
            schedule["cron"],
            describe_due(schedule),
            schedule["last_state"],
            describe_success(schedule),
            schedule["consecutive_failures"],
        )
        for schedule in found
    ]
    print_table(columns, rows)


@app.command(epilog="Example: vectormill schedules show docs")
@with_client
def show(client: "Client", name: Name, json: Json = False) -> None:
    """Show a schedule: when it is due next, and the results of its runs."""
    _print_schedule(client.schedule(name), json)


@app.command(epilog='Example: vectormill schedules change docs --cron "30 4 * * *"')
@with_client
def change(
    client: "Client",
    name: Name,
    cron: Annotated[
        str | None, typer.Option("--cron", metavar="EXPRESSION", help="The new cron expression.")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option("--timezone", metavar="ZONE", help="The new time zone.", show_default=False)
    ] = None,
    overlap: Annotated[
        Literal["skip", "queue"] | None,
        typer.Option("--overlap", help="Skip or queue overlapping runs.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Change a schedule; options that are not given stay. A new expression or zone counts from now on."""
    _print_schedule(client.change_schedule(name, cron=cron, timezone=timezone, overlap=overlap), json)


@app.command(epilog="Example: vectormill schedules pause docs")
@with_client
def pause(client: "Client", name: Name, json: Json = False) -> None:
    """Pause a schedule: due times pass until it is resumed. An active run goes on."""
    _print_schedule(client.pause_schedule(name), json)


@app.command(epilog="Example: vectormill schedules resume docs")
@with_client
def resume(client: "Client", name: Name, json: Json = False) -> None:
    """Resume a paused schedule. Due times that have passed are not made up for."""
    _print_schedule(client.resume_schedule(name), json)


@app.command("run-now", epilog="Example: vectormill schedules run-now docs")
@with_client
def run_now(client: "Client", name: Name, json: Json = False) -> None:
    """Start a run now, apart from the due times, and print its id; it waits for an active run."""
    from vectormill.cli.views.listing import print_json

    run = client.run_schedule(name)
    if json:
        print_json(run)
    else:
        typer.echo(run["id"])


@app.command(epilog="Example: vectormill schedules delete docs")
@with_client
def delete(client: "Client", name: Name) -> None:
    """Delete a schedule. Its runs stay, also an active one."""
    client.delete_schedule(name)
    typer.echo(f"Deleted schedule {name}.", err=True)


@app.command(epilog="Example: vectormill schedules history docs --limit 14")
@with_client
def history(client: "Client", name: Name, limit: NewestFirst = 20, json: Json = False) -> None:
    """List a schedule's due times, newest first: runs, and skipped ones with the reason."""
    from vectormill.cli.views.listing import print_listing
    from vectormill.cli.views.schedule_lines import describe_counts

    found = list(itertools.islice(client.schedule_runs(name), limit))
    columns = ("run", "due", "state", "finished", "rows", "error")

    def describe(run: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            run["id"],
            (run["due_at"] or "by hand")[:16],
            run["state"],
            (run["finished_at"] or "")[:19],
            describe_counts(run["counts"]),
            run["error"],
        )

    print_listing(found, columns, describe, is_json=json)


def _print_schedule(schedule: Mapping[str, Any], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json, print_table
    from vectormill.cli.views.schedule_lines import describe_schedule

    if is_json:
        print_json(schedule)
    else:
        print_table(("", ""), [(line.name, line.value) for line in describe_schedule(schedule)])
