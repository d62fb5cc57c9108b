"""`host --profile`: a flame graph of each process of a stack, while it computes short texts on the null device.

py-spy looks at the Python processes, perf at Postgres's where it is installed. Nothing else is measured meanwhile.
"""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil

from benchmarks.cases.host.bench import Bench
from benchmarks.cases.host.host_tables import BEFORE
from benchmarks.cases.host.host_texts import HostTexts
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.peers.environment import ROOT, prepare_environment
from benchmarks.probes.process_tree import CELERY_WORKER, MODEL_PROCESS, POSTGRES, find_named, list_tree
from benchmarks.results.flame_graph import Frame, draw_flame_graph, find_shares, fold_perf_script, read_folded
from benchmarks.results.report import Report
from benchmarks.results.table import Table
from benchmarks.results.writing import write_share
from vectormill.cli.workplace import workplace
from vectormill.models.registry import DEFAULT_MODEL, Registry

PROFILER: Final = "profiler"
TARGET: Final = ROOT / "benchmarks" / "profiles"
SECONDS: Final = 10
RATE: Final = 100
GRACE_SECONDS: Final = 60.0
NUM_TOKENS: Final = 16
NUM_TEXTS: Final = 100_000
PYTHON_PROCESSES: Final = (CELERY_WORKER, MODEL_PROCESS, "api", "scheduler")
# Beside where the time goes: who has the interpreter's lock.
LOCKED: Final = (CELERY_WORKER,)
NUM_SHOWN: Final = 5
SHOWN_CHARS: Final = 300


def profile(order: Order, target: Path = TARGET) -> Report:
    """Writes the graphs into `target`, and shows where the most time was spent."""
    order.steps.begin("host", 4)
    order.steps.step("installing the profiler")
    spy = prepare_environment(PROFILER).with_name("py-spy")
    order.steps.step("making texts")
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    texts = HostTexts(card.path)
    tree = order.against or ROOT
    with workplace(None) as directory:
        order.steps.step("starting the stack")
        with Bench("profiled", tree, directory / "profiled", card) as bench:
            order.steps.step(f"sampling for {SECONDS} s")
            graphs = sample(bench, texts, spy, directory, order.items or NUM_TEXTS)
    target = target / BEFORE if order.against else target
    target.mkdir(parents=True, exist_ok=True)
    for name, graph in graphs.items():
        title = f"{name}: {graph.count:,} samples, texts of {NUM_TOKENS} tokens, a device that takes no time"
        (target / f"{name}.svg").write_text(draw_flame_graph(graph, title), encoding="utf-8")
    rows = tuple(
        (name, frame, write_share(share)) for name, graph in graphs.items() for frame, share in head(graph)
    )
    return Report(
        "host",
        f"flame graphs of {', '.join(graphs)}, in benchmarks/profiles",
        (Table(("process", "most of its own time in", "share"), rows),),
    )


def head(graph: Frame) -> list[tuple[str, float]]:
    return list(find_shares(graph).items())[:NUM_SHOWN]


def sample(bench: Bench, texts: HostTexts, spy: Path, directory: Path, num_texts: int) -> Mapping[str, Frame]:
    """The samples by process, taken while one job after the other is computed."""
    is_over = threading.Event()
    failures: list[Exception] = []

    def feed() -> None:
        try:
            while not is_over.is_set():
                bench.encode(texts.draw(NUM_TOKENS, num_texts))
        except Exception as error:  # noqa: BLE001 - told when the profilers are done
            failures.append(error)

    feeder = threading.Thread(target=feed, name="feeder", daemon=True)
    feeder.start()
    try:
        bench.stack.wait_for_batches()
        graphs = dict(_sample_all(bench.stack.pid, spy, directory))
    finally:
        is_over.set()
        feeder.join()
    if failures:
        raise BenchmarkFailed(f"The job that was sampled failed: {failures[0]}")
    return graphs


def _sample_all(pid: int, spy: Path, directory: Path) -> Iterator[tuple[str, Frame]]:
    """Starts every profiler, and then waits for all: they look at the same seconds."""
    started: dict[str, tuple[subprocess.Popen[str], Path]] = {}
    tree = list_tree(pid)
    for name in PYTHON_PROCESSES:
        for process in find_named(tree, name)[:1]:
            started[name_file(name)] = _start_spy(spy, process.pid, directory / f"{name_file(name)}.folded")
            if name in LOCKED:
                locked = f"{name_file(name)}-lock"
                started[locked] = _start_spy(spy, process.pid, directory / f"{locked}.folded", "--gil")
    postgres = find_named(tree, POSTGRES)
    perf = shutil.which("perf")
    record = directory / "perf.data"
    if perf is not None and postgres:
        started[POSTGRES] = _start_perf(perf, postgres, record)
    try:
        for name, (profiler, path) in started.items():
            _, said = profiler.communicate(timeout=SECONDS + GRACE_SECONDS)
            if profiler.returncode:
                raise BenchmarkFailed(f"{name} could not be sampled: {said.strip()[-SHOWN_CHARS:]}")
            yield name, _read(path, perf if name == POSTGRES else None)
    finally:
        for profiler, _ in started.values():
            if profiler.poll() is None:
                profiler.kill()
                profiler.wait()


def name_file(name: str) -> str:
    """The process's name as that of a file."""
    return re.sub(r"\W+", "-", name.lower())


def _start_spy(spy: Path, pid: int, path: Path, *options: str) -> "tuple[subprocess.Popen[str], Path]":
    command = [
        str(spy), "record", "--pid", str(pid), "--duration", str(SECONDS), "--rate", str(RATE),
        "--format", "raw", "--output", str(path), *options,
    ]  # fmt: skip
    return _start(command), path


def _start_perf(
    perf: str, processes: list[psutil.Process], path: Path
) -> "tuple[subprocess.Popen[str], Path]":
    pids = ",".join(str(process.pid) for process in processes)
    command = [
        perf,
        "record",
        "-F",
        str(RATE),
        "-g",
        "-p",
        pids,
        "-o",
        str(path),
        "--",
        "sleep",
        str(SECONDS),
    ]
    return _start(command), path


def _start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _read(path: Path, perf: str | None) -> Frame:
    if perf is None:
        return read_folded(path.read_text(encoding="utf-8").splitlines())
    done = subprocess.run([perf, "script", "-i", str(path)], capture_output=True, text=True)
    return read_folded(fold_perf_script(done.stdout.splitlines()))
