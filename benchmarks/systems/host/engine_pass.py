"""`python -m benchmarks.systems.host.engine_pass ORDER`: one engine without Celery and Postgres, of whichever commit.

Starts it, feeds it texts chunk by chunk as a worker's slots do, and writes a line of JSON with what that took.
"""

import json
import os
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.systems.host.made_up import find_module

WARM_UP_SHARE = 10
SAMPLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """`texts` is a file with a JSON list, `model` the directory of a model. `is_counted` asks for blocks, not speed."""

    texts: str
    model: str
    cache_dir: str
    num_chunk_texts: int = 512
    is_counted: bool = False


@dataclass(frozen=True, slots=True)
class EnginePass:
    """Processor time is user and system time. `num_blocks` are Python's own blocks of memory at the highest sample,
    beyond those before the pass; the blocks of NumPy's and Rust's data are not among them.

    `runner_bytes` are those that the model's process wrote into its pipe; `read_bytes` those that the engine's read.
    """

    seconds: float
    num_texts: int
    num_tokens: int
    engine_cpu_seconds: float
    runner_cpu_seconds: float
    num_blocks: int
    num_texts_in_flight: int
    runner_bytes: int
    read_bytes: int


def main() -> None:
    order = EngineOrder(**json.loads(sys.argv[1]))
    texts = [text.encode() for text in json.loads(Path(order.texts).read_text(encoding="utf-8"))]
    name = "benchmark"
    registry = find_module(("vectormill.registry", "vectormill.models.registry"))
    settings = find_module(("vectormill.settings",))
    worker_settings = find_module(("worker.settings",)).load_worker_settings()
    engines = find_engine()
    devices = find_module(("worker.devices.device",))
    inventory = find_module(("worker.devices.detect",)).detect_inventory()
    card = registry.Registry({name: settings.ModelEntry(path=order.model)}).card(name, weights=True)
    spec = registry.make_spec(card, registry.EncodingOptions())
    device = devices.split_processor(inventory, 1)[0]
    engine = engines.Engine(card, device, worker_settings, Path(order.cache_dir))
    engine.start()
    never = threading.Event()
    max_text_chars = settings.Settings().max_text_chars

    def encode(chunk: list[bytes]) -> int:
        request = engines.EncodeRequest(name, spec, chunk, interactive=False, max_text_chars=max_text_chars)
        result = engine.encode(request, never)
        assert not result.failures, "every text of ours can be encoded"
        return int(result.num_tokens.sum())

    size = order.num_chunk_texts
    chunks = [texts[start : start + size] for start in range(0, len(texts), size)]
    with ThreadPoolExecutor(worker_settings.slots) as pool:
        # Other texts than those that are timed: vectors of texts that were seen lately are not computed again.
        warm = [[b"warm " + text for text in chunk] for chunk in chunks[::WARM_UP_SHARE]]
        list(pool.map(encode, warm))
        runner = psutil.Process(engine.runner_pid)
        with Blocks(order.is_counted) as blocks:
            before = read_counters(runner)
            started = time.perf_counter()
            num_tokens = sum(pool.map(encode, chunks))
            seconds = time.perf_counter() - started
            spent = [after - then for after, then in zip(read_counters(runner), before, strict=True)]
    engine.stop()
    engine_cpu, runner_cpu, runner_bytes, read_bytes = spent
    answer = EnginePass(
        seconds,
        len(texts),
        num_tokens,
        engine_cpu,
        runner_cpu,
        blocks.peak,
        min(len(texts), worker_settings.slots * size),
        int(runner_bytes),
        int(read_bytes),
    )
    sys.stdout.write(json.dumps(asdict(answer)) + "\n")


def find_engine() -> Any:
    """The module of the Engine, which became a folder."""
    module = find_module(("worker.engine",))
    return module if hasattr(module, "Engine") else find_module(("worker.engine.engine",))


def read_counters(runner: psutil.Process) -> tuple[float, float, float, float]:
    """Processor seconds of this process and of its runner, and the bytes that one wrote and this one read."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    theirs = runner.cpu_times()
    return (
        own.ru_utime + own.ru_stime,
        theirs.user + theirs.system,
        float(count_io_bytes(runner.pid, "wchar")),
        float(count_io_bytes(os.getpid(), "rchar")),
    )


def count_io_bytes(pid: int, name: str) -> int:
    """What the process has read or written so far, by read(2) and write(2); 0 where the system does not count."""
    path = Path(f"/proc/{pid}/io")
    if not path.is_file():
        return 0
    fields: dict[str, Any] = dict(line.split(": ") for line in path.read_text().splitlines())
    return int(fields[name])


class Blocks:
    """Counts Python's blocks of memory while something runs, every few milliseconds; does nothing unless asked."""

    def __init__(self, is_counted: bool) -> None:
        self._is_counted = is_counted
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="blocks", daemon=True)
        self.peak = 0

    def __enter__(self) -> "Blocks":
        self._before = sys.getallocatedblocks()
        if self._is_counted:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        if self._is_counted:
            self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, sys.getallocatedblocks() - self._before)


if __name__ == "__main__":
    main()
