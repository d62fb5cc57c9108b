"""Generations of a collection: go back to the one that was live before, or give one up. Commands of `collections`."""

from typing import Annotated

import typer

from vectormill.cli.arguments.options import ApiUrl, DataDir, Json

Name = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection's name.")]


def rollback(name: Name, api_url: ApiUrl = None, data_dir: DataDir = None, json: Json = False) -> None:
    """Search again what was live before the last swap; twice, and all is as it was.

    What was put since the swap is missing then: the next re-index brings what the source has of it.
    """
    from vectormill.cli.endpoint import connected
    from vectormill.cli.views.listing import print_json

    with connected(api_url, data_dir) as client:
        answer = client.rollback_collection(name)
    if json:
        print_json(answer)
        return
    live, retired = answer["live"], answer["retired"]
    typer.echo(
        f"{name} is generation {live['id']} again ({live['options']['model']}, {live['fingerprint']}); "
        f"{retired['id']} ({retired['options']['model']}, {retired['fingerprint']}) is retired."
    )
    newer = answer["num_newer_rows"]
    if newer != 0:
        said = "Rows" if newer is None else f"{newer:,} rows"
        typer.echo(
            f"{said} that were put since it was live are missing; the next re-index brings what the source has."
        )


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
