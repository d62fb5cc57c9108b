"""Generations of a collection: go back to the one that was live before, or give one up. Commands of `collections`."""

import sys
from typing import Annotated

import typer

from vectormill.cli.arguments.options import ApiUrl, DataDir, Json

Name = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection's name.")]


def rollback(
    name: Name,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; leave out what was put since and has no kept text.")
    ] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Search again what was live before the last swap; a run encodes what was put since for it.

    Where texts are not kept, it asks before it leaves out what was put.
    """
    from vectormill.cli.endpoint import connected
    from vectormill.cli.views.listing import print_json
    from vectormill.problems import ApiError

    with connected(api_url, data_dir) as client:
        try:
            answer = client.rollback_collection(name, allow_missing=yes)
        except ApiError as error:
            if error.title != "Rows missing":
                raise
            if not sys.stdin.isatty():
                raise ApiError(error.status, error.title, f"{error} (--yes does.)") from error
            typer.confirm(f"{error} Roll back?", abort=True, err=True)
            answer = client.rollback_collection(name, allow_missing=True)
    if json:
        print_json(answer)
        return
    live, retired = answer["live"], answer["retired"]
    typer.echo(
        f"{name} is generation {live['id']} again ({live['options']['model']}, {live['fingerprint']}); "
        f"{retired['id']} ({retired['options']['model']}, {retired['fingerprint']}) is retired."
    )
    newer, missing = answer["num_newer_rows"], answer["num_missing_rows"]
    if newer != 0:
        typer.echo(f"Run {answer['run_id']} encodes for it what was put since it was live.")
    if missing:
        said = (
            "1 row that was put since it was live has"
            if missing == 1
            else f"{missing:,} rows that were put have"
        )
        typer.echo(f"{said} no kept text, and is missing where no job has its text any more.")


def discard(
    name: Name,
    generation_id: Annotated[
        int, typer.Argument(metavar="GENERATION", help="Its number, as `collections show` has it.")
    ],
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Give up a generation that is being built, or is retired; its tables are dropped soon."""
    from vectormill.cli.endpoint import connected

    with connected(api_url, data_dir) as client:
        client.discard_generation(name, generation_id)
    typer.echo(f"Generation {generation_id} of {name} is given up; its tables are dropped within seconds.")
