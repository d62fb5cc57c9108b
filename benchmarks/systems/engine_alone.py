"""Our engine without HTTP, Celery and Postgres, fed as the worker's threads feed it: chunk by chunk, some at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.probes.machine import benchmark_device
from benchmarks.systems.child import ChildOrder
from benchmarks.systems.serving import Encode, Encoded, read_order, serve
from benchmarks.texts import split_evenly
from vectormill.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import ModelEntry, Settings
from worker.engine import EncodeRequest, EncodeResult, Engine
from worker.settings import load_worker_settings

NAME = "benchmark"


def load(order: ChildOrder) -> Encode:
    settings, worker_settings = Settings(), load_worker_settings(reuse_bytes=0)  # each pass computes all
    card = Registry({NAME: ModelEntry(path=order.model)}).card(NAME, weights=True)
    spec = make_spec(card, EncodingOptions())
    engine = Engine(card, benchmark_device(), worker_settings, Path(order.cache_dir))
    engine.start()
    pool = ThreadPoolExecutor(worker_settings.slots)
    never = threading.Event()

    def encode_chunk(texts: list[bytes]) -> EncodeResult:
        request = EncodeRequest(NAME, spec, texts, interactive=False, max_text_chars=settings.max_text_chars)
        return engine.encode(request, never)

    def encode(texts: list[str]) -> Encoded:
        chunks = [
            [text.encode() for text in chunk] for chunk in split_evenly(texts, settings.chunk_max_items)
        ]
        results = list(pool.map(encode_chunk, chunks))
        assert not any(result.failures for result in results), "every text of the corpus can be encoded"
        return Encoded(
            np.concatenate([result.vectors for result in results]),
            sum(int(result.num_tokens.sum()) for result in results),
            sum(result.num_computed_tokens for result in results),
        )

    return encode


if __name__ == "__main__":
    serve(read_order(), load)
