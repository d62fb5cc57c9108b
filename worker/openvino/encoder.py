"""OpenVINOEncoder: runs a converted network on some cores of a CPU. Pads; knows neither chunks nor torch."""

import json
import threading
import time
from queue import SimpleQueue
from typing import Any, Final

import numpy as np

from vectormill.ragged import Ragged
from worker.batching.batch import TOKEN_TYPE_IDS, Batch
from worker.batching.cost import LengthBuckets
from worker.encoder.allocator import keep_large_blocks_apart
from worker.encoder.choice import BF16, FP32, find_arithmetic
from worker.encoder.encoder import Choice, DirectEncoder, EncoderOrder, EncoderReport, Loading, device_choice
from worker.encoder.padding import pad_batch
from worker.openvino.conversion import INPUTS, find_or_convert
from worker.openvino.mapped_weights import MappedWeights
from worker.openvino.runtime import openvino as ov
from worker.openvino.streams import choose_streams
from worker.openvino.word_table import WordTable

# Making a batch's buffers anew takes about 10 ms, and reading what is still in use of the weights less than 1.
FORGET_SECONDS: Final = 1.0
RELEASE_SECONDS: Final = 10.0
HINTS: Final = {FP32: "f32", BF16: "bf16"}


class OpenVINOEncoder(DirectEncoder):
    """A converted network on some cores of a CPU; padded batches of any shape, one a stream at a time."""

    def __init__(
        self, order: EncoderOrder, backend: Choice, precision: Choice, notes: tuple[str, ...] = ()
    ) -> None:
        start = time.perf_counter()
        num_streams = choose_streams(order, precision.value)
        keep_large_blocks_apart()
        core = ov.Core()
        folder = find_or_convert(order, precision.value)
        weights = MappedWeights(folder / "network.bin")
        network = (folder / "network.xml").read_text(encoding="utf-8")
        compiled = core.compile_model(
            core.read_model(network, ov.Tensor(weights.bytes, shared_memory=True)),
            "CPU",
            {
                # f32 is said explicitly: the default is whatever the processor computes fastest.
                "INFERENCE_PRECISION_HINT": HINTS[find_arithmetic(precision.value, order.device)],
                # Nor are activations rounded to int8 behind our back, the default for compressed weights: 1.1 to 1.4
                # times the speed where it was measured, and the smallest cosine falls from 0.9996 to 0.9983.
                "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
                "NUM_STREAMS": str(num_streams),
                "INFERENCE_NUM_THREADS": str(order.num_threads),
                # The process is pinned to its cores from outside, where two workers can be told apart.
                "ENABLE_CPU_PINNING": "NO",
            },
        )
        self._compiled = compiled
        self._buffers = BufferWatch()
        # For every shape that openvino has seen it keeps kernels of its own, some 0.4 MiB.
        self._length_buckets = LengthBuckets(order.card.max_tokens)
        self._releasing = threading.Lock()
        self._requests: SimpleQueue[Any] = SimpleQueue()  # one a stream; each has buffers of its own
        for _ in range(num_streams):
            self._requests.put(compiled.create_infer_request())
        # openvino keeps the whole file resident, and its matrices a second time as its kernels want them. Of the file,
        # positions are read again, and matrices when a new shape wants them packed otherwise.
        self._weights = weights
        self._forget_weights()
        facts = json.loads((folder / "network.json").read_text())
        self._pad_token_id = int(facts["pad_token_id"])
        self._words = WordTable(folder / "words.bin", int(facts["word_embedding_dim"]))
        seconds = time.perf_counter() - start
        self._report = EncoderReport(
            device=device_choice(order),
            backend=backend,
            precision=precision,
            attention="openvino",
            num_threads=order.num_threads,
            num_streams=num_streams,
            longest_bucket=self._length_buckets.longest,
            load_seconds=seconds,
            loadings=(Loading(order.device.name, weights.bytes.nbytes + self._words.num_bytes, seconds),),
            notes=notes,
        )

    def encode(self, batch: Batch) -> Ragged:
        if TOKEN_TYPE_IDS in batch.inputs:
            raise ValueError("This conversion reads no token_type_ids; use the backend torch for pairs.")
        padded = pad_batch(batch, self._pad_token_id, self._length_buckets)
        word_embeddings = self._words.read(padded.input_ids)
        inputs = (padded.input_ids, padded.attention_mask, padded.pool_mask, word_embeddings)
        request = self._requests.get()
        try:
            # All share their inputs, or none: a batch that copied them would do so into the memory of one that shared
            # them, which may be gone (openvino 2026.4.1 then corrupts the heap).
            outputs = request.infer(dict(zip(INPUTS, inputs, strict=True)), share_inputs=True)
            # A copy: the output lies in memory of the request, which the next batch overwrites.
            vectors = np.array(outputs[0], dtype=np.float32)
        finally:
            self._requests.put(request)
        if time.monotonic() >= self._forget_at:
            self._forget_weights()
        if self._buffers.note(padded.input_ids.size, time.monotonic()):
            self._release_buffers()
        return Ragged.from_matrix(vectors)

    def _forget_weights(self) -> None:
        self._weights.forget()
        self._forget_at = time.monotonic() + FORGET_SECONDS

    def _release_buffers(self) -> None:
        """Waits for what other streams encode: openvino refuses while it computes."""
        with self._releasing:
            requests = [self._requests.get() for _ in range(self._report.num_streams)]
            try:
                self._compiled.release_memory()
            finally:
                for request in requests:
                    self._requests.put(request)

    def describe(self) -> EncoderReport:
        return self._report


class BufferWatch:
    """Tells when the buffers of openvino, which are as large as its largest batch wanted them, had better be made anew.

    Sizes of batches are in tokens. Used by several threads: what one of them misses is a batch among many.
    """

    def __init__(self) -> None:
        self._kept_tokens = 0  # that the buffers are made for
        self._recent_tokens = 0  # of the largest batch since the last look
        self._look_at = 0.0

    def note(self, num_tokens: int, now: float) -> bool:
        """Says so now and then, if no batch since has wanted half of them."""
        self._recent_tokens = max(self._recent_tokens, num_tokens)
        self._kept_tokens = max(self._kept_tokens, num_tokens)
        if now < self._look_at:
            return False
        is_too_large = self._recent_tokens * 2 <= self._kept_tokens
        if is_too_large:
            self._kept_tokens = self._recent_tokens
        self._recent_tokens = 0
        self._look_at = now + RELEASE_SECONDS
        return is_too_large
