"""encode, score and extract: a file of texts in, a file of results out, by a running service or one of our own."""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from vectormill.cli.exits import EXIT_CODES_HELP, JOB_NOT_COMPLETED, CommandFailed, exit_code_of_job
from vectormill.cli.options import (
    ApiUrl,
    Collection,
    DataDir,
    ErrorsFile,
    Json,
    KeyField,
    Model,
    Priority,
    RowsFormat,
    RowsOut,
    Strict,
    TextField,
    take_encoding_flags,
)
from vectormill.domain.encoding import RequestedOptions
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import EMBED, EXTRACT, JUDGE, TASKS, VECTOR, ActivationName
from vectormill.files.formats import INPUT_HELP, OUTPUT_FORMATS, OUTPUT_HELP, OutputName, describe_outputs

if TYPE_CHECKING:
    from vectormill.client import Client
    from vectormill.files.rows import Fields, UnicodeErrors

app = typer.Typer()

SHOWN_ERRORS: Final = 10
PAIR_FIELD: Final = "text_pair"


@app.command(
    epilog="Examples: vectormill encode papers.jsonl -o papers.parquet\n\n"
    "vectormill encode papers.csv -o papers.npy --key-field doi --text-field abstract\n\n"
    f"{EXIT_CODES_HELP}"
)
@take_encoding_flags
def encode(
    input: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help=OUTPUT_HELP)],
    format: Annotated[
        OutputName | None, typer.Option("--format", help="By default, the extension of OUT.")
    ] = None,
    errors: ErrorsFile = None,
    model: Model = None,
    collection: Collection = None,
    priority: Priority = 5,
    options: RequestedOptions,
    key_field: KeyField = None,
    text_field: TextField = "text",
    strict: Strict = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Keep waiting when no worker can load the model, instead of ending with an error."
        ),
    ] = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Encode a file of texts into a file of vectors.

    Uses the given API, or the stack that runs on the data directory; where there is none, starts one for
    the time of this command.
    """
    from vectormill.files.rows import Fields

    pair_field = PAIR_FIELD if options.task == JUDGE else None
    job = carry_out(
        input,
        Fields(key_field, text_field, pair_field, errors=choose_unicode_errors(strict=strict)),
        out,
        format,
        errors,
        Service(api_url, data_dir, model),
        {"collection": collection, "priority": priority, **asdict(options)},
        is_strict=strict,
        is_patient=wait,
    )
    report(job, out, is_json=json)
    raise typer.Exit(exit_code_of_job(job["state"]))


@dataclass(frozen=True, slots=True)
class Service:
    """The service and the model that a command asks for."""

    api_url: str | None
    data_dir: Path | None
    model: str | None


def choose_unicode_errors(*, strict: bool) -> "UnicodeErrors":
    from vectormill.files.rows import FAIL_ALONE, REFUSE

    return REFUSE if strict else FAIL_ALONE


def carry_out(
    input: str,
    fields: "Fields",
    out: Path,
    format: str | None,
    errors: Path | None,
    service: Service,
    wanted: dict[str, Any],
    *,
    is_strict: bool,
    is_patient: bool = False,
) -> Mapping[str, Any]:
    """Return the job, which has ended and whose results are in `out`. Raise CommandFailed when there are none."""
    from vectormill.cli.views.summary import describe_missing_prompt
    from vectormill.files.outputs import check_output, choose_format, write_vectors
    from vectormill.files.texts import look_at_texts, read_texts

    # All that can be wrong with the call is found before anything is started.
    items = look_at_texts(read_texts(input, fields), whole=is_strict)
    kind = choose_format(out, format)
    task = TASKS[wanted.get("task") or EMBED]
    if task.result != VECTOR and not OUTPUT_FORMATS[kind].has_keys:
        raise InvalidOption(
            f"{task.result.capitalize()}s are no matrix: let {out.name} end in {describe_outputs(of_rows=True)}."
        )
    for path in (out, errors):
        if path is not None:
            check_output(path)
    with _client(service.api_url, service.data_dir, service.model) as client:
        job = _watch(client, client.submit(items, model=service.model, **wanted), is_patient=is_patient)
        if exit_code_of_job(job["state"]) == JOB_NOT_COMPLETED:
            _report_failures(client, job, errors)
            raise CommandFailed(f"Job {job['id']} {job['state']}; {out} was not written.", JOB_NOT_COMPLETED)
        write_vectors(lambda file, kind: client.export(job["id"], file, kind), out, kind)
        _report_failures(client, job, errors)
        for sentence in describe_missing_prompt(job, client.models()):
            typer.echo(sentence, err=True)
    return job


@contextmanager
def _client(api_url: str | None, data_dir: Path | None, model: str | None) -> "Iterator[Client]":
    """Yield a client of the service in question, or of a stack that lives as long as this block."""
    from vectormill.cli.endpoint import await_api_url
    from vectormill.cli.stack import Stack
    from vectormill.client import Client
    from vectormill.models.registry import Registry
    from vectormill.settings import load_settings

    settings = load_settings(api_url=api_url, data_dir=data_dir)
    with ExitStack() as cleanup:
        url = await_api_url(api_url, data_dir, settings)
        if url is None:
            if model is not None:
                Registry(settings.models).card(model)  # what is refused is told before a minute of starting
            directory = settings.data_dir.expanduser()
            typer.echo(f"Starting Vectormill in {directory} …", err=True)
            url = cleanup.enter_context(Stack(directory, model)).wait_until_ready()
        yield cleanup.enter_context(Client(url))


def _watch(client: "Client", job: Mapping[str, Any], *, is_patient: bool) -> Mapping[str, Any]:
    """Follow the job to its end. Interrupted, it cancels it: nobody would fetch what it goes on making."""
    from vectormill.cli.views.job_watch import watch_job
    from vectormill.domain.errors import VectormillError

    try:
        return watch_job(client, job, is_patient=is_patient)
    except (KeyboardInterrupt, SystemExit):
        with contextlib.suppress(VectormillError):
            client.cancel(job["id"])
            typer.echo(f"Interrupted: job {job['id']} is cancelled, nothing was written.", err=True)
        raise


def _report_failures(client: "Client", job: Mapping[str, Any], errors: Path | None) -> None:
    """Write all failed items to the file, if one was named, and say the first of them."""
    from vectormill.files.ndjson import encode_line
    from vectormill.files.replacement import open_replacement

    with ExitStack() as cleanup:
        file = None if errors is None else cleanup.enter_context(open_replacement(errors))
        if not job["num_failed"]:
            return
        for index, error in enumerate(client.errors(job["id"])):
            if index < SHOWN_ERRORS:
                typer.echo(f"failed: {error['key']}: {error['detail']} ({error['code']})", err=True)
            elif file is None:
                typer.echo(
                    f"… and {job['num_failed'] - SHOWN_ERRORS:,} more; --errors FILE has all.", err=True
                )
                return
            if file is not None:
                file.write(encode_line(error))


def report(job: Mapping[str, Any], out: Path, *, is_json: bool) -> None:
    from vectormill.cli.views.listing import print_json
    from vectormill.cli.views.summary import describe_long_texts, job_seconds

    if is_json:
        print_json({**job, "out": str(out)})
        return
    seconds = job_seconds(job)
    typer.echo(
        f"{job['num_done']:,} {_result(job)}s in {out}, {job['num_failed']:,} items failed; "
        f"{seconds:,.1f} s, {job['num_done'] / seconds:,.0f} items/s."
    )
    for sentence in describe_long_texts(job):
        typer.echo(sentence, err=True)


def _result(job: Mapping[str, Any]) -> str:
    return TASKS[job["options"].get("task", EMBED)].result


@app.command(
    epilog="Examples: vectormill score pairs.jsonl -o scores.jsonl --model reranker\n\n"
    "vectormill score pairs.csv -o scores.parquet --text-field question --pair-field answer\n\n"
    f"{EXIT_CODES_HELP}"
)
def score(
    input: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    *,
    out: RowsOut,
    format: RowsFormat = None,
    errors: ErrorsFile = None,
    model: Model = None,
    collection: Collection = None,
    priority: Priority = 5,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", metavar="N", min=1, help="Read at most N tokens of a pair.", show_default=False
        ),
    ] = None,
    activation: Annotated[
        ActivationName | None,
        typer.Option(
            "--activation",
            help="The activation of a classifier's outputs. By default, the model's own.",
            show_default=False,
        ),
    ] = None,
    key_field: KeyField = None,
    text_field: TextField = "text",
    pair_field: Annotated[
        str, typer.Option("--pair-field", metavar="FIELD", help="The field with the second text.")
    ] = PAIR_FIELD,
    strict: Strict = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Score a file of pairs of texts, with a classifier or by the cosine of two vectors.

    A classifier also takes texts without a pair. Each output row has a key and a score; with a classifier of several
    labels, also the best label and all probabilities.
    """
    from vectormill.files.rows import Fields

    job = carry_out(
        input,
        Fields(key_field, text_field, pair_field, errors=choose_unicode_errors(strict=strict)),
        out,
        format,
        errors,
        Service(api_url, data_dir, model),
        {
            "collection": collection,
            "priority": priority,
            "task": JUDGE,
            "max_tokens": max_tokens,
            "activation": activation,
        },
        is_strict=strict,
    )
    report(job, out, is_json=json)
    raise typer.Exit(exit_code_of_job(job["state"]))


@app.command(
    epilog="Examples: vectormill extract texts.jsonl --schema schema.json -o records.jsonl --model rex\n\n"
    'schema.json: {"person": {"born in": null}, "organization": null}\n\n'
    f"{EXIT_CODES_HELP}"
)
def extract(
    input: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    *,
    schema: Annotated[
        Path, typer.Option("--schema", metavar="FILE", help="The JSON file that says what to look for.")
    ],
    out: RowsOut,
    format: RowsFormat = None,
    errors: ErrorsFile = None,
    confidences: Annotated[
        bool, typer.Option("--confidences", help="Write the model's confidence with each span.")
    ] = False,
    show: Annotated[
        int,
        typer.Option("--show", metavar="N", min=0, help="Print the first N texts with their spans marked."),
    ] = 0,
    model: Model = None,
    collection: Collection = None,
    priority: Priority = 5,
    key_field: KeyField = None,
    text_field: TextField = "text",
    strict: Strict = False,
    api_url: ApiUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Extract entities, relations, events or classes from a file of texts, as a schema describes them.

    Each output row has a key and an output: a list of records, each a list of types with the span that was found and
    its place in the text.
    """
    from vectormill.files.outputs import choose_format
    from vectormill.files.rows import Fields

    fields = Fields(key_field, text_field, errors=choose_unicode_errors(strict=strict))
    if show and (input == "-" or choose_format(out, format) != "ndjson"):
        raise InvalidOption("--show reads the texts and the records again: from a file, into a .jsonl.")
    job = carry_out(
        input,
        fields,
        out,
        format,
        errors,
        Service(api_url, data_dir, model),
        {
            "collection": collection,
            "priority": priority,
            "task": EXTRACT,
            "extract_schema": _read_schema(schema),
            "confidences": confidences or None,
        },
        is_strict=strict,
    )
    report(job, out, is_json=json)
    _show(input, fields, out, show)
    raise typer.Exit(exit_code_of_job(job["state"]))


def _show(input: str, fields: "Fields", out: Path, most: int) -> None:
    """Print the first texts that have records, spans marked."""
    import msgspec

    from vectormill.cli.views.spans import show_texts
    from vectormill.files.texts import read_texts

    if most:
        with out.open("rb") as lines:
            rows = (msgspec.json.decode(line) for line in lines)
            for line in show_texts(read_texts(input, fields), rows, most):
                typer.echo(line)


def _read_schema(path: Path) -> str:
    """Return the file's JSON if it is a schema. Raise InvalidOption, before anything is started."""
    from vectormill.domain.tasks.schema import parse_schema

    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidOption(f"--schema {path} cannot be read: {error}.") from error
    parse_schema(content)
    return content
