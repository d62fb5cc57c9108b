"""Our engine without HTTP, Celery and Postgres, fed as the worker's threads feed it: chunk by chunk, some at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.systems.bound.batch_log import FACTORY, BatchLog
from benchmarks.systems.peers.serving import Encoded, read_order, serve
from benchmarks.systems.protocol import BATCHES, PRECISION, ChildOrder
from benchmarks.texts import cut_chunks
from vectormill.domain.jobs.chunk_size import TokenEstimate
from vectormill.domain.tasks.pair import join_pair
from vectormill.models.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import ModelEntry, Settings
from worker.devices.detect import detect_inventory
from worker.devices.device import parse_devices
from worker.engine.engine import DEFAULT_FACTORY, EncodeRequest, EncodeResult, Engine
from worker.settings import load_worker_settings

NAME = "benchmark"
# One, or a pair of them.
Text = str | list[str]


class EngineAlone:
    """An engine started as a worker starts it. Call it with texts. Asked for batches, it leaves those of its last call
    in a file.
    """

    def __init__(self, order: ChildOrder) -> None:
        self._settings = Settings()
        # Each pass computes all.
        worker_settings = load_worker_settings(reuse_bytes=0, precision=order.options.get(PRECISION))
        card = Registry({NAME: ModelEntry(path=order.model)}).card(NAME, weights=True)
        device = parse_devices(order.device, detect_inventory())[0]  # of several NUMA nodes, the first
        self._spec = make_spec(card, EncodingOptions())
        self._batches = Path(order.options[BATCHES]) if BATCHES in order.options else None
        factory = DEFAULT_FACTORY if self._batches is None else FACTORY
        self._engine = Engine(card, device, worker_settings, Path(order.cache_dir), factory=factory)
        self._engine.start()
        self._log = BatchLog(Path(order.cache_dir))
        self._pool = ThreadPoolExecutor(worker_settings.slots)
        self._never = threading.Event()
        self._pass_stage_seconds: dict[str, float] = {}

    def __call__(self, texts: list[Text]) -> Encoded:
        before = self._engine.report()["stage_seconds"]
        count = TokenEstimate(self._spec).of
        chunks = cut_chunks([write_item(text) for text in texts], count, self._settings.chunk_max_items)
        self._log.skip()
        results = list(self._pool.map(self._encode_chunk, chunks))
        assert not any(result.failures for result in results), "every text of the mix can be encoded"
        after = self._engine.report()["stage_seconds"]
        self._pass_stage_seconds = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        if self._batches is not None:
            self._log.copy_to(self._batches)
        return Encoded(
            np.concatenate([result.vectors for result in results]),
            sum(int(result.num_tokens.sum()) for result in results),
            sum(result.num_computed_tokens for result in results),
        )

    def report(self) -> dict[str, Any]:
        """The engine's own, and how long each stage was at work in the last pass."""
        return self._engine.report() | {"pass_stage_seconds": self._pass_stage_seconds}

    def stop(self) -> None:
        """Ends the model's process; a child that ends does so anyway."""
        self._pool.shutdown()
        self._engine.stop()

    def _encode_chunk(self, texts: list[bytes]) -> EncodeResult:
        max_text_chars = self._settings.max_text_chars
        request = EncodeRequest(NAME, self._spec, texts, interactive=False, max_text_chars=max_text_chars)
        return self._engine.encode(request, self._never)


def write_item(text: Text) -> bytes:
    """As a chunk has it."""
    if isinstance(text, str):
        return text.encode()
    first, second = text
    return join_pair(first.encode(), second.encode())


if __name__ == "__main__":
    serve(read_order(), EngineAlone)
