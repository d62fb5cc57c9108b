"""plan: which devices would hold which part of a model, and why. Starts nothing and loads no weights."""

import json
from typing import Annotated

import typer

app = typer.Typer()


@app.command(
    epilog="Examples:\n\n"
    "  vectormill plan --model all-MiniLM-L6-v2\n\n"
    "  vectormill plan --model my-7b --devices 4x24GiB,nvlink --precision bf16\n\n"
    "  vectormill plan --model ./my-7b --devices 2x16GiB+1x80GiB --json"
)
def plan(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="A registered model, a directory with a config.json, or OWNER/NAME on the Hugging Face hub.",
        ),
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            "--devices",
            metavar="DEVICES",
            help="auto, a list such as cuda:0,cuda:1, or a description such as 4x24GiB,nvlink.",
        ),
    ] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", help="Of the weights: auto, fp32, fp16, bf16, int8 or int4.")
    ] = "auto",
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", help="auto, replicate, pipeline, layers, tensor, fully_sharded or hybrid."
        ),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON, for machines.")] = False,
) -> None:
    """Show how a model would be placed on this machine's devices, or on others that you describe.

    Predicted rates rank plans; they are no measurement. Exit code 2 says that the model does not fit.
    """
    from vectormill.registry import DEFAULT_MODEL, Registry
    from vectormill.settings import load_settings
    from worker.devices.described import describe_inventory, is_description
    from worker.devices.detect import detect_inventory
    from worker.placement.drafts import AUTO
    from worker.placement.picture import draw_placement, placement_json
    from worker.plan import plan_worker
    from worker.settings import load_worker_settings

    is_described = is_description(devices)
    inventory = describe_inventory(devices) if is_described else detect_inventory()
    settings = load_worker_settings(
        devices=AUTO if is_described else devices, precision=precision, strategy=strategy
    )
    card = Registry(load_settings().models).outline(model or DEFAULT_MODEL)
    placement = plan_worker(card, inventory, settings)
    if as_json:
        typer.echo(json.dumps(placement_json(placement), indent=2))
    else:
        typer.echo(draw_placement(placement))
