"""`python -m benchmarks.children.host_pass KIND ORDER`: time an engine or a tokenizer alone.

This program runs in the tree of any commit. It prints one line of JSON with the elapsed seconds, and
processor seconds by what used them.
"""

import json
import resource
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.children.null_device import find_module

# The number of texts in a chunk, and in one call of a worker's tokenizer.
GROUP = 512


def run_engine(texts: list[str], model: str, cache_dir: str) -> dict[str, float]:
    """Return the seconds that one engine takes for the texts, fed chunk by chunk as by a worker's slots."""
    registry = find_module("vectormill.registry", "vectormill.models.registry")
    settings = find_module("vectormill.settings")
    worker_settings = find_module("worker.settings").load_worker_settings()
    engines = find_module("worker.engine")
    engines = engines if hasattr(engines, "Engine") else find_module("worker.engine.engine")
    card = registry.Registry({"benchmark": settings.ModelEntry(path=model)}).card("benchmark", weights=True)
    spec = registry.make_spec(card, registry.EncodingOptions())
    inventory = find_module("worker.devices.detect").detect_inventory()
    device = find_module("worker.devices.device").split_processor(inventory, 1)[0]
    engine = engines.Engine(card, device, worker_settings, Path(cache_dir))
    engine.start()
    never = threading.Event()
    most = settings.Settings().max_text_chars

    def encode(chunk: list[bytes]) -> None:
        request = engines.EncodeRequest("benchmark", spec, chunk, interactive=False, max_text_chars=most)
        assert not engine.encode(request, never).failures, "every text of ours can be encoded"

    encoded = [text.encode() for text in texts]
    chunks = [encoded[start : start + GROUP] for start in range(0, len(encoded), GROUP)]
    with ThreadPoolExecutor(worker_settings.slots) as pool:
        # Warm up with other texts than the timed ones, because vectors of recent texts are reused.
        list(pool.map(encode, [[b"warm " + text for text in chunk] for chunk in chunks[::10]]))
        runner = psutil.Process(engine.find_pid())
        before, before_runner = read_cpu_seconds(), sum(runner.cpu_times()[:2])
        started = time.perf_counter()
        list(pool.map(encode, chunks))
        seconds = time.perf_counter() - started
        engine_cpu, runner_cpu = read_cpu_seconds() - before, sum(runner.cpu_times()[:2]) - before_runner
    engine.stop()
    return {"seconds": seconds, "engine_cpu": engine_cpu, "runner_cpu": runner_cpu}


def run_tokenizer(texts: list[str], model: str, max_tokens: int) -> dict[str, float]:
    """Time the Rust tokenizer with a thread per core, and the worker's own tokenizer, which may be faster."""
    from tokenizers import Tokenizer

    bare: Any = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    bare.no_padding()
    bare.enable_truncation(max_tokens)
    own: Any = find_module("worker.tokens.tokenizer").Tokenizer(Path(model))
    groups = [texts[start : start + GROUP] for start in range(0, len(texts), GROUP)]
    found = []
    for tokenize in (bare.encode_batch_fast, lambda group: own.tokenize(group, max_tokens, True)):
        for group in groups[::10]:
            tokenize(group)
        before, started = read_cpu_seconds(), time.perf_counter()
        for group in groups:
            tokenize(group)
        found += [time.perf_counter() - started, read_cpu_seconds() - before]
    return dict(zip(("seconds", "bare_cpu", "own_seconds", "own_cpu"), found, strict=True))


def read_cpu_seconds() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


if __name__ == "__main__":
    order = json.loads(sys.argv[2])
    order["texts"] = json.loads(Path(order["texts"]).read_text(encoding="utf-8"))
    print(json.dumps(run_engine(**order) if sys.argv[1] == "engine" else run_tokenizer(**order)))
