"""Our engine alone, extracting: on the whole processor, or as the planner holds the model on two halves of it.

The option `way` is one of benchmarks.cases.engine.placement's. Several replicas take chunks from one queue, as workers
do.
"""

import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.cases.engine.placement import DATA_PARALLEL, MODEL_PARALLEL, SINGLE, WHOLE
from benchmarks.cases.tasks.extract_texts import SCHEMAS, split_tag, write_schema
from benchmarks.systems.bound.batch_log import FACTORY, BatchLog, read_batches
from benchmarks.systems.extraction.rows import digest_records
from benchmarks.systems.peers.serving import Encoded, read_order, serve
from benchmarks.systems.protocol import ChildOrder
from benchmarks.texts import cut_chunks
from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.jobs.chunk_size import TokenEstimate
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import EncodingOptions, Registry, make_spec
from vectormill.settings import ModelEntry, Settings
from worker.devices.detect import detect_inventory
from worker.devices.device import parse_devices
from worker.engine.engine import EncodeRequest, EncodeResult, Engine
from worker.placement.strategies import PIPELINE, REPLICATE
from worker.plan import plan_worker
from worker.runner.starter import Sharing
from worker.settings import load_worker_settings

NAME: Final = "benchmark"
WAY: Final = "way"
HALVES: Final = "cpu:0,cpu:1"


def find_card(model: str) -> ModelCard:
    return Registry({NAME: ModelEntry(path=model)}).card(NAME, weights=True)


def plan_replicas(card: ModelCard, way: str) -> tuple[Sharing, ...]:
    """The planner's own replicas. Raises ModelError and others of VectormillError for what it refuses."""
    inventory = detect_inventory()
    devices = "cpu" if way == WHOLE else HALVES
    strategy = REPLICATE if way in (WHOLE, SINGLE, DATA_PARALLEL) else PIPELINE
    settings = load_worker_settings(devices=devices, strategy=strategy)
    known = {device.name: device for device in parse_devices(devices, inventory)}
    planned = plan_worker(card, inventory, settings).replicas
    replicas = tuple(Sharing(replica, tuple(known[name] for name in replica.devices)) for replica in planned)
    if way == MODEL_PARALLEL:
        # Layer by layer: nothing in flight between the devices but one batch.
        return tuple(replace(each, replica=replace(each.replica, micro_batches=1)) for each in replicas)
    return replicas if way != SINGLE else replicas[:1]


@dataclass(frozen=True, slots=True)
class Chunk:
    spec: EncodingSpec
    places: list[int]
    texts: list[bytes]


class Engines:
    """Started as workers start them. Call it with tagged texts."""

    def __init__(self, order: ChildOrder) -> None:
        self._settings = Settings()
        worker_settings = load_worker_settings(reuse_bytes=0)  # each pass computes all
        card = find_card(order.model)
        self._specs = [
            make_spec(card, EncodingOptions(extract_schema=write_schema(number)))
            for number in range(len(SCHEMAS))
        ]
        self._engines: list[Engine] = []
        self._logs: list[BatchLog] = []
        self._cache_dir = Path(order.cache_dir)
        for number, sharing in enumerate(plan_replicas(card, order.options[WAY])):
            cache_dir = self._cache_dir / f"replica-{number}"
            cache_dir.mkdir(parents=True, exist_ok=True)
            is_shared = len(sharing.devices) > 1
            engine = (
                Engine(card, sharing.devices[0], worker_settings, cache_dir, sharing=sharing)
                if is_shared
                else Engine(card, sharing.devices[0], worker_settings, cache_dir, factory=FACTORY)
            )
            engine.start()
            self._engines.append(engine)
            if not is_shared:
                self._logs.append(BatchLog(cache_dir))
        self._num_slots = worker_settings.slots
        self._never = threading.Event()
        self._num_records = 0
        self._square_padding: float | None = None

    def __call__(self, texts: list[str]) -> Encoded:
        chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        for chunk in self._cut(texts):
            chunks.put(chunk)
        for log in self._logs:
            log.skip()
        done: list[tuple[Chunk, EncodeResult]] = []

        def drive(engine: Engine) -> None:
            while True:
                try:
                    chunk = chunks.get_nowait()
                except queue.Empty:
                    return
                request = EncodeRequest(
                    NAME,
                    chunk.spec,
                    chunk.texts,
                    interactive=False,
                    max_text_chars=self._settings.max_text_chars,
                )
                done.append((chunk, engine.encode(request, self._never)))

        engines = self._engines * self._num_slots
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(drive, engines))
        self._square_padding = self._measure_squares() if self._logs else None
        return self._collect(done, len(texts))

    def report(self) -> dict[str, Any]:
        """The first engine's, with the records of the last pass and what of the squares was padding."""
        return self._engines[0].report() | {
            "num_records": self._num_records,
            "square_padding": self._square_padding,
        }

    def _cut(self, texts: list[str]) -> list[Chunk]:
        """A job a schema, cut as a submission cuts it; the jobs' chunks take turns, as the dispatcher has them."""
        jobs: list[list[Chunk]] = []
        for number, spec in enumerate(self._specs):
            split = [split_tag(text) for text in texts]
            places = [place for place, (schema, _) in enumerate(split) if schema == number]
            encoded = [split[place][1].encode() for place in places]
            cut = cut_chunks(encoded, TokenEstimate(spec).of, self._settings.chunk_max_items)
            chunks = []
            for part in cut:
                chunks.append(Chunk(spec, places[: len(part)], part))
                places = places[len(part) :]
            jobs.append([chunk for chunk in chunks if chunk.texts])
        longest = max(map(len, jobs), default=0)
        return [job[turn] for turn in range(longest) for job in jobs if turn < len(job)]

    def _collect(self, done: list[tuple[Chunk, EncodeResult]], num_texts: int) -> Encoded:
        records: list[Any] = [None] * num_texts
        for chunk, result in done:
            assert not result.failures, "every text of the mix can be read"
            for index, place in enumerate(chunk.places):
                records[place] = json.loads(result.results.row(index).tobytes())
        self._num_records = sum(map(len, records))
        return Encoded(
            digest_records(records),
            sum(int(result.num_tokens.sum()) for _, result in done),
            sum(result.num_computed_tokens for _, result in done),
        )

    def _measure_squares(self) -> float:
        """Which share of the squared lengths that were computed was padding, by the batches of this pass."""
        own = computed = 0
        for number, log in enumerate(self._logs):
            path = self._cache_dir / f"pass-{number}.bin"
            log.copy_to(path)
            for batch in read_batches(path):
                own += int(np.square(batch.lengths).sum())
                computed += len(batch) * batch.max_length**2
        return 1 - own / computed if computed else 0.0


if __name__ == "__main__":
    serve(read_order(), Engines)
