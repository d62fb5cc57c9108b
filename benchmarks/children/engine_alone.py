"""Our engine without HTTP, Celery and Postgres, fed chunk by chunk as by a worker.

Options: `precision`; `way`, how two halves of the processor hold the model (benchmarks.placed);
`task=extract`, whose texts are tagged with the number of a schema.
"""

import json
import queue
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.children.extraction import SCHEMAS, digest_records, split_tag
from benchmarks.children.serving import ChildOrder, Encoded, serve
from benchmarks.texts import cut_chunks
from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.chunk import TokenEstimate
from vectormill.jobs.item import join_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import ModelEntry, Settings
from worker.devices.detect import detect_inventory
from worker.devices.device import parse_devices
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest, EncodeResult
from worker.placement.strategies import PIPELINE, REPLICATE
from worker.plan import plan_worker
from worker.runner.starter import Sharing
from worker.settings import load_worker_settings

NAME: Final = "benchmark"
# The ways in which two devices can hold a model, and WHOLE: one replica on the whole processor.
SINGLE: Final = "single"
DATA_PARALLEL: Final = "data parallel"
WHOLE: Final = "one over all"
PIPELINED: Final = PIPELINE
STRATEGY_OF_WAY: Final[Mapping[str, str]] = {
    **dict.fromkeys((SINGLE, DATA_PARALLEL, WHOLE), REPLICATE),
    PIPELINED: PIPELINE,
}
# An EncodingSpec, the positions of the chunk's texts among all texts, and the texts.
Chunk = tuple[EncodingSpec, list[int], list[bytes]]


class EngineAlone:
    """Engines started as a worker starts them.

    Call it with texts or pairs; every pass computes all of them again.
    """

    def __init__(self, order: ChildOrder) -> None:
        self._settings = Settings()
        settings = load_worker_settings(reuse_bytes=0, precision=order.options.get("precision"))
        card = Registry({NAME: ModelEntry(path=order.model)}).card(NAME, weights=True)
        self._is_extraction = order.options.get("task") == "extract"
        schemas = [json.dumps(schema) for schema in SCHEMAS] if self._is_extraction else [None]
        self._specs = [make_spec(card, EncodingOptions(extract_schema=schema)) for schema in schemas]
        self._num_slots = settings.slots
        self._never = threading.Event()
        self._seconds: dict[str, float] = {}
        self._num_records = 0
        cache = Path(order.cache_dir)
        cache.mkdir(parents=True, exist_ok=True)
        way = order.options.get("way", WHOLE)
        if way == WHOLE:
            device = parse_devices(order.device, detect_inventory())[0]  # the first NUMA node of several
            self._engines = [Engine(card, device, settings, cache)]
        else:
            self._engines = [
                Engine(
                    card, each.devices[0], settings, cache, sharing=each if len(each.devices) > 1 else None
                )
                for each in plan_way(card, way)
            ]
        for engine in self._engines:
            engine.start()

    def __call__(self, texts: list[Any]) -> Encoded:
        chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        for chunk in self._cut(texts):
            chunks.put(chunk)
        done: list[tuple[Chunk, EncodeResult]] = []

        def drive(engine: Engine) -> None:
            while True:
                try:
                    chunk = chunks.get_nowait()
                except queue.Empty:
                    return
                spec, _, encoded = chunk
                most = self._settings.max_text_chars
                request = EncodeRequest(NAME, spec, encoded, interactive=False, max_text_chars=most)
                done.append((chunk, engine.encode(request, self._never)))

        before = self._engines[0].report()["stage_seconds"]
        slots = self._engines * self._num_slots
        with ThreadPoolExecutor(len(slots)) as pool:
            list(pool.map(drive, slots))
        after = self._engines[0].report()["stage_seconds"]
        self._seconds = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        return self._collect(done, len(texts))

    def report(self) -> dict[str, Any]:
        """Return the first engine's report, and the figures of the last pass."""
        return self._engines[0].report() | {
            "pass_stage_seconds": self._seconds,
            "num_records": self._num_records,
        }

    def _cut(self, texts: list[Any]) -> list[Chunk]:
        """Cut a job for each EncodingSpec into chunks, and interleave the jobs as the dispatcher does."""
        split = [split_tag(text) if self._is_extraction else (0, text) for text in texts]
        jobs: list[list[Chunk]] = []
        for number, spec in enumerate(self._specs):
            places = [place for place, (which, _) in enumerate(split) if which == number]
            encoded = [write_item(split[place][1]) for place in places]
            jobs.append([])
            for part in cut_chunks(encoded, TokenEstimate(spec).of, self._settings.chunk_max_items):
                jobs[-1].append((spec, places[: len(part)], part))
                places = places[len(part) :]
        turns = range(max(map(len, jobs)))
        return [job[turn] for turn in turns for job in jobs if turn < len(job) and job[turn][2]]

    def _collect(self, done: list[tuple[Chunk, EncodeResult]], num_texts: int) -> Encoded:
        assert not any(result.failures for _, result in done), "every text of the mix can be encoded"
        num_tokens = sum(int(result.num_tokens.sum()) for _, result in done)
        num_computed = sum(result.num_computed_tokens for _, result in done)
        if self._is_extraction:
            records: list[Any] = [None] * num_texts
            for (_, places, _), result in done:
                for index, place in enumerate(places):
                    records[place] = json.loads(result.results.row(index).tobytes())
            self._num_records = sum(map(len, records))
            return Encoded(digest_records(records), num_tokens, num_computed)
        rows = np.concatenate([result.results.matrix for _, result in done])
        vectors = np.empty_like(rows)
        vectors[[place for (_, places, _), _ in done for place in places]] = rows
        return Encoded(vectors, num_tokens, num_computed)


def plan_way(card: ModelCard, way: str) -> tuple[Sharing, ...]:
    """Return the replicas that the planner makes for a way of sharing the model; their memory is not checked.

    Raise VectormillError when the planner refuses.
    """
    inventory = detect_inventory()
    devices = parse_devices("cpu:0,cpu:1", inventory)
    settings = load_worker_settings(devices="cpu:0,cpu:1", strategy=STRATEGY_OF_WAY[way])
    known = {device.name: device for device in devices}
    replicas = tuple(
        Sharing(replica, tuple(known[name] for name in replica.devices))
        for replica in plan_worker(card, inventory, settings).replicas
    )
    return replicas[:1] if way == SINGLE else replicas


def write_item(text: str | list[str]) -> bytes:
    """Return a text, or a pair of texts, encoded as in a chunk's payload."""
    return text.encode() if isinstance(text, str) else join_pair(text[0].encode(), text[1].encode())


if __name__ == "__main__":
    serve(EngineAlone)
