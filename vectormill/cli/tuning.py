"""Command tune: measure which way of running a model is the fastest on the devices of this machine."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vectormill.cli.command import command, top
from vectormill.cli.printing import print_report, tell

if TYPE_CHECKING:
    from worker.devices.device import Device


def show_records(records: Sequence[Mapping[str, Any]]) -> None:
    for record in records:
        lengths = dict.fromkeys(length for found in record["ways"] for length in found["tokens_per_second"])
        print_report(
            f"{record['model']} on {record['device']}: {record['way']}, {record['reason']}",
            ("way", *(f"tokens/s, texts of {length}" for length in lengths), "not used because"),
            [
                (
                    found["way"],
                    *(f"{found['tokens_per_second'].get(length, 0):,}" for length in lengths),
                    found["flaw"],
                )
                for found in record["ways"]
            ],
        )


@command(
    top,
    "vectormill tune all-MiniLM-L6-v2",
    "vectormill tune all-MiniLM-L6-v2 --forget",
    view=show_records,
)
def tune(model: str, *, devices: str | None = None, again: bool = False, forget: bool = False) -> Any:
    """Measure which way of running a model is the fastest on each kind of device of this machine.

    Workers use what was found from their next start on. On a GPU they also look for it themselves, after their first
    work; on a processor this command compares the backends. Nothing else should use the devices meanwhile.

    Args:
        model (MODEL): A registered model, a directory, or OWNER/NAME on the Hugging Face hub.
        devices (DEVICES): auto, cpu, cuda, or a list such as cuda:0,cuda:1. By default VECTORMILL_WORKER_DEVICES.
        again: Measure again what was found before.
        forget: Forget what was found about the model, and measure nothing.
    """
    import threading

    from vectormill.domain.errors import ModelError
    from vectormill.models.registry import open_registry
    from vectormill.settings import load_settings
    from worker.devices.detect import detect_inventory
    from worker.engine.engine import Engine
    from worker.placement.strategies import REPLICATE
    from worker.plan import plan_machine
    from worker.settings import find_cache_dir, load_worker_settings
    from worker.tuning.record import TuningRecords
    from worker.tuning.trial import TrialFailed

    settings = load_settings()
    card = open_registry(settings, model).card(model, weights=True)
    cache_dir = find_cache_dir(settings)
    if again or forget:
        num_forgotten = TuningRecords(cache_dir).forget(card.name)
        tell(f"Forgot {num_forgotten} record{'' if num_forgotten == 1 else 's'} of {card.name}.")
    if forget:
        return []
    worker_settings = load_worker_settings(devices=devices)
    (planned,) = plan_machine([card], detect_inventory(), worker_settings)
    if planned.placement.replicas[0].strategy != REPLICATE:
        raise ModelError(f"{card.name} is shared by several devices, which has a single way.")
    kinds: dict[tuple[str, int, int], Device] = {
        (device.description, device.num_threads, device.num_parts): device for device in planned.devices
    }
    records = []
    for device in kinds.values():
        tuner = Engine(card, device, worker_settings, cache_dir).make_way_tuner()
        if len(tuner.ways) < 2:
            tell(f"There is a single way to run {card.name} on {device.name} with these settings.")
            continue
        try:
            with tuner.tuned(threading.Event(), lambda way: tell(f"Trying {way} …")) as record:
                found = record
        except TrialFailed as error:
            raise ModelError(
                f"The ways to run {card.name} on {device.name} cannot be compared: {error}."
            ) from error
        records.append(
            {
                "model": card.name,
                "device": found.circumstances.device,
                "way": str(found.way),
                "reason": found.way.reason,
                "ways": found.describe(),
            }
        )
    return records
