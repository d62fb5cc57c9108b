"""Collections: make, list, look at, change, export, check and delete them, their generations and their indexes."""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from vectormill.cli.options import (
    ApiUrl,
    DataDir,
    ExportOut,
    Json,
    Model,
    RowsFormat,
    take_encoding_flags,
    with_client,
)
from vectormill.domain.encoding import EncodingOptions
from vectormill.files.formats import OUTPUT_FORMATS, describe_outputs

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer(
    no_args_is_help=True,
    epilog="Example: vectormill collections show docs",
    help="Make, look at, export, check and delete collections.",
)

COLUMNS: Final = ("name", "kind", "model", "rows", "size", "generations", "last re-index")

Name = Annotated[str, typer.Argument(metavar="COLLECTION", help="The collection's name.")]
KeepText = Annotated[
    bool | None,
    typer.Option(
        "--keep-text/--no-keep-text",
        help="Keep texts beside their results, for full text search and answers that show them.",
        show_default=False,
    ),
]
Language = Annotated[
    str | None,
    typer.Option(
        "--language",
        metavar="NAME",
        help="The language of full text search, such as german; simple by default.",
    ),
]


@app.command(
    epilog="Examples: vectormill collections create docs\n\n"
    "vectormill collections create docs --keep-text --language english --vector-type float32"
)
@take_encoding_flags
def create(
    name: Name,
    *,
    keep_text: KeepText = None,
    language: Language = None,
    model: Model = None,
    options: EncodingOptions,
    index: Annotated[
        Literal["auto", "hnsw", "none"] | None,
        typer.Option("--index", help="Policy for building an HNSW index.", show_default="auto"),
    ] = None,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Create a collection before its first job, with all options that decide its results."""
    from vectormill.cli.endpoint import connected
    from vectormill.cli.views.collection_page import describe_results
    from vectormill.cli.views.listing import print_json
    from vectormill.client.requests import given

    with connected(api_url, data_dir) as client:
        made = client.create_collection(
            name,
            model=model,
            options=given(asdict(options)),
            keep_text=keep_text,
            language=language,
            index_policy=index,
        )
    if json:
        print_json(made)
        return
    typer.echo(f"Created collection {name}: {describe_results(made)}.", err=True)


@app.command("list", epilog="Example: vectormill collections list --json | jq -r .name")
@with_client
def list_all(client: "Client", json: Json = False) -> None:
    """List collections by name, with their approximate numbers of rows."""
    from vectormill.cli.views.collection_page import describe_age, describe_bytes, find_kind
    from vectormill.cli.views.listing import print_json, print_table

    found = list(client.collections())
    if json:
        for collection in found:
            print_json(collection)
        return
    rows = [
        (
            collection["name"],
            find_kind(collection),
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
@with_client
def show(
    client: "Client",
    name: Name,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count the rows one by one, instead of Postgres' estimate.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a collection: rows, generations, indexes, coverage, staleness, and work in progress."""
    from vectormill.cli.views.collection_page import print_page
    from vectormill.cli.views.listing import print_json

    collection = client.collection(name, exact=exact)
    if json:
        print_json(collection)
        return
    print_page(collection)


@app.command(epilog="Example: vectormill collections change docs --keep-text --language english")
@with_client
def change(client: "Client", name: Name, keep_text: KeepText = None, language: Language = None) -> None:
    """Change whether texts are kept from now on, or the language that they are searched in."""
    if keep_text is None and language is None:
        raise typer.BadParameter("Give at least one of --keep-text, --no-keep-text and --language.")
    changed = client.change_collection(name, keep_text=keep_text, language=language)
    texts = "keeps" if changed["keep_text"] else "does not keep"
    typer.echo(f"Collection {name} {texts} texts, and searches them as {changed['language']}.", err=True)


@app.command(
    epilog="Examples: vectormill collections export docs -o docs.parquet\n\n"
    "vectormill collections export docs -o - --include metadata,text | jq .key"
)
@with_client
def export(
    client: "Client",
    name: Name,
    out: ExportOut,
    format: RowsFormat = None,
    include: Annotated[
        str | None,
        typer.Option(
            "--include",
            metavar="PARTS",
            help="The parts to write, separated by commas: vector (score or output, by the collection's "
            "kind), metadata and text. By default the first two.",
            show_default=False,
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="KEY", help="Write only rows after this key, to continue an export."),
    ] = None,
) -> None:
    """Write a collection's rows, ordered by key, to a file, which appears whole or not at all."""
    from vectormill.domain.errors import InvalidOption
    from vectormill.files.outputs import check_output, choose_format

    parts = None if include is None else [part.strip() for part in include.split(",")]
    if out == "-":
        client.export_collection(name, sys.stdout.buffer, format or "ndjson", include=parts, after=after)
        return
    kind = choose_format(Path(out), format)
    if not OUTPUT_FORMATS[kind].has_keys:
        raise InvalidOption(
            f"A collection is exported as {describe_outputs(of_rows=True)}; {kind} has no keys."
        )
    check_output(Path(out))
    client.export_collection(name, Path(out), kind, include=parts, after=after)
    typer.echo(f"Wrote {out}.", err=True)


@app.command(
    epilog="Examples: vectormill collections delete docs\n\nvectormill collections delete docs --force --yes"
)
@with_client
def delete(
    client: "Client",
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Cancel the jobs and runs that work on it first.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a collection with all its rows. Its jobs stay, without results."""
    if not yes and sys.stdin.isatty():
        found = client.collection(name)
        typer.confirm(f"Delete {name} with about {found['num_rows']:,} rows?", abort=True, err=True)
    client.delete_collection(name, force=force)
    typer.echo(f"Deleted collection {name}.", err=True)


@app.command(
    epilog="Examples: vectormill collections check docs\n\nvectormill collections check docs --sample 1000\n\n"
    "Exit codes: 0 nothing is wrong, 1 something is, 3 service unavailable, 4 the check failed or was cancelled."
)
@with_client
def check(
    client: "Client",
    name: Name,
    sample: Annotated[
        int,
        typer.Option(
            "--sample", metavar="N", min=0, max=10_000, help="Encode N of its texts again and compare."
        ),
    ] = 200,
    json: Json = False,
) -> None:
    """Check a collection: vectors, index, texts encoded again, and orphaned rows."""
    from vectormill.cli.exits import ITEMS_FAILED, JOB_NOT_COMPLETED
    from vectormill.cli.views.collection_page import print_check
    from vectormill.cli.views.listing import print_json
    from vectormill.cli.views.run_progress import look_at_run
    from vectormill.client.progress import Progress
    from vectormill.runs.run import COMPLETED

    run = client.check_collection(name, sample=sample)
    with Progress(look_at_run) as progress:
        run = client.wait_run(run["id"], progress)
    if json:
        print_json(run)
    elif run["state"] == COMPLETED:
        print_check(name, run["report"]["checking"])
    else:
        typer.echo(f"The check is {run['state']}: {run['error']}", err=True)
    if run["state"] != COMPLETED:
        raise typer.Exit(JOB_NOT_COMPLETED)
    if not run["report"]["checking"]["is_good"]:
        raise typer.Exit(ITEMS_FAILED)


@app.command(epilog="Example: vectormill collections rollback docs")
@with_client
def rollback(
    client: "Client",
    name: Name,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Do not ask. Rows put since then whose texts were not kept are left out."),
    ] = False,
    json: Json = False,
) -> None:
    """Make the previous generation live again; a run encodes the rows put since the swap.

    Where texts are not kept, it asks before it leaves those rows out.
    """
    from vectormill.cli.views.listing import print_json
    from vectormill.problems import ApiError

    try:
        answer = client.rollback_collection(name, allow_missing=yes)
    except ApiError as error:
        if error.title != "Rows missing":
            raise
        if not sys.stdin.isatty():
            raise ApiError(
                error.status, error.title, f"{error} Repeat with --yes to roll back anyway."
            ) from error
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
        typer.echo(f"Run {answer['run_id']} encodes the rows that were put since it was live.")
    if missing:
        said = (
            "1 row that was put since it was live has"
            if missing == 1
            else f"{missing:,} rows that were put have"
        )
        typer.echo(f"{said} no kept text, and is missing where no job has its text any more.")


@app.command(
    epilog="Examples: vectormill collections index docs\n\n"
    "vectormill collections index docs --on lang --on year --wait\n\n"
    "vectormill collections index docs --policy hnsw --m 24 --ef-construction 128 --wait"
)
@with_client
def index(
    client: "Client",
    name: Name,
    policy: Annotated[
        Literal["auto", "hnsw", "none"] | None,
        typer.Option("--policy", help="Build a vector index from 10,000 rows on, always, or never."),
    ] = None,
    m: Annotated[
        int | None,
        typer.Option("--m", metavar="N", min=2, max=100, help="HNSW: neighbours of each row in the graph."),
    ] = None,
    ef_construction: Annotated[
        int | None,
        typer.Option(
            "--ef-construction",
            metavar="N",
            min=4,
            max=1000,
            help="HNSW: candidates examined for each row while building.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=0, max=31, help="Parallel processes for a build."),
    ] = None,
    memory_mib: Annotated[
        int | None,
        typer.Option(
            "--memory-mib", metavar="MIB", min=1, help="Memory for a build (Postgres's maintenance_work_mem)."
        ),
    ] = None,
    on: Annotated[
        list[str] | None,
        typer.Option(
            "--on",
            metavar="FIELD",
            help="Index a metadata field for filters; a dot leads into an object, * is all fields. May be "
            "repeated. Replaces the fields that were set before.",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Rebuild the vector index even if it is usable.")
    ] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Drop the vector index and set the policy to none.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run until it ends.")] = False,
    json: Json = False,
) -> None:
    """Show the indexes of a collection, or build, rebuild or drop them while searches go on."""
    from vectormill.cli.exits import exit_code_of_job
    from vectormill.cli.views.listing import print_json
    from vectormill.cli.views.run_progress import describe_outcome, look_at_indexing
    from vectormill.client.progress import Progress

    wishes = (policy, m, ef_construction, workers, memory_mib, on)
    if all(wish is None for wish in wishes) and not (rebuild or drop or wait):
        _print_indexes(client.index(name), json)
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


@app.command(epilog="Example: vectormill collections discard docs 12")
@with_client
def discard(
    client: "Client",
    name: Name,
    generation_id: Annotated[
        int,
        typer.Argument(metavar="GENERATION", help="The generation's number, as shown by `collections show`."),
    ],
) -> None:
    """Discard a generation that is being built or is retired; its tables are dropped soon."""
    client.discard_generation(name, generation_id)
    typer.echo(f"Generation {generation_id} of {name} is discarded; its tables are dropped within seconds.")


def _print_indexes(found: Mapping[str, object], is_json: bool) -> None:
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
