"""`host --profile`: a flame graph of each process of a stack, while it computes short texts on the null device.

py-spy looks at the Python processes, perf at Postgres's where it is installed. Nothing else is measured meanwhile.
"""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
# Where threads wait: a profiler that sees stacks alone cannot tell it from work. Of who has the lock nobody waits.
WAITS: Final = (
    "Condition.wait (threading", "Connection._recv (multiprocessing", "Connection.wait (psycopg", "Runner.run (asyncio",
    "SocketBuffer._read_from_socket (redis", "StopSignals._forward (", "_LastingThread._loop (",
    "_PollLikeSelector.select (", "_epoll.poll (", "_worker (concurrent/futures",
)  # fmt: skip
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
    """All processes in the same seconds; who has the lock in those that follow: one profiler at a time can stop one."""
    tree = list_tree(pid)
    found = {name: find_named(tree, name) for name in (*PYTHON_PROCESSES, POSTGRES)}
    paths = {name: directory / f"{name_file(name)}.folded" for name in found}
    commands = {
        name: make_spy_command(spy, found[name][0].pid, paths[name])
        for name in PYTHON_PROCESSES
        if found[name]
    }
    perf = shutil.which("perf")
    if perf is not None and found[POSTGRES]:
        commands[POSTGRES] = make_perf_command(perf, found[POSTGRES], paths[POSTGRES])
    _run_together(commands)
    for name in commands:
        yield name_file(name), _read(paths[name], perf if name == POSTGRES else None)
    for name in LOCKED:
        path = directory / f"{name_file(name)}-lock.folded"
        _run_together({name: [*make_spy_command(spy, found[name][0].pid, path), "--gil"]})
        yield path.stem, _read(path, None)


def _run_together(commands: Mapping[str, list[str]]) -> None:
    """Raises BenchmarkFailed with the first line of one that failed."""
    started = {
        name: subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    try:
        for name, profiler in started.items():
            _, said = profiler.communicate(timeout=SECONDS + GRACE_SECONDS)
            if profiler.returncode:
                raise BenchmarkFailed(f"{name} could not be sampled: {said.strip()[:SHOWN_CHARS]}")
    finally:
        for profiler in started.values():
            if profiler.poll() is None:
                profiler.kill()
                profiler.wait()


def name_file(name: str) -> str:
    """The process's name as that of a file."""
    return re.sub(r"\W+", "-", name.lower())


def make_spy_command(spy: Path, pid: int, path: Path) -> list[str]:
    return [
        str(spy), "record", "--pid", str(pid), "--duration", str(SECONDS), "--rate", str(RATE),
        "--format", "raw", "--output", str(path),
    ]  # fmt: skip


def make_perf_command(perf: str, processes: Sequence[psutil.Process], path: Path) -> list[str]:
    pids = ",".join(str(process.pid) for process in processes)
    return [
        perf, "record", "-F", str(RATE), "-g", "-p", pids, "-o", str(path), "--", "sleep", str(SECONDS),
    ]  # fmt: skip


def leave_out_waits(lines: Iterable[str]) -> Iterator[str]:
    """Folded stacks whose innermost frame is at work."""
    for line in lines:
        if not line.rpartition(";")[2].startswith(WAITS):
            yield line


def _read(path: Path, perf: str | None) -> Frame:
    if perf is None:
        return read_folded(leave_out_waits(path.read_text(encoding="utf-8").splitlines()))
    done = subprocess.run([perf, "script", "-i", str(path)], capture_output=True, text=True)
    return read_folded(fold_perf_script(done.stdout.splitlines()))
