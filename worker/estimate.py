"""How many tokens per second a model may reach on devices, before anything is started. An estimate has two ends."""

from collections.abc import Mapping
from typing import Final

from vectormill.models.model_card import ModelCard
from worker.devices.device import CUDA, Inventory, parse_devices
from worker.placement.feeding import CORES_PER_WORKER, FED_TOKENS_PER_SECOND
from worker.placement.room import guess_flops
from worker.plan import find_shape, plan_worker
from worker.settings import WorkerSettings

# The share of a device's estimated arithmetic that committed jobs reached: 0.4 with MiniLM on two cores with AVX2 or
# AMX, 0.85 with the shape of BERT-base on an H200 (docs/SIZING.md). Texts of a few tokens may be below.
LEAST_SHARE: Final = 0.3
MOST_SHARE: Final = 1.0
# Short texts are fed at half the rate; eight workers on one card reached a fifth more than it says.
LEAST_FED: Final = 0.5
MOST_FED: Final = 1.25


def estimate_rate(
    card: ModelCard, inventory: Inventory, settings: WorkerSettings
) -> tuple[float, float, Mapping[str, str]]:
    """Return the least and the most tokens per second of the planned replicas, and how they are placed.

    What the host's cores can feed limits GPUs. Raises the errors of `plan_worker`.
    """
    devices = {device.name: device for device in parse_devices(settings.devices, inventory)}
    # A GPU that is named has one worker, so replicas are counted by GPUs and not by what feeds them.
    placement = plan_worker(card, inventory, settings.model_copy(update={"devices": ",".join(devices)}))
    first = devices[placement.replicas[0].devices[0]]
    planned = sum(replica.relative_rate for replica in placement.replicas)
    planned *= guess_flops(first) / find_shape(card).flop_per_token
    told = {"placement": f"{placement.strategy}, {len(placement.replicas)} × {placement.precision}"}
    num_cores = len(inventory.physical_cores) if inventory.memory_bytes else 0  # 0: no host was described
    fed = FED_TOKENS_PER_SECOND * max(1, num_cores // CORES_PER_WORKER)
    if first.kind != CUDA or not num_cores or fed > planned:
        return LEAST_SHARE * planned, MOST_SHARE * planned, told
    told["limited by"] = f"the host, of which {num_cores} cores feed some {fed:,} tokens/s"
    return min(LEAST_SHARE * planned, LEAST_FED * fed), MOST_FED * fed, told
