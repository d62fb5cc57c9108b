"""`python -m benchmarks.cases.gpu.child ORDER`: the process of one step. Writes into a file what it finds, at once.

So what was found before a step failed, or took too long, is there when it has been ended.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from benchmarks.cases.gpu import beside, plan, trials
from benchmarks.cases.gpu.plan import CARD, QUICK, Step
from benchmarks.cases.gpu.process import StepOrder
from benchmarks.cases.gpu.trials import Workbench
from benchmarks.order import BenchmarkFailed
from vectormill.domain.errors import VectormillError
from vectormill.processes.lifetimes import die_with_parent
from worker.devices.detect import detect_inventory
from worker.devices.device import parse_devices

KINDS: Final[Mapping[str, Callable[[Workbench], None]]] = {
    plan.RATES: beside.measure_rates,
    plan.TESTS: beside.run_tests,
    plan.WEIGHTS: trials.write_weights,
    plan.ALONE: trials.measure_alone,
    plan.TOGETHER: trials.measure_together,
    plan.RANKS: trials.measure_ranks,
    plan.BUDGETS: beside.measure_tuner,
    plan.HOST: beside.measure_host,
    plan.INSTALL: beside.install_vllm,
    plan.BESIDE: beside.measure_beside,
}
SCALES: Final = {scale.name: scale for scale in (CARD, QUICK)}


def main() -> int:
    began = time.monotonic()
    order = StepOrder(**json.loads(sys.argv[1]))
    die_with_parent()
    signal.signal(signal.SIGTERM, _leave)
    step, directory = Step(**order.step), Path(order.directory)
    bench = Workbench(
        SCALES[order.scale],
        step,
        tuple(parse_devices(",".join(order.devices), detect_inventory())),
        Path(order.models),
        directory,
        order.given,
        lambda result: write_result(Path(order.result), result),
        began + step.limit_seconds,
    )
    try:
        KINDS[step.kind](bench)
    except (BenchmarkFailed, VectormillError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Whole or not at all: the process may be ended at any time."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result), encoding="utf-8")
    unfinished.replace(path)


def _leave(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C does: what was started is stopped on the way out."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
