"""What is measured beside the trials: the tests of a card, our whole engine with real texts, and the peers. In the
process of a step.
"""

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

from benchmarks.cases.engine.shapes import MEMORY_PAUSE_SECONDS, list_mixed, make_mixed, read_device_bytes
from benchmarks.cases.gpu.trials import Workbench, measure_budgets
from benchmarks.cases.host.host_texts import HostTexts
from benchmarks.mixes import Mix
from benchmarks.models.shapes import SHAPES
from benchmarks.order import BenchmarkFailed
from benchmarks.peers.catalogue import GPU_PEERS, PEERS, VLLM, runs_in_ours
from benchmarks.peers.environment import is_prepared, prepare_environment
from benchmarks.probes.device_use import DeviceUseSampler
from benchmarks.probes.matrix_rate import measure_matrix_rates
from benchmarks.probes.model_cost import ModelCost
from benchmarks.probes.peak import PeakSampler
from benchmarks.systems.child import ChildSystem
from benchmarks.systems.line_up import ENGINE, LineUp
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.system import System
from benchmarks.systems.turns import Record, Turns
from vectormill.models.model_card import ModelCard
from worker.devices.detect import DeviceSampler
from worker.devices.device import CPU, CUDA
from worker.encoder.switches import NONE

OUTCOMES: Final = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
# The tuner sees its texts again and again until it has settled, or so often.
MOST_TUNING_PASSES: Final = 5
MOST_TEXTS: Final = 60_000
TUNED: Final = "tuned"


def measure_rates(bench: Workbench) -> None:
    """Of the matrix product: the limit that everything else of the same run is compared with."""
    bench.tell({"rates": measure_matrix_rates(bench.device)})


def run_tests(bench: Workbench) -> None:
    """pytest, whose log is kept beside the records; failures are a finding and no failure of the step."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        bench.scale.tests,
    ]
    log = bench.directory / "pytest.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            file.write(line)
            lines.append(line)
            if any(outcome in line for outcome in OUTCOMES):
                bench.tell(count_outcomes(lines))
        status = process.wait()
    found = count_outcomes(lines)
    bench.tell(found)
    if status not in (0, 1):  # 1: tests failed
        raise BenchmarkFailed(f"pytest ended with status {status}: {' '.join(lines[-3:]).strip()}")


def count_outcomes(lines: Iterable[str]) -> dict[str, Any]:
    """How many tests ended in which way, and the names of those that failed, from what `pytest -v` prints."""
    counts = dict.fromkeys(OUTCOMES, 0)
    failures: dict[str, str] = {}
    for line in lines:
        name, _, rest = line.strip().partition(" ")
        outcome = rest.split(" ")[0]
        if "::" in name and outcome in counts:
            counts[outcome] += 1
            if outcome in ("FAILED", "ERROR"):
                failures.setdefault(name, "")
        elif name in ("FAILED", "ERROR") and " - " in rest:  # of the summary
            test, _, reason = rest.partition(" - ")
            failures[test] = reason
    return {"counts": {name.lower(): count for name, count in counts.items()}, "failures": failures}


def measure_tuner(bench: Workbench) -> None:
    """The sweep of budgets, and what the engine's own tuner comes to with real texts of that length."""
    swept: dict[str, Any] = {}

    def keep(result: Mapping[str, Any]) -> None:
        swept.update(result)
        bench.tell(swept)

    measure_budgets(replace(bench, tell=keep))
    card, length = bench.find_card(bench.step.shape), bench.scale.budget_length
    num_texts = min(MOST_TEXTS, max(20, round(bench.scale.tuning_seconds * swept["best_rate"] / length)))
    mix = Mix(str(length), "", tuple(HostTexts(card.path).draw(length, num_texts)))
    with start_engine(bench, card, [mix]) as engine:
        for _ in range(MOST_TUNING_PASSES):
            done = engine.encode(mix.name)
            report = engine.report()
            state = find_class(report["budgets"], length)
            keep({"tuner": {**state, "rate": done.num_tokens / done.seconds}})
            if state["state"] == TUNED:
                return


def find_class(budgets: Mapping[str, Mapping[str, Any]], length: int) -> Mapping[str, Any]:
    """The budget of texts of that length, from the report's "up to 32", "up to 64", … "above 512"."""
    bounds = {int(name.rpartition(" ")[2]): name for name in budgets if name.startswith("up to ")}
    fitting = [bound for bound in bounds if length <= bound]
    last = next(name for name in budgets if not name.startswith("up to "))
    return budgets[bounds[min(fitting)] if fitting else last]


def measure_host(bench: Workbench) -> None:
    """The whole engine with its tokenizer, fed as a worker's threads feed it, and how busy the device is meanwhile."""
    card, texts = bench.find_card(bench.step.shape), bench.scale.host_texts
    drawn = HostTexts(card.path)
    mixes = [Mix(str(length), "", tuple(drawn.draw(length, count))) for length, count in texts.items()]
    found: dict[str, Any] = {}
    with start_engine(bench, card, mixes) as engine:
        sampler = DeviceSampler(bench.device, lambda: engine.find_processes().model[0].pid)
        for mix in mixes:
            engine.warm_up(mix.name)
            with DeviceUseSampler(lambda: sampler.sample().utilisation) as use:
                passes = [engine.encode(mix.name) for _ in range(bench.scale.repeat)]
            found[mix.name] = {
                "seconds": [done.seconds for done in passes],
                "num_texts": len(mix.texts),
                "num_tokens": passes[-1].num_tokens,
                "busy_share": use.share,
                "stage_seconds": engine.report()["pass_stage_seconds"],
            }
            bench.tell({"switches": list(bench.given["kept"]), "by_length": found})


def install_vllm(bench: Workbench) -> None:
    """Where it is in our own environment nothing is installed."""
    python = (
        sys.executable
        if VLLM.environment is None or runs_in_ours(VLLM)
        else prepare_environment(VLLM.environment)
    )
    bench.tell({"python": str(python)})


def measure_beside(bench: Workbench) -> None:
    """Ours and the others with the same texts of mixed lengths, one after the other, each alone on the device."""
    card = bench.find_card(bench.step.shape)
    shape = replace(SHAPES[bench.step.shape], num_tokens=bench.sized.beside_tokens)
    mix = make_mixed(shape, card, list_mixed(), None)
    peers = {peer.name: peer for peer in (*PEERS, *GPU_PEERS, VLLM) if peer.name in bench.scale.others}
    line_up = LineUp(bench.directory, card.path, [mix], bench.device, make_settings(bench))
    ready = [name for name, peer in peers.items() if name != VLLM.name or is_ready()]
    systems: dict[str, System] = line_up.make((ENGINE, *ready), list(peers.values()))
    for name in peers.keys() - systems.keys():
        systems[name] = MissingSystem(peers[name].title, "It is not installed: see the step `install`.")
    found: dict[str, Any] = {}
    for name in (ENGINE, *bench.scale.others):
        found[name] = describe_record(run_alone(bench, mix, name, systems[name]))
        lengths = {"num_texts": len(mix.texts), "flop": count_mix_flop(card, mix)}
        bench.tell({"switches": list(bench.given["kept"]), **lengths, "systems": found})


def is_ready() -> bool:
    """Whether vLLM can be started."""
    return VLLM.environment is None or runs_in_ours(VLLM) or is_prepared(VLLM.environment)


def run_alone(bench: Workbench, mix: Mix, name: str, system: System) -> Record:
    is_cuda = bench.device.kind == CUDA
    read = partial(read_device_bytes, DeviceSampler(bench.device, lambda: None))
    with (
        PeakSampler(read, MEMORY_PAUSE_SECONDS) if is_cuda else nullcontext() as memory,
        Turns({name: system}, lambda _: None) as turns,
    ):
        record = turns.run(mix.name, bench.scale.repeat)[name]
    if memory is not None:
        record.whole_peak_bytes = memory.growth_bytes
    return record


def describe_record(record: Record) -> dict[str, Any]:
    return {
        "name": record.name,
        "seconds": record.seconds(),
        "num_tokens": record.passes[-1].num_tokens if record.passes else 0,
        "padding": record.passes[-1].padding_waste if record.passes else 0.0,
        "peak_bytes": record.whole_peak_bytes,
        "failure": record.failure,
    }


def count_mix_flop(card: ModelCard, mix: Mix) -> float:
    from benchmarks.cases.comparing import count_tokens

    return ModelCost.of(card).count_flop(count_tokens(card, mix.texts))


def start_engine(bench: Workbench, card: ModelCard, mixes: Sequence[Mix]) -> ChildSystem:
    """Our engine alone, not yet entered, with the switches that are kept for the shape."""
    line_up = LineUp(bench.directory, card.path, mixes, bench.device, make_settings(bench))
    engine = line_up.make((ENGINE,), ())[ENGINE]
    assert isinstance(engine, ChildSystem), "that is what our engine alone is"
    return engine


def make_settings(bench: Workbench) -> dict[str, str]:
    """On a processor the backend that has packed attention, which is what a GPU has."""
    settings = {"VECTORMILL_WORKER_SWITCHES": ",".join(bench.given["kept"]) or NONE}
    if bench.device.kind == CPU:
        threads = str(bench.device.num_threads)
        torch = {"BACKEND": "torch", "ATTENTION": "packed", "PRECISION": bench.precision, "THREADS": threads}
        settings |= {f"VECTORMILL_WORKER_{name}": value for name, value in torch.items()}
    return settings
