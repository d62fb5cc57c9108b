"""Jobs: submit, watch, pause, resume, cancel, retry, delete and export them, and list their items."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from http.client import NOT_FOUND
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vectormill.cli.commands.encode import PAIR_FIELD
from vectormill.cli.exits import EXIT_CODES_HELP, exit_code_of_job
from vectormill.cli.options import (
    ApiUrl,
    Collection,
    DataDir,
    ExportOut,
    Json,
    KeyField,
    Metadata,
    Model,
    NewestFirst,
    PairField,
    Priority,
    Strict,
    TextField,
    take_encoding_flags,
    with_client,
)
from vectormill.domain.encoding import RequestedOptions
from vectormill.files.formats import INPUT_HELP, OutputName
from vectormill.jobs.job import CANCELLING

if TYPE_CHECKING:
    from vectormill.client import Client

app = typer.Typer()

# Told in words; --json has them as they are.
STAGE_FIELDS: Final = ("stages", "bound_by", "stage_seconds")

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as printed by `submit` and `jobs`.")]


@app.command(
    epilog="Examples: vectormill submit papers.jsonl.gz --collection papers\n\n"
    "zcat *.gz | jq -c '{key: .doi, text: .abstract}' | vectormill submit - --collection papers"
)
@take_encoding_flags
def submit(
    input: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    *,
    model: Model = None,
    collection: Collection = None,
    priority: Priority = 5,
    options: RequestedOptions,
    metadata: Metadata = None,
    key_field: KeyField = None,
    text_field: TextField = "text",
    pair_field: PairField = PAIR_FIELD,
    strict: Strict = False,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Submitting again with the same key returns the same job.",
        ),
    ] = None,
    gzip: Annotated[bool, typer.Option("--gzip", help="Compress the upload, for slow networks.")] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Submit a file of texts as a job and print the job's id."""
    from vectormill.cli.endpoint import connected
    from vectormill.cli.options import parse_metadata
    from vectormill.cli.views.listing import print_json
    from vectormill.files.rows import FAIL_ALONE, REFUSE, Fields
    from vectormill.files.texts import look_at_texts, read_texts

    fields = Fields(key_field, text_field, pair_field, REFUSE if strict else FAIL_ALONE)
    items = look_at_texts(read_texts(input, fields), whole=strict)
    with connected(api_url, data_dir) as client:
        job = client.submit(
            items,
            model=model,
            collection=collection,
            priority=priority,
            **asdict(options),
            metadata=parse_metadata(metadata),
            gzip=gzip,
            idempotency_key=idempotency_key,
        )
    if json:
        print_json(job)
        return
    typer.echo(job["id"])
    typer.echo(
        f"{job['num_items']:,} items submitted. Watch: vectormill status {job['id']} --watch", err=True
    )
    if job.get("waiting_because"):
        typer.echo(job["waiting_because"], err=True)


@app.command(epilog="Example: vectormill jobs --state running")
@with_client
def jobs(
    client: "Client",
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="Only jobs in this state.")
    ] = None,
    limit: NewestFirst = 50,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    from vectormill.cli.views.listing import print_listing
    from vectormill.client.views import count_ended

    found = list(itertools.islice(client.jobs(state), limit))
    columns = ("id", "state", "collection", "items", "ended", "failed", "created")

    def describe(job: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            job["id"],
            job["state"],
            job["collection"],
            job["num_items"],
            count_ended(job),
            job["num_failed"],
            job["created_at"][:19],
        )

    print_listing(found, columns, describe, is_json=json)


@app.command(
    epilog=f"Examples: vectormill status JOB --watch\n\nvectormill status\n\nWith --watch: {EXIT_CODES_HELP}"
)
def status(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="[JOB]", help="The job's id; without one, the live workers are shown."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show a job's progress, or the workers with their rates, memory and bottleneck, and the schedules."""
    from vectormill.cli.endpoint import connected
    from vectormill.cli.views.summary import describe_missing_prompt
    from vectormill.client.progress import Progress
    from vectormill.client.views import look_at_job

    if job_id is None:
        if watch:
            raise typer.BadParameter("--watch needs a JOB.", param_hint="--watch")
        _print_workers(api_url, data_dir, json)
        return
    with connected(api_url, data_dir) as client:
        if watch:
            with Progress(look_at_job) as progress:
                job = client.wait(job_id, progress)
        else:
            job = client.job(job_id)
        told = [] if json else describe_missing_prompt(job, client.models())
    _print_job(job, json)
    for sentence in told:
        typer.echo(sentence, err=True)
    if watch:
        raise typer.Exit(exit_code_of_job(job["state"]))


@app.command(
    epilog="Examples: vectormill pause JOB\n\n"
    "vectormill jobs --state running --json | jq -r .id | xargs -n 1 vectormill pause"
)
@with_client
def pause(client: "Client", job_id: JobId, json: Json = False) -> None:
    """Pause a job: no more of its chunks are handed out until it is resumed; those on workers finish."""
    _print_job(client.pause(job_id), json)


@app.command(epilog="Example: vectormill resume JOB && vectormill status JOB --watch")
@with_client
def resume(client: "Client", job_id: JobId, json: Json = False) -> None:
    """Resume a paused job where it stopped."""
    _print_job(client.resume(job_id), json)


@app.command(epilog="Example: vectormill cancel JOB")
@with_client
def cancel(client: "Client", job_id: JobId, json: Json = False) -> None:
    """Cancel a job. Vectors that are already committed stay."""
    _print_job(client.cancel(job_id), json)


@app.command(epilog="Example: vectormill retry JOB && vectormill status JOB --watch")
@with_client
def retry(client: "Client", job_id: JobId, json: Json = False) -> None:
    """Encode only the failed items of a job again. A paused job stays paused."""
    _print_job(client.retry(job_id), json)


@app.command(epilog="Examples: vectormill delete JOB\n\nvectormill cancel JOB && vectormill delete JOB")
@with_client
def delete(client: "Client", job_id: JobId) -> None:
    """Delete an ended job with its texts, errors and vectors. Rows in collections stay."""
    if client.job(job_id)["state"] == CANCELLING:
        client.wait(job_id)  # for seconds: until workers hear of it
    client.delete(job_id)
    typer.echo(f"Deleted job {job_id}.", err=True)


@app.command(epilog="Example: vectormill errors JOB --json > failed.jsonl")
@with_client
def errors(client: "Client", job_id: JobId, json: Json = False) -> None:
    """List a job's failed items with their codes and reasons."""
    from vectormill.cli.views.listing import print_json, print_table

    if json:
        for error in client.errors(job_id):
            print_json(error)
    else:
        rows = ((error["key"], error["code"], error["detail"]) for error in client.errors(job_id))
        print_table(("key", "code", "detail"), rows)


@app.command(epilog="Example: vectormill truncated JOB > cut.txt")
@with_client
def truncated(client: "Client", job_id: JobId, json: Json = False) -> None:
    """List the keys of a job's texts that were cut because they were too long."""
    from vectormill.cli.views.listing import print_json, print_table

    if json:
        for item in client.truncated(job_id):
            print_json(item)
    else:
        print_table(("key",), ((item["key"],) for item in client.truncated(job_id)))


def _print_workers(api_url: str | None, data_dir: Path | None, is_json: bool) -> None:
    from vectormill.cli.endpoint import connected
    from vectormill.cli.views.listing import print_json, print_table
    from vectormill.cli.views.schedule_lines import describe_standing
    from vectormill.cli.views.summary import WORKER_COLUMNS, summarize_worker

    with connected(api_url, data_dir) as client:
        workers = client.workers()
        schedules = [] if is_json else _list_schedules(client)
    if is_json:
        for worker in workers:
            print_json(worker)
        return
    if not workers:
        typer.echo(
            "No worker is alive. Start one with `vectormill worker`, or all with `vectormill up`.", err=True
        )
    rows = [summarize_worker(worker) for worker in workers]
    print_table(WORKER_COLUMNS, [[row[column] for column in WORKER_COLUMNS] for row in rows])
    for schedule in schedules:
        typer.echo(describe_standing(schedule), err=True)


def _list_schedules(client: "Client") -> Sequence[Mapping[str, Any]]:
    from vectormill.problems import ApiError

    try:
        return list(client.schedules())
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return []  # of an API that has no schedules yet


def _print_job(job: Mapping[str, Any], is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json, print_table
    from vectormill.cli.views.summary import describe_long_texts, describe_stages

    if is_json:
        print_json(job)
        return
    stages = {line.name: f"{line.value} ({line.reason})" for line in describe_stages(job)}
    plain = {name: value for name, value in job.items() if name not in STAGE_FIELDS}
    print_table(
        ("", ""), [(name, value) for name, value in (plain | stages).items() if value not in (None, {}, [])]
    )
    for sentence in describe_long_texts(job):
        typer.echo(sentence, err=True)


@app.command(
    epilog="Examples: vectormill export JOB -o vectors.parquet\n\nvectormill export JOB -o - | jq .key\n\n"
    "npy writes the keys beside it, a JSON string a line: vectors.npy.keys.txt."
)
@with_client
def export(
    client: "Client",
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")],
    out: ExportOut,
    format: Annotated[
        OutputName | None, typer.Option("--format", help="By default, the extension of OUT.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Export what is there even if the job has not ended.")
    ] = False,
) -> None:
    """Write a job's vectors to a file, which appears whole or not at all."""
    from vectormill.domain.errors import InvalidOption
    from vectormill.files.outputs import choose_format, write_vectors

    if out == "-":
        if format == "npy":
            raise InvalidOption("npy cannot go to stdout, since its keys are a second file; give -o FILE.")
        client.export(job_id, sys.stdout.buffer, format or "ndjson", partial=partial)
        return
    write_vectors(
        lambda file, kind: client.export(job_id, file, kind, partial=partial),
        Path(out),
        choose_format(Path(out), format),
    )
    typer.echo(f"Wrote {out}.", err=True)
