"""gpu: the first hour on a card. Tries each switch, decides which pay, and writes the defaults; steps that resume."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from benchmarks.cases.gpu import tables
from benchmarks.cases.gpu.choosing import Pair, Shape, Together, choose_defaults, order_candidates
from benchmarks.cases.gpu.driver import describe_plan, drive
from benchmarks.cases.gpu.plan import (
    ALONE,
    BESIDE,
    BUDGETS,
    CARD,
    HOST,
    QUICK,
    RANKS,
    TOGETHER,
    Scale,
    Step,
    make_plan,
)
from benchmarks.cases.gpu.process import StepProcess
from benchmarks.cases.gpu.state import DONE, Identity, State, digest_code, find_commit
from benchmarks.models.shapes import SHAPES
from benchmarks.order import CPU, BenchmarkFailed, Order
from benchmarks.peers.environment import HOME, ROOT
from benchmarks.results.report import Report
from benchmarks.results.writing import write_number
from worker.devices.detect import detect_inventory
from worker.devices.device import CUDA, Device, parse_devices
from worker.encoder.backends import AUTO
from worker.encoder.switches import (
    DEFAULTS_PATH,
    SWITCHES,
    Place,
    Switch,
    SwitchDefaults,
    choose_switches,
    is_package_installed,
)

STATE: Final = HOME / "gpu"
QUICK_STATE: Final = HOME / "gpu-quick"
# Not with the records: they are the same for every card, and gigabytes.
MODELS: Final = HOME / "gpu-models"
MOST_DEVICES: Final = 2
TRIED: Final = "tried"
# What decides which switches a card gets: none of it may be left to do when that is written.
DECIDING: Final = (ALONE, TOGETHER, RANKS)
BY_NAME: Final = frozenset(name for name, switch in SWITCHES.items() if switch.changes_vectors)


def measure(order: Order) -> Report:
    scale = QUICK if order.is_quick else CARD
    devices = find_devices(order)
    plan = make_plan(scale, tuple(SWITCHES.values()), partial(find_obstacle, devices[0]), len(devices))
    directory = order.state or (QUICK_STATE if order.is_quick else STATE)
    identity = make_identity(devices[0], scale)
    state = State.open(directory, identity)
    order.steps.begin("gpu", 1 + len(plan))
    order.steps.step(f"{describe_plan(plan, state)}; records in {directory}")
    waiting = drive(
        plan,
        state,
        StepProcess(scale.name, tuple(device.name for device in devices), MODELS, directory),
        give,
        say=order.steps.step,
        clock=time.monotonic,
        total_seconds=60 * order.minutes,
        again=order.again,
    )
    shapes = collect_shapes(plan, state)
    chosen, reasons = choose_defaults(shapes, tuple(SWITCHES), BY_NAME)
    if order.is_written:
        refuse_unfinished(plan, state)
        write_defaults(identity, chosen)
    return make_report(identity, plan, state, shapes, (chosen, reasons), waiting)


def find_devices(order: Order) -> tuple[Device, ...]:
    """The first two GPUs of the first one's kind; two halves of the processor for a quick look at the mechanics.

    Raises BenchmarkFailed where there is no GPU, with what can be done without one.
    """
    inventory = detect_inventory()
    if order.device == CPU:
        if not order.is_quick:
            raise BenchmarkFailed(
                "A processor has nothing to decide here; `--device cpu --quick` tests the mechanics."
            )
        count = min(MOST_DEVICES, len(inventory.physical_cores))
        return tuple(parse_devices(",".join(f"cpu:{number}" for number in range(count)), inventory))
    found = [device for device in inventory.accelerators if device.kind == CUDA]
    if not found:
        raise BenchmarkFailed("This machine has no GPU; `--device cpu --quick` tests the mechanics.")
    named = [device for device in found if device.name == order.device] if order.device != CUDA else found
    if not named:
        there = ", ".join(device.name for device in found)
        raise BenchmarkFailed(f"There is no device {order.device!r}; there is {there}.")
    alike = [each for each in found if each is not named[0] and each.description == named[0].description]
    return (named[0], *alike[: MOST_DEVICES - 1])


def find_obstacle(device: Device, switch: Switch, shape: str) -> str:
    """Why the switch cannot be tried with the shape, as its own table says it; empty where it can."""
    hidden_size = int(SHAPES[shape].config["hidden_size"])
    place = Place(
        replace(device, features=device.features | {TRIED}), hidden_size, is_shared=switch.is_of_ranks
    )
    # As if it were among the card's defaults: then what stands in its way is a reason and no error.
    choices = choose_switches(
        AUTO, place, is_package_installed, {TRIED: SwitchDefaults((switch.name,), "it is tried")}
    )
    return next((choice.reason for choice in choices if not choice.is_on), "")


def make_identity(device: Device, scale: Scale) -> Identity:
    capability = next(
        (each for each in sorted(device.features) if each.startswith(("sm_", "gfx"))), device.kind
    )
    return Identity(
        device.description or device.name,
        capability,
        version("torch"),
        scale.name,
        digest_code(ROOT),
        find_commit(ROOT),
    )


def give(step: Step, state: State) -> Mapping[str, Any]:
    """What a step goes by: the matrix rate, the candidates of a shape, or those of them that were kept."""
    given: dict[str, Any] = {"rates": tables.find_rates(state)}
    if step.kind == TOGETHER:
        alone = [pair for pair in read_alone(step.shape, state).values() if pair]
        given["candidates"] = order_candidates(alone, BY_NAME)
    elif step.kind in (BUDGETS, HOST, BESIDE):
        together = read_together(step.shape, state)
        given["kept"] = together.kept if together else ()
    return given


def collect_shapes(plan: Sequence[Step], state: State) -> dict[str, Shape]:
    """By shape, and by strategy for those that devices share, where each switch is tried alone."""
    names = dict.fromkeys(step.shape for step in plan if step.kind == ALONE)
    shapes = {shape: Shape(read_alone(shape, state), read_together(shape, state)) for shape in names}
    for step in plan:
        record = state.find(step.name) if step.kind == RANKS else None
        if record is not None:
            pair = Pair.from_json(record.result) if record.outcome == DONE else None
            shapes[f"{step.shape}, {step.strategy}, {step.switch}"] = Shape(
                {step.switch: pair}, Together((step.switch,))
            )
    return shapes


def read_alone(shape: str, state: State) -> dict[str, Pair | None]:
    """By switch; None for one that failed. What was not tried is not among them."""
    found: dict[str, Pair | None] = {}
    for name in SWITCHES:
        record = state.find(f"{ALONE} {shape} {name}")
        if record is not None:
            found[name] = Pair.from_json(record.result) if record.outcome == DONE else None
    return found


def read_together(shape: str, state: State) -> Together | None:
    """None where it did not end well: what it had kept by then may not have been all."""
    record = state.find(f"{TOGETHER} {shape}")
    return Together.from_json(record.result) if record is not None and record.outcome == DONE else None


def refuse_unfinished(plan: Sequence[Step], state: State) -> None:
    """Raises BenchmarkFailed while a step that decides the defaults has no record."""
    left = [
        step.name
        for step in plan
        if step.kind in DECIDING and not step.obstacle and state.find(step.name) is None
    ]
    if left:
        raise BenchmarkFailed(
            f"Nothing was written: {len(left)} steps that decide are still to be run ({', '.join(left)}). Start it "
            "again; it goes on where it was."
        )


def write_defaults(identity: Identity, chosen: Sequence[str], path: Path = DEFAULTS_PATH) -> None:
    """The entry of this card's compute capability; those of others stay."""
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    written[identity.capability] = {
        "switches": list(chosen),
        "measured": f"{today}, {identity.card}, torch {identity.torch}",
    }
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def make_report(
    identity: Identity,
    plan: Sequence[Step],
    state: State,
    shapes: Mapping[str, Shape],
    defaults: tuple[Sequence[str], Sequence[str]],
    waiting: Sequence[Step],
) -> Report:
    rates = tables.find_rates(state)
    chosen, reasons = defaults
    listed = (
        tables.tabulate_models(shapes, rates),
        tables.tabulate_switches(shapes),
        tables.tabulate_budgets(plan, state),
        tables.tabulate_host(plan, state, shapes),
        tables.tabulate_beside(plan, state),
        tables.tabulate_steps(plan, state),
    )
    measured = ", ".join(f"{name} {write_number(rate)} GFLOP/s" for name, rate in rates.items())
    return Report(
        "gpu",
        f"{identity.describe()}, random weights.",
        tuple(table for table in listed if table.rows),
        (
            f"Switches for {identity.capability}: {', '.join(chosen) or 'none'}.",
            *reasons,
            f"The matrix rate, measured first: {measured or 'not measured'}. Shares are of the rate in the "
            "precision of the weights, also with fp8.",
            "Trials send batches of random ids to the model's process, two ahead, and tokenize nothing: median of all "
            "passes, smallest and largest in brackets. Ratios are taken pass by pass, side by side.",
            "Memory is that of the tensors on a GPU, and resident elsewhere; beside others it is the device's.",
            *tables.describe_tests(state),
            *((f"{len(waiting)} steps are left; the same command goes on with them.",) if waiting else ()),
        ),
    )
