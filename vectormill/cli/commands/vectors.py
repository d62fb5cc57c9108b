"""Vectors: export what a job made, and search what a collection holds."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from vectormill.cli.options import ApiUrl, DataDir, Format, Json

app = typer.Typer()


@app.command(
    epilog="Examples: vectormill export JOB -o vectors.parquet\n\nvectormill export JOB -o - | jq .key\n\n"
    "npy writes the keys beside it, a JSON string a line: vectors.npy.keys.txt."
)
def export(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="OUT", help="A file, or - for NDJSON on stdout.")
    ],
    format: Annotated[Format | None, typer.Option("--format", help="Else told by OUT's name.")] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also while the job runs: what is there now.")
    ] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
) -> None:
    """Write a job's vectors to a file, which appears whole or not at all."""
    from vectormill.cli.endpoint import connected
    from vectormill.domain.errors import InvalidOption
    from vectormill.files.outputs import choose_format, write_vectors

    with connected(api_url, data_dir) as client:
        if out == "-":
            if format == "npy":
                raise InvalidOption("npy needs a file to write, since its keys go beside it; give -o FILE.")
            client.export(job_id, sys.stdout.buffer, format or "ndjson", partial=partial)
            return
        write_vectors(
            lambda file, kind: client.export(job_id, file, kind, partial=partial),
            Path(out),
            choose_format(Path(out), format),
        )
    typer.echo(f"Wrote {out}.", err=True)


@app.command(epilog='Example: vectormill search docstrings "how to parse a date" --limit 5')
def search(
    collection: Annotated[str, typer.Argument(metavar="COLLECTION")],
    text: Annotated[str, typer.Argument(metavar="TEXT")],
    limit: Annotated[
        int, typer.Option("--limit", metavar="N", min=1, max=1000, help="So many of the nearest.")
    ] = 10,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Find a collection's items that are nearest to a text."""
    from vectormill.cli.endpoint import connected
    from vectormill.cli.listing import print_json, print_table

    with connected(api_url, data_dir) as client:
        matches = client.search(collection, text, limit=limit)
    if matches.num_rows_read is not None:
        typer.echo(
            f"No index: all of about {matches.num_rows_read:,} rows of {collection} were read. "
            'docs/OPERATIONS.md, "Search and indexes", builds one.',
            err=True,
        )
    if json:
        for match in matches:
            print_json(match)
        return
    rows = [(f"{match['score']:.4f}", match["key"], match.get("metadata")) for match in matches]
    print_table(("score", "key", "metadata"), rows)
