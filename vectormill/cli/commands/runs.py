"""Runs: re-index a collection, and look at, cancel or confirm what is under way. Each command speaks to one API."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vectormill.cli.exits import EXIT_CODES_HELP, exit_code_of_job
from vectormill.cli.options import ApiUrl, DataDir, Json, Model, NewestFirst, take_encoding_flags, with_client
from vectormill.domain.encoding import EncodingOptions

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill runs list --collection docs",
    help="Show, cancel and confirm re-indexes, builds of indexes and checks.",
)
# A command with a name of its own, beside the others.
reindex_app = typer.Typer()

RunId = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's id, as printed by `reindex` and `runs list`.")
]


@reindex_app.command(
    epilog="Examples: vectormill reindex docs\n\nvectormill reindex docs --model bge-m3 --no-wait\n\n"
    f"With --wait: {EXIT_CODES_HELP}"
)
@take_encoding_flags
def reindex(
    collection: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTION", help="The collection; it needs a source, or has to keep its texts."
        ),
    ],
    *,
    model: Model = None,
    options: EncodingOptions,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            metavar="N",
            min=0,
            max=9,
            help="The priority of the run's job, 0 to 9.",
            show_default="5",
        ),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Allow any share of the collection to change.")
    ] = False,
    max_change_share: Annotated[
        float | None,
        typer.Option(
            "--max-change-share",
            metavar="SHARE",
            min=0,
            max=1,
            help="Hold the run if it would re-encode or delete more than this share of the rows.",
            show_default="0.3",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the run until it ends.")] = True,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Bring a collection in step with its source: encode new and changed rows, delete vanished ones.

    With another model, or another option that decides vectors, a new generation is built beside the live one, which
    is searched until the new one is complete.
    """
    from vectormill.cli.endpoint import connected
    from vectormill.cli.views.run_progress import look_at_run
    from vectormill.client.progress import Progress

    with connected(api_url, data_dir) as client:
        run = client.reindex(
            collection,
            confirm=confirm,
            max_change_share=max_change_share,
            priority=priority,
            model=model,
            **asdict(options),
        )
        if wait:
            with Progress(look_at_run) as progress:
                run = client.wait_run(run["id"], progress)
    _print_run(run, json)
    if wait:
        raise typer.Exit(exit_code_of_job(run["state"]))


@app.command("list", epilog="Example: vectormill runs list --collection docs --limit 10")
@with_client
def list_all(
    client: "Client",
    collection: Annotated[
        str | None, typer.Option("--collection", metavar="NAME", help="List only runs of this collection.")
    ] = None,
    limit: NewestFirst = 50,
    json: Json = False,
) -> None:
    """List runs, newest first."""
    from vectormill.cli.views.listing import print_listing
    from vectormill.cli.views.run_progress import describe_run_counts

    found = list(itertools.islice(client.runs(collection), limit))
    columns = ("id", "collection", "kind", "state", "phase", "rows", "created")

    def describe(run: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            run["id"],
            run["collection"],
            run["kind"],
            run["state"],
            run["phase"],
            describe_run_counts(run),
            run["created_at"][:19],
        )

    print_listing(found, columns, describe, is_json=json)


@app.command(epilog="Examples: vectormill runs show RUN\n\nvectormill runs show RUN --watch")
@with_client
def show(
    client: "Client",
    run_id: RunId,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    json: Json = False,
) -> None:
    """Show a run: its phase, its counts, and what each phase found."""
    from vectormill.cli.views.run_progress import look_at_run
    from vectormill.client.progress import Progress

    if watch:
        with Progress(look_at_run) as progress:
            run = client.wait_run(run_id, progress)
    else:
        run = client.run(run_id)
    _print_run(run, json)
    if watch:
        raise typer.Exit(exit_code_of_job(run["state"]))


@app.command(epilog="Example: vectormill runs cancel RUN")
@with_client
def cancel(client: "Client", run_id: RunId, json: Json = False) -> None:
    """Cancel a run and its encoding job. Rows that it has already written stay."""
    _print_run(client.cancel_run(run_id), json)


@app.command(epilog="Example: vectormill runs confirm RUN && vectormill runs show RUN --watch")
@with_client
def confirm(client: "Client", run_id: RunId, json: Json = False) -> None:
    """Let a held run go on; `runs show` says why it is held."""
    _print_run(client.confirm_run(run_id), json)


def _print_run(run: Mapping[str, Any], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json, print_table
    from vectormill.cli.views.run_progress import describe_findings, describe_report

    if is_json:
        print_json(run)
        return
    counts = {name: number for name, number in run["counts"].items() if number}
    told = {name: value for name, value in run.items() if name not in ("counts", "report", "options", "spec")}
    asked = {name: describe_findings(run.get(name) or {}) for name in ("options", "spec")}
    rows = [
        (name, value) for name, value in (told | asked | counts).items() if value not in (None, "", {}, [])
    ]
    print_table(("", ""), [*rows, *describe_report(run["report"])])
    if run["counts"].get("num_failed") and run["job_id"]:
        typer.echo(f"Failed items and reasons: vectormill errors {run['job_id']}", err=True)
    if run["state"] == "held":
        typer.echo(f"Confirm it with: vectormill runs confirm {run['id']}", err=True)
