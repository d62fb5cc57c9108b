"""Commands that submit, watch, pause, cancel, export and delete jobs, and the formatting of their output."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import typer

from vectormill.cli.command import Client, Names, command, top
from vectormill.cli.exits import EXIT_CODES_HELP, UNAVAILABLE, CommandFailed, exit_code_of_job
from vectormill.cli.files import name_file, name_output, read_input, tell_written
from vectormill.cli.printing import follow, listing, print_facts, print_json, tell
from vectormill.cli.service import CHOICES, describe_choice, show_workers_and_schedules
from vectormill.domain.encoding import RequestedOptions, find_result
from vectormill.domain.errors import InvalidOption
from vectormill.domain.options import find_given
from vectormill.domain.task import VECTOR
from vectormill.files.formats import PAIR_FIELD, InputName, OutputName
from vectormill.files.outputs import check_vectors, choose_format, write_vectors
from vectormill.jobs.bottleneck import WAIT
from vectormill.jobs.job import CANCELLING, JobOptions

# Fields that are shown as sentences; --json prints them unchanged.
STAGE_FIELDS: Final = ("stages", "bound_by", "stage_seconds")
# Workers retry loading a model after 30 s, and the retry may succeed.
PATIENCE_SECONDS: Final = 45.0

Job = Mapping[str, Any]


def show_job(job: Job) -> None:
    stages = {fact.name: f"{fact.value} ({fact.reason})" for fact in describe_stages(job)}
    plain = {name: value for name, value in job.items() if name not in STAGE_FIELDS}
    print_facts((plain | stages).items())
    for sentence in describe_long_texts(job):
        tell(sentence)


def show_submitted(job: Job) -> None:
    typer.echo(job["id"])
    submitted = "Its objects are being read." if job["input"] else f"{job['num_items']:,} items submitted."
    tell(f"{submitted} Watch it with `vectormill status {job['id']} --watch`.")
    if job.get("waiting_because"):
        tell(job["waiting_because"])


@command(
    top,
    "vectormill submit papers.jsonl.gz --collection papers",
    "zcat *.gz | jq -c '{key: .doi, text: .abstract}' | vectormill submit - --collection papers",
    "vectormill submit 's3://bucket/articles/*.parquet' --text-field body --key-field id --to s3://bucket/vectors",
    view=show_submitted,
)
def submit(
    client: Client,
    input: str,
    *,
    model: str | None = None,
    job: JobOptions,
    options: RequestedOptions,
    metadata: str | None = None,
    key_field: str | None = None,
    text_field: str = "text",
    pair_field: str = PAIR_FIELD,
    strict: bool = False,
    metadata_field: Names | None = None,
    format: InputName | None = None,
    unique: bool = False,
    idempotency_key: str | None = None,
    gzip: bool = False,
) -> Job:
    """Submit a file of texts, or objects of a store, as a job and print the job's id.

    Objects (s3://, gs://, az://, file://; patterns with * and **) are not uploaded: the service and its workers read
    them with credentials of their own.

    Args:
        metadata_field (NAME): Keep this column with each result.
        format (NAME): jsonl, csv, tsv or parquet. By default, the name of the file or object decides.
        unique: Refuse objects in which a key occurs twice; the service reads all keys first. In a file of texts
            keys are always compared.
        idempotency_key (KEY): Submitting again with the same key returns the same job.
    """
    shared: dict[str, Any] = {
        "model": model,
        "idempotency_key": idempotency_key,
        **find_given(job),
        **find_given(options),
    }
    if "://" in input:
        if strict or gzip or (metadata and metadata_field):
            raise InvalidOption(
                "--strict and --gzip are for files that this command sends. Of objects, it keeps columns by "
                "--metadata-field or describes the job by --metadata, but not both."
            )
        if unique:
            from vectormill.jobs.duplicate_keys import BYTES_PER_KEY

            tell(
                f"The service compares all keys before it begins; this needs {BYTES_PER_KEY} bytes of its disk for "
                "each row."
            )
        return client.submit_objects(
            input,
            text=text_field,
            key=key_field,
            pair=pair_field if options.reads_pairs else None,
            metadata=parse_metadata(metadata) or metadata_field,
            format=format,
            unique=unique,
            **shared,
        )
    items = read_input(input, key_field, text_field, pair_field, metadata_field, strict=strict, format=format)
    named = {**name_file(input), **(parse_metadata(metadata) or {})} or None
    return client.submit(items, metadata=named, gzip=gzip, **shared)


def parse_metadata(text: str | None) -> dict[str, Any] | None:
    """Parse the JSON object given with --metadata. Raise InvalidOption if it is invalid."""
    import json

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    if text is None:
        return None
    try:
        # Python's parser accepts NaN and Infinity, which are not JSON.
        value = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise InvalidOption(f"--metadata is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise InvalidOption('--metadata must be a JSON object, such as {"source": "arxiv"}.')
    return value


@command(
    top,
    "vectormill jobs --state running",
    "vectormill jobs --collection docs --since 2026-11-23",
    view=listing(
        "id",
        "state",
        "collection",
        ("items", lambda job: f"{job['num_done'] + job['num_failed']:,} of {job['num_items']:,}"),
        ("failed", "num_failed"),
        ("created", lambda job: job["created_at"][:16].replace("T", " ")),
    ),
)
def jobs(
    client: Client,
    *,
    state: str | None = None,
    collection: str | None = None,
    since: str | None = None,
    until: str | None = None,
    limit: int = 50,
) -> Iterator[Job]:
    """List jobs, newest first.

    Args:
        state (STATE): List only jobs in this state.
        collection (NAME): List only jobs that write to this collection.
        since (MOMENT): List only jobs submitted from this moment on: ISO 8601, in UTC unless it names another zone.
        until (MOMENT): List only jobs submitted before this moment.
    """
    from vectormill.moments import parse_moment

    found = client.jobs(
        state,
        collection=collection,
        since=None if since is None else parse_moment("--since", since),
        until=None if until is None else parse_moment("--until", until),
    )
    return itertools.islice(found, limit)


@command(top, "vectormill status JOB --watch", "vectormill status", note=f"With --watch: {EXIT_CODES_HELP}")
def status(client: Client, job_id: str | None = None, *, watch: bool = False, json: bool = False) -> None:
    """Show a job's progress, or the workers with their rates, memory and bottleneck, and the schedules.

    Args:
        job_id ([JOB]): The job's id, or its first eight digits or more; without one, the live workers are shown.
        watch: Follow the job until it ends.
    """
    from vectormill.client.progress import look_at_job

    if job_id is None:
        if watch:
            raise typer.BadParameter("--watch needs a JOB.", param_hint="--watch")
        show_workers_and_schedules(client, is_json=json)
        return
    job = follow(client.wait, job_id, look_at_job) if watch else client.job(job_id)
    if json:
        print_json(job)
    else:
        show_job(job)
        for sentence in describe_missing_prompt(job, client.models()):
            tell(sentence)
    if watch:
        raise typer.Exit(exit_code_of_job(job["state"]))


@command(
    top,
    "vectormill pause JOB",
    "vectormill jobs --state running --json | jq -r .id | xargs -n 1 vectormill pause",
    view=show_job,
)
def pause(client: Client, job_id: str) -> Job:
    """Pause a job: no more of its chunks are handed out until it is resumed; those on workers finish."""
    return client.pause(job_id)


@command(top, "vectormill resume JOB && vectormill status JOB --watch", view=show_job)
def resume(client: Client, job_id: str) -> Job:
    """Resume a paused job where it stopped."""
    return client.resume(job_id)


@command(top, "vectormill cancel JOB", view=show_job)
def cancel(client: Client, job_id: str) -> Job:
    """Cancel a job. Vectors that are already committed stay."""
    return client.cancel(job_id)


@command(top, "vectormill retry JOB && vectormill status JOB --watch", view=show_job)
def retry(client: Client, job_id: str) -> Job:
    """Encode only the failed items of a job again. A paused job stays paused."""
    return client.retry(job_id)


@command(top, "vectormill delete JOB", "vectormill cancel JOB && vectormill delete JOB")
def delete(client: Client, job_id: str) -> str:
    """Delete an ended job with its texts, errors and vectors. Rows in collections stay."""
    job = client.job(job_id)
    if job["state"] == CANCELLING:
        client.wait(job["id"])  # this takes seconds, until workers have noticed the cancellation
    client.delete(job["id"])
    return f"Deleted job {job['id']}."


@command(top, "vectormill errors JOB --json > failed.jsonl", view=listing("key", "code", "detail"))
def errors(client: Client, job_id: str) -> Iterator[Mapping[str, Any]]:
    """List a job's failed items with their codes and reasons."""
    return client.errors(job_id)


@command(top, "vectormill truncated JOB > cut.txt", view=listing("key"))
def truncated(client: Client, job_id: str) -> Iterator[Mapping[str, Any]]:
    """List the keys of a job's texts that were cut because they were too long."""
    return client.truncated(job_id)


@command(
    top,
    "vectormill export JOB -o vectors.parquet",
    "vectormill export JOB -o - | jq .key",
    note="npy has no keys: they are written to vectors.npy.keys.txt, one JSON string per line.",
)
def export(
    client: Client, job_id: str, *, out: Path, format: OutputName | None = None, partial: bool = False
) -> str | None:
    """Write a job's vectors to a file, which appears whole or not at all.

    Args:
        partial: Export what is there even if the job has not ended.
    """
    path = name_output(out)
    kind = choose_format(path, format)
    check_vectors(path, kind)
    write_vectors(lambda path, kind: client.export(job_id, path, kind, partial=partial), path, kind)
    return tell_written(path)


def watch_job(client: Client, job: Job, *, poll_seconds: float = 0.5, is_patient: bool = False) -> Job:
    """Show a job's progress until it ends, and return the ended job.

    Raise CommandFailed when no live worker has been able to load the job's model for PATIENCE_SECONDS, unless
    `is_patient`. The job itself keeps waiting.
    """
    from vectormill.client.progress import Progress, look_at_job

    waiting_since: float | None = None
    with Progress(look_at_job) as progress:

        def look(job: Job) -> None:
            nonlocal waiting_since
            progress(job)
            now = time.monotonic()
            if is_patient or not job.get("waiting_because"):
                waiting_since = None
            elif waiting_since is None:
                waiting_since = now
            if waiting_since is not None and now >= waiting_since + PATIENCE_SECONDS:
                waiting_since = now
                workers = [worker for worker in client.workers() if worker["model"] == job["model"]]
                # A worker that cannot load its model has no slots. With no workers at all, one may still be starting.
                if workers and not any(worker["slots"] for worker in workers):
                    raise CommandFailed(
                        f"{job['waiting_because']} Nothing was written. Job {job['id']} continues once a worker has "
                        f"loaded its model: `vectormill status {job['id']} --watch` waits for that, `vectormill export "
                        f"{job['id']} -o OUT` writes its results, and `vectormill cancel {job['id']}` cancels it.",
                        UNAVAILABLE,
                    )

        return client.wait(job["id"], look, poll_seconds=poll_seconds)


@dataclass(frozen=True, slots=True)
class Fact:
    """A line of a summary; `reason` says why the value was chosen, if it was a choice."""

    name: str
    value: str
    reason: str = ""


def job_seconds(job: Job) -> float:
    """Return the seconds from submission to the last commit, by the database's clock."""
    created, finished = (datetime.fromisoformat(job[name]) for name in ("created_at", "finished_at"))
    return max((finished - created).total_seconds(), 1e-6)


def summarize_job(job: Job, workers: Sequence[Mapping[str, Any]], model_reason: str = "") -> list[Fact]:
    """Return the lines of a job's closing summary, with the choices of the workers that serve its model."""
    seconds = job_seconds(job)
    counted = (
        ("passages", "num_passages", f"read from texts longer than {_limit(job)}"),
        ("reused", "num_reused", "given the vector of an identical text instead of being encoded"),
        ("repeated", "num_repeated", "replaced by a later text with the same key"),
    )
    lines = [
        Fact("items", f"{job['num_items']:,}"),
        Fact("failed", f"{job['num_failed']:,}"),
        Fact("truncated", f"{job['truncated_items']:,}", f"longer than {_limit(job)} and cut there"),
        *(Fact(name, f"{job[field]:,}", note) for name, field, note in counted if job.get(field)),
        Fact("tokens", f"{job['num_tokens']:,}"),
        Fact("seconds", f"{seconds:,.1f}", "from the submission to the last commit"),
        Fact("texts/s", f"{job['num_done'] / seconds:,.0f}"),
        Fact("tokens/s", f"{job['num_tokens'] / seconds:,.0f}"),
        Fact(
            "padding waste", f"{job['padding_waste']:.1%}", "share of the computed tokens that were padding"
        ),
        *describe_stages(job),
        Fact("model", job["model"], model_reason),
    ]
    reports = [worker["report"] for worker in workers if worker["model"] == job["model"]]
    choices = {name: {describe_choice(report, name) for report in reports} for name in CHOICES}
    return lines + [Fact(name, *choice) for name, found in choices.items() for choice in sorted(found)]


def describe_long_texts(job: Job) -> list[str]:
    """Return sentences on texts that were longer than the model reads; none if there were none."""
    sentences = []
    num_cut, num_passages = job["truncated_items"], job.get("num_passages", 0)
    if num_cut:
        subject = "1 text was" if num_cut == 1 else f"{num_cut:,} texts were"
        # Vectors of passages can be combined; scores and records cannot.
        other = ", or submit with --long-texts passages" if find_result(job["options"]) == VECTOR else ""
        sentences.append(
            f"{subject} longer than {_limit(job)} and cut there; list them with `vectormill truncated {job['id']}`"
            f"{other}."
        )
    if num_passages:
        sentences.append(f"Texts longer than {_limit(job)} were read in {num_passages:,} passages.")
    return sentences


def describe_missing_prompt(job: Job, models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence if the model's authors recommend a prompt and the job has none."""
    if job["options"].get("prompt") or find_result(job["options"]) != VECTOR:
        return []
    told = [model.get("unprompted") for model in models if model["name"] == job["model"]]
    return [f"The texts were encoded without a prompt. {sentence}" for sentence in told if sentence]


def _limit(job: Job) -> str:
    max_tokens = job["options"].get("max_tokens")
    return f"{max_tokens:,} tokens" if max_tokens else "the model reads"


def describe_stages(record: Job) -> list[Fact]:
    """Return lines on a job's bottleneck and how busy its stages were; none while that is unknown."""
    lines = []
    bound_by = record.get("bound_by")
    if bound_by:
        lines.append(Fact("bottleneck", bound_by["value"], bound_by["reason"]))
    stages: Mapping[str, Mapping[str, float]] = record.get("stages") or {}
    if stages:
        # Leave out waiting: with several chunks in flight it adds up to several hundred per cent.
        busy = {stage: figures["share"] for stage, figures in stages.items() if stage != WAIT}
        shares = " · ".join(f"{stage} {share:.0%}" for stage, share in busy.items())
        lines.append(Fact("stages", shares, "of the time with a chunk in progress, per device or thread"))
    return lines
