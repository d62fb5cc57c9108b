"""The indexes of a collection: look at them, and say what there shall be. A command of `collections`."""

from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from vectormill.cli.arguments.options import ApiUrl, DataDir, Json

EXAMPLES = (
    "Examples: vectormill collections index docs\n\n"
    "vectormill collections index docs --on lang --on year --wait\n\n"
    "vectormill collections index docs --policy hnsw --m 24 --ef-construction 128 --wait"
)


def index(
    name: Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection's name.")],
    policy: Annotated[
        Literal["auto", "hnsw", "none"] | None,
        typer.Option("--policy", help="A vector index from 10,000 rows on, always, or never."),
    ] = None,
    m: Annotated[
        int | None,
        typer.Option("--m", metavar="N", min=2, max=100, help="Neighbours of a row in the graph."),
    ] = None,
    ef_construction: Annotated[
        int | None,
        typer.Option(
            "--ef-construction", metavar="N", min=4, max=1000, help="Candidates looked at for a row."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=0, max=31, help="Processes that help with a build."),
    ] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option("--memory-mib", metavar="MIB", min=1, help="maintenance_work_mem of a build."),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="FIELD",
            help="A field of the metadata that filters name, a dot leads into an object, * is all; repeat it. In the "
            "place of those that were named before.",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the vector index anew, though it serves.")
    ] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Drop the vector index; the policy becomes none.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the indexes of a collection; with options, have them built, rebuilt or dropped, while searches go on."""
    from vectormill.cli.endpoint import connected
    from vectormill.cli.exits import exit_code_of_job
    from vectormill.cli.views.index_progress import describe_outcome, look_at_indexing
    from vectormill.cli.views.listing import print_json
    from vectormill.client.views.progress import Progress

    wishes = (policy, m, ef_construction, workers, memory_mib, on)
    with connected(api_url, data_dir) as client:
        if all(wish is None for wish in wishes) and not (rebuild or drop or wait):
            show(client.index(name), json)
            return
        run = client.set_index(
            name,
            policy=policy,
            m=m,
            ef_construction=ef_construction,
            workers=workers,
            memory_bytes=None if memory_mib is None else memory_mib << 20,
            filters=on,
            rebuild=rebuild,
            drop=drop,
        )
        if wait:
            with Progress(look_at_indexing) as progress:
                run = client.wait_run(run["id"], progress)
    if json:
        print_json(run)
    elif wait:
        typer.echo("\n".join([f"Run {run['id']} is {run['state']}.", *describe_outcome(run)]))
    else:
        typer.echo(f"Run {run['id']} is {run['state']}; `vectormill runs show {run['id']}` tells more.")
    if wait:
        raise typer.Exit(exit_code_of_job(run["state"]))


def show(found: Mapping[str, object], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json, print_table

    if is_json:
        print_json(found)
        return
    indexes, plan, progress = found["indexes"], found["plan"], found["progress"]
    assert isinstance(indexes, list)
    assert isinstance(plan, dict)
    rows = [
        (
            each["name"],
            each["method"],
            "ready" if each["is_valid"] else "not ready",
            f"{each['num_bytes'] / (1 << 20):,.1f} MiB",
            (each["last_used_at"] or "never")[:19],
        )
        for each in indexes
    ]
    print_table(("index", "method", "state", "size", "last used"), rows)
    typer.echo(f"Policy {found['policy']}, {found['num_rows']:,} rows.")
    for reason in plan["reasons"]:
        typer.echo(reason)
    if isinstance(progress, dict):
        share = "" if progress["share"] is None else f", {progress['share']:.0%}"
        typer.echo(f"A build goes on: {progress['phase']}{share}.")
