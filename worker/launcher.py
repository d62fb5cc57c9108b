"""`vectormill worker`: plans the placement, and starts one pinned Celery worker per replica, again when it dies.

The child's environment has its threads. Its device it finds by name, so it sees the same GPUs as this process; only
the model's own process is shown no other.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID, uuid4

from vectormill.domain.errors import ConfigurationError
from vectormill.registry import Registry
from vectormill.settings import Settings, process_environment
from vectormill.stopping import StopSignals
from vectormill.supervisor import ChildSpec, Supervisor
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, parse_devices, thread_environment
from worker.placement.picture import draw_placement
from worker.placement.placement import Replica
from worker.plan import plan_worker
from worker.settings import load_worker_settings

logger = logging.getLogger(__name__)

# Of the 60 s in which a worker promises to have stopped (docs/OPERATIONS.md, "Stop"): a model process that hangs in a
# driver is given up after 25 s, and a commit that is under way may wait 20 s for a lock.
GRACE_SECONDS = 55.0


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
    inventory = detect_inventory()
    devices_by_name = {device.name: device for device in parse_devices(worker_settings.devices, inventory)}
    launcher = uuid4()
    children = []
    for model in served:
        placement = plan_worker(registry.card(model, weights=True), inventory, worker_settings)
        logger.info("%s is placed as planned:\n%s", model, draw_placement(placement))
        children += [
            _replica(model, replica, devices_by_name[replica.devices[0]], worker_settings.devices, launcher)
            for replica in placement.replicas
        ]
    if len(children) == 1 and sys.stderr.isatty():  # two bars would overwrite each other
        children = [replace(children[0], argv=(*children[0].argv, "--bar"))]
    with StopSignals() as stopping:
        supervisor = Supervisor(children, stopping=stopping)
        try:
            supervisor.start()
            supervisor.wait()
        finally:
            supervisor.stop(GRACE_SECONDS)


def _replica(model: str, replica: Replica, first: Device, devices: str, launcher: UUID) -> ChildSpec:
    """The Celery worker of one replica. It is pinned to the first device; its model processes each to their own."""
    names = ",".join(replica.devices)
    argv = (
        sys.executable,
        "-m",
        "worker.app",
        "--model",
        model,
        "--device",
        names,
        "--devices",
        devices,
        "--launcher",
        str(launcher),
    )
    threads = thread_environment(first.num_threads, first.num_tokenizer_threads)
    return ChildSpec(f"{model} on {names}", argv, process_environment() | threads)
