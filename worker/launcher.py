"""`vectormill worker`: one pinned Celery worker per model and device, each restarted when it dies.

The child's environment has its threads. Its device it finds by name, so it sees the same GPUs as this process; only
the model's own process is shown no other.
"""

import sys
from collections.abc import Sequence

from vectormill.domain.errors import ConfigurationError
from vectormill.registry import Registry
from vectormill.settings import Settings, process_environment
from vectormill.stopping import StopSignals
from vectormill.supervisor import ChildSpec, Supervisor
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, parse_devices, thread_environment
from worker.settings import load_worker_settings

# Below the 7 s that `up` gives to us. Handing a chunk back takes one short transaction.
_GRACE_SECONDS = 5.0


def run(settings: Settings, models: Sequence[str], devices: str | None = None) -> None:
    """Serves the models, or all registered ones, until SIGTERM or SIGINT.

    Raises ConfigurationError, UnknownModel or ModelError before it starts anything.
    """
    if settings.database_url is None or settings.redis_url is None:
        raise ConfigurationError(
            "A worker needs VECTORMILL_DATABASE_URL and VECTORMILL_REDIS_URL; `vectormill up` brings its own."
        )
    registry = Registry(settings.models)
    served = models or registry.names()
    for model in served:
        registry.card(model)
    worker_settings = load_worker_settings(devices=devices)
    chosen = parse_devices(worker_settings.devices, detect_inventory())
    children = [_replica(model, device, worker_settings.devices) for model in served for device in chosen]
    with StopSignals() as stopping:
        supervisor = Supervisor(children, stopping=stopping)
        try:
            supervisor.start()
            supervisor.wait()
        finally:
            supervisor.stop(_GRACE_SECONDS)


def _replica(model: str, device: Device, devices: str) -> ChildSpec:
    argv = (
        sys.executable,
        "-m",
        "worker.app",
        "--model",
        model,
        "--device",
        device.name,
        "--devices",
        devices,
    )
    threads = thread_environment(device.num_threads, device.num_tokenizer_threads)
    return ChildSpec(f"{model} on {device.name}", argv, process_environment() | threads)
