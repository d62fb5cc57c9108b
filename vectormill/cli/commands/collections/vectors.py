"""Vectors: export what a job made."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from vectormill.cli.arguments.options import ApiUrl, DataDir
from vectormill.files.formats import OutputName

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
    format: Annotated[OutputName | None, typer.Option("--format", help="Else told by OUT's name.")] = None,
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
