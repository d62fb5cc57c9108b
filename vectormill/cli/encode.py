"""Commands encode, score and extract: read a file of texts and write a file of results.

They use a running service, or start one for the duration of the command.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import typer

from vectormill.cli.command import Client, command, top
from vectormill.cli.exits import EXIT_CODES_HELP, JOB_NOT_COMPLETED, CommandFailed, exit_code_of_job
from vectormill.cli.files import name_file, name_output, read_input
from vectormill.cli.jobs import describe_long_texts, describe_missing_prompt, job_seconds, watch_job
from vectormill.cli.printing import Outcome, tell
from vectormill.domain.encoding import RequestedOptions
from vectormill.domain.errors import InvalidOption, VectormillError
from vectormill.domain.task import EMBED, EXTRACT, JUDGE, TASKS, VECTOR, ActivationName
from vectormill.files.formats import OUTPUT_FORMATS, PAIR_FIELD, OutputName, RowsName, describe_outputs
from vectormill.files.outputs import (
    STDIN,
    STDOUT,
    check_vectors,
    choose_format,
    open_replacement,
    write_vectors,
)

SHOWN_ERRORS: Final = 10

Job = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCommand:
    """The options of commands that turn a file into a file: the files, how texts are read, and the service."""

    out: Path
    errors: Path | None = None
    model: str | None = None
    collection: str | None = None
    priority: int = 5
    key_field: str | None = None
    text_field: str = "text"
    strict: bool = False
    api_url: str | None = None
    data_dir: Path | None = None


def show_encoded(job: Job) -> None:
    seconds, result = job_seconds(job), TASKS[job["options"].get("task", EMBED)].result
    typer.echo(
        f"{job['num_done']:,} {result}s in {job['out']}, {job['num_failed']:,} items failed; "
        f"{seconds:,.1f} s, {job['num_done'] / seconds:,.0f} items/s."
    )
    for sentence in describe_long_texts(job):
        tell(sentence)


@command(
    top,
    "vectormill encode papers.jsonl -o papers.parquet",
    "vectormill encode papers.csv -o papers.npy --key-field doi --text-field abstract",
    note=EXIT_CODES_HELP,
    view=show_encoded,
)
def encode(
    input: str,
    *,
    files: FileCommand,
    format: OutputName | None = None,
    options: RequestedOptions,
    wait: bool = False,
) -> Outcome:
    """Encode a file of texts into a file of vectors.

    Uses the given API, or the stack that runs on the data directory; if there is none, starts one for the
    duration of this command.

    Args:
        wait: Keep waiting when no worker can load the model, instead of ending with an error.
    """
    pair_field = PAIR_FIELD if options.reads_pairs else None
    return run_job_on_file(input, files, format, asdict(options), pair_field=pair_field, is_patient=wait)


@command(
    top,
    "vectormill score pairs.jsonl -o scores.jsonl --model reranker",
    "vectormill score pairs.csv -o scores.parquet --text-field question --pair-field answer",
    note=EXIT_CODES_HELP,
    view=show_encoded,
)
def score(
    input: str,
    *,
    files: FileCommand,
    format: RowsName | None = None,
    max_tokens: int | None = None,
    activation: ActivationName | None = None,
    pair_field: str = PAIR_FIELD,
) -> Outcome:
    """Score a file of pairs of texts, with a classifier or by the cosine of two vectors.

    A classifier also takes texts without a pair. Each output row has a key and a score; with a classifier of several
    labels, also the best label and all probabilities.

    Args:
        out (--out -o, OUT): {rows}
        max_tokens (N, from 1): Read at most N tokens of a pair.
        activation: The activation of a classifier's outputs. By default, the model's own.
        pair_field (FIELD): The field with the second text.
    """
    wanted = {"task": JUDGE, "max_tokens": max_tokens, "activation": activation}
    return run_job_on_file(input, files, format, wanted, pair_field=pair_field)


@command(
    top,
    "vectormill extract texts.jsonl --schema schema.json -o records.jsonl --model rex",
    note='schema.json: {"person": {"born in": null}, "organization": null}\n\n' + EXIT_CODES_HELP,
    view=show_encoded,
)
def extract(
    input: str,
    *,
    schema: Path,
    files: FileCommand,
    format: RowsName | None = None,
    confidences: bool = False,
    show: int = 0,
) -> Outcome:
    """Extract entities, relations, events or classes from a file of texts, as a schema describes them.

    Each output row has a key and an output: a list of records, each a list of types with the span that was found and
    its place in the text.

    Args:
        schema (FILE): The JSON file that says what to look for.
        out (--out -o, OUT): {rows}
        confidences: Write the model's confidence with each span.
        show (N, from 0): Print the first N texts with their spans marked.
    """
    if show and ("-" in (input, str(files.out)) or choose_format(files.out, format) != "ndjson"):
        raise InvalidOption(
            "--show reads the texts and the records again: INPUT must be a file, and OUT must end in .jsonl."
        )
    wanted = {
        "task": EXTRACT,
        "extract_schema": _read_schema(schema),
        "confidences": confidences or None,
    }
    ended = run_job_on_file(input, files, format, wanted, schema=schema)
    if show:
        import msgspec

        texts = read_input(input, files.key_field, files.text_field, strict=files.strict)
        with files.out.open("rb") as lines:
            for line in show_texts(texts, map(msgspec.json.decode, lines), show):
                typer.echo(line)
    return ended


def run_job_on_file(
    input: str,
    files: FileCommand,
    format: str | None,
    wanted: dict[str, Any],
    *,
    pair_field: str | None = None,
    schema: Path | None = None,
    is_patient: bool = False,
) -> Outcome:
    """Run a job on the input file and write its results to `files.out`. Return the ended job.

    Raise CommandFailed if the job has no results.
    """
    # Check the arguments and the first items before anything is started.
    out, errors = name_output(files.out), files.errors
    kind = choose_format(out, format)
    task = TASKS[wanted.get("task") or EMBED]
    if task.result != VECTOR and not OUTPUT_FORMATS[kind].has_keys:
        raise InvalidOption(
            f"{task.result.capitalize()}s cannot be written to {out.name}: use a file name ending in "
            f"{describe_outputs(of_rows=True)}."
        )
    inputs = [STDIN if input == "-" else Path(input)]
    check_vectors(out, kind, [errors], inputs if schema is None else [*inputs, schema])
    items = read_input(input, files.key_field, files.text_field, pair_field, strict=files.strict)
    with connect_or_start(files, wanted.get("task") or "") as client:
        # This command has a patience of its own with workers that fail.
        wanted |= {"model": files.model, "collection": files.collection, "priority": files.priority}
        submitted = client.submit(items, metadata=name_file(input) or None, wait_for_worker=True, **wanted)
        try:
            job = watch_job(client, submitted, is_patient=is_patient)
        except (KeyboardInterrupt, SystemExit):  # nobody would fetch its results
            with suppress(VectormillError):
                client.cancel(submitted["id"])
                tell(f"Interrupted: job {submitted['id']} was cancelled, and nothing was written.")
            raise
        exit_code = exit_code_of_job(job["state"])
        if exit_code == JOB_NOT_COMPLETED:
            _report_failures(client, job, errors)
            raise CommandFailed(f"Job {job['id']} {job['state']}; {out} was not written.", JOB_NOT_COMPLETED)
        write_vectors(lambda path, kind: client.export(job["id"], path, kind), out, kind)
        _report_failures(client, job, errors)
        for sentence in describe_missing_prompt(job, client.models()):
            tell(sentence)
    return Outcome({**job, "out": str(out)}, exit_code, is_aside=out == STDOUT)


@contextmanager
def connect_or_start(files: FileCommand, task: str) -> Iterator[Client]:
    """Yield a client of the running service, or of a stack that is stopped at the end of the block."""
    from vectormill.cli.endpoint import find_service
    from vectormill.cli.stack import Stack
    from vectormill.client import Client
    from vectormill.models.registry import open_registry

    settings = find_service("api_url", api_url=files.api_url, data_dir=files.data_dir)
    with ExitStack() as cleanup:
        url = settings.api_url
        if url is None:
            if files.model is not None:
                # Refuse the model before a minute of starting.
                open_registry(settings).card(files.model, need=task)
            directory = settings.data_dir.expanduser()
            typer.echo(f"Starting Vectormill in {directory} …", err=True)
            url = cleanup.enter_context(Stack(directory, files.model)).wait_until_ready()
        yield cleanup.enter_context(Client(url))


def _report_failures(client: Client, job: Job, errors: Path | None) -> None:
    """Write all failed items to the file, if one was named, and print the first of them."""
    from vectormill.files.ndjson import encode_line

    with ExitStack() as cleanup:
        file = None if errors is None else cleanup.enter_context(open_replacement(errors))
        if not job["num_failed"]:
            return
        for index, error in enumerate(client.errors(job["id"])):
            if index < SHOWN_ERRORS:
                typer.echo(f"failed: {error['key']}: {error['detail']} ({error['code']})", err=True)
            elif file is None:
                tell(f"… and {job['num_failed'] - SHOWN_ERRORS:,} more; --errors FILE lists all.")
                return
            if file is not None:
                file.write(encode_line(error))


def mark_spans(text: str, records: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Return the text with each span in brackets, followed by its types: `[Ada](person) wrote it.`

    Records are as the API returns them: paths of steps {"type", "span", "offset"}. Labels that are not spans of the
    text, such as a class, come before the text.
    """
    types: dict[tuple[int, int], dict[str, None]] = {}
    labels: dict[str, None] = {}
    for record in records:
        for step in record:
            start, end = step["offset"]
            if text[start:end] == step["span"] and start < end:
                types.setdefault((start, end), {})[step["type"]] = None
            else:
                labels[step["type"]] = None
    marks: dict[int, list[tuple[int, str]]] = {}
    for (start, end), names in types.items():
        # At the same position, inner spans close before outer ones, and outer ones open before inner ones.
        marks.setdefault(start, []).append((1_000_000 - end, "["))
        marks.setdefault(end, []).append((-start, f"]({', '.join(names)})"))
    parts, before = [], 0
    for place in sorted(marks):
        parts.append(text[before:place])
        parts += [mark for _, mark in sorted(marks[place], key=lambda each: (each[1] == "[", each[0]))]
        before = place
    parts.append(text[before:])
    return "".join([*(f"({label}) " for label in labels), *parts])


def show_texts(items: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]], most: int) -> list[str]:
    """Return a line for each of the first `most` texts that have records.

    Items and rows come in the order of submission.
    """
    lines: list[str] = []
    texts = iter(items)
    for row in rows:
        if len(lines) == most:
            break
        text = next(item["text"] for item in texts if item["key"] == row["key"])
        lines.append(f"{row['key']}: {mark_spans(text, row['output'])}")
    return lines


def _read_schema(path: Path) -> str:
    """Return the file's JSON if it is a valid schema. Raise InvalidOption before anything is started."""
    from vectormill.domain.schema import parse_schema

    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidOption(f"--schema {path} cannot be read: {error}.") from error
    parse_schema(content)
    return content
