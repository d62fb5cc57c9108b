"""A loop around openvino alone: the batches that our engine formed, computed with its network and its streams.

A bound, not a peer: nothing is tokenized, padded, looked up, copied or sent while the clock runs, and the results are
thrown away. What our engine needs beyond it is ours.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.systems.bound.batch_log import read_batches
from benchmarks.systems.peers.serving import Encoded, read_order, serve
from benchmarks.systems.protocol import BATCHES, ChildOrder
from vectormill.models.registry import Registry
from vectormill.settings import ModelEntry
from worker.batching.batch import Batch
from worker.devices.detect import detect_inventory
from worker.devices.device import parse_devices
from worker.encoder.choice import choose_precision
from worker.encoder.encoder import Choice, EncoderOrder
from worker.openvino.encoder import OpenVINOEncoder
from worker.openvino.runtime import openvino as ov
from worker.settings import load_worker_settings

NAME = "benchmark"

# The inputs of one batch, in the network's order.
Inputs = list[Any]


class BareLoop:
    """The network as a worker's model process compiles it, and a thread for each of its streams."""

    def __init__(self, order: ChildOrder) -> None:
        self._path = Path(order.options[BATCHES])
        card = Registry({NAME: ModelEntry(path=order.model)}).card(NAME, weights=True)
        settings = load_worker_settings()
        device = parse_devices(order.device, detect_inventory())[0]
        precision = choose_precision(settings.precision, device)
        asked = EncoderOrder(
            card,
            device,
            "openvino",
            precision.value,
            settings.threads or device.num_threads,
            Path(order.cache_dir),
        )
        self._encoder = OpenVINOEncoder(asked, Choice("openvino", "a bare loop"), precision)
        self._dimension = card.dimension

    def __call__(self, texts: list[str]) -> Encoded:
        """Of the texts nothing is read: the engine has just encoded them, and its batches lie in a file."""
        batches = read_batches(self._path)
        inputs = self.lay_out(batches)
        num_computed_tokens = sum(each[0].size for each in inputs)
        started = time.perf_counter()
        self.run(inputs)
        seconds = time.perf_counter() - started
        nothing = np.zeros((0, self._dimension), dtype=np.float32)
        return Encoded(nothing, sum(batch.num_tokens for batch in batches), num_computed_tokens, seconds)

    def report(self) -> dict[str, Any]:
        report = self._encoder.describe()
        return {"precision": {"value": report.precision.value}, "num_streams": report.num_streams}

    def lay_out(self, batches: Sequence[Batch]) -> list[Inputs]:
        """Padded, each with ids of its own. Batches of one shape share the vectors of the words of the first: what they
        are makes no difference to the time, and those of a long pass are gigabytes.
        """
        words: dict[tuple[int, ...], Any] = {}
        laid_out = []
        for batch in batches:
            arrays = self._encoder.prepare(batch).inputs
            shape = arrays["input_ids"].shape
            arrays["word_embeddings"] = words.setdefault(shape, arrays["word_embeddings"])
            names = self._encoder.network.input_names
            laid_out.append([ov.Tensor(arrays[name], shared_memory=True) for name in names])
        return laid_out

    def run(self, batches: Sequence[Inputs]) -> None:
        """All of them, in order, each by the first stream that is free."""
        waiting, lock = iter(batches), threading.Lock()
        failures: list[Exception] = []
        threads = [
            threading.Thread(target=self._serve, args=(waiting, lock, failures))
            for _ in range(self._encoder.describe().num_streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _serve(self, waiting: Iterator[Inputs], lock: threading.Lock, failures: list[Exception]) -> None:
        request = self._encoder.take_request()
        try:
            while not failures:
                with lock:
                    inputs = next(waiting, None)
                if inputs is None:
                    break
                for place, tensor in enumerate(inputs):
                    request.set_input_tensor(place, tensor)
                request.start_async()
                request.wait()
        except Exception as error:  # noqa: BLE001 - whoever waits for the threads raises it
            failures.append(error)
        finally:
            self._encoder.put_request(request)


if __name__ == "__main__":
    serve(read_order(), BareLoop)
