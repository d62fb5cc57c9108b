"""score and extract: a file in, a file of scores or of records out. What `encode` does, for the other tasks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vectormill.cli.arguments.options import (
    ApiUrl,
    Collection,
    DataDir,
    Json,
    KeyField,
    Model,
    Priority,
    Strict,
    TextField,
)
from vectormill.cli.commands.encode import PAIR_FIELD, Service, carry_out, choose_unicode_errors, report
from vectormill.cli.exits import EXIT_CODES_HELP, exit_code_of_job
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import EXTRACT, JUDGE, ActivationName
from vectormill.files.formats import INPUT_HELP, RowsName, describe_outputs

if TYPE_CHECKING:
    from vectormill.files.rows import Fields

app = typer.Typer()


@app.command(
    epilog="Examples: vectormill score pairs.jsonl -o scores.jsonl --model reranker\n\n"
    "vectormill score pairs.csv -o scores.parquet --text-field question --pair-field answer\n\n"
    f"{EXIT_CODES_HELP}"
)
def score(
    input: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="OUT", help=f"{describe_outputs(of_rows=True)}."),
    ],
    format: Annotated[RowsName | None, typer.Option("--format", help="Else told by OUT's name.")] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="Write every failed item here, as NDJSON.")
    ] = None,
    model: Model = None,
    collection: Collection = None,
    priority: Priority = 5,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens", metavar="N", min=1, help="Read so many tokens of a pair.", show_default=False
        ),
    ] = None,
    activation: Annotated[
        ActivationName | None,
        typer.Option("--activation", help="Of a classifier's numbers; else the model's.", show_default=False),
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
    """Score a file of pairs of texts: how they belong together, by a classifier or by the cosine of two vectors.

    A classifier also takes texts without a pair. What is written has a key, a score, and of a classifier with several
    labels the best one and all probabilities.
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
    schema: Annotated[Path, typer.Option("--schema", metavar="FILE", help="What is looked for, as JSON.")],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="OUT", help=f"{describe_outputs(of_rows=True)}."),
    ],
    format: Annotated[RowsName | None, typer.Option("--format", help="Else told by OUT's name.")] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="Write every failed item here, as NDJSON.")
    ] = None,
    confidences: Annotated[
        bool, typer.Option("--confidences", help="With each span how sure the model is.")
    ] = False,
    show: Annotated[
        int,
        typer.Option(
            "--show", metavar="N", min=0, help="Print so many of the texts with their spans marked."
        ),
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
    """Extract from a file of texts what a schema asks for: entities, relations, events or classes.

    What is written has a key and an output: a list of records, each a list of types with the span that was found and
    where it stands in the text.
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
    """Prints the first texts that have records, spans marked."""
    import msgspec

    from vectormill.cli.views.spans import show_texts
    from vectormill.files.texts import read_texts

    if most:
        with out.open("rb") as lines:
            rows = (msgspec.json.decode(line) for line in lines)
            for line in show_texts(read_texts(input, fields), rows, most):
                typer.echo(line)


def _read_schema(path: Path) -> str:
    """The file's JSON, if it is a schema. Raises InvalidOption, before anything is started."""
    from vectormill.domain.tasks.schema import parse_schema

    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidOption(f"--schema {path} cannot be read: {error}.") from error
    parse_schema(content)
    return content
