"""Run a converted network on some cores of a CPU, in padded batches. Imports no torch."""

import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.task import DENSE
from vectormill.models.families import find_family
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.batching.cost import LengthBuckets
from worker.encoder.encoder import Choice, Encoder, EncoderOrder
from worker.encoder.memory import keep_large_blocks_apart
from worker.encoder.outputs import POOLED, POOLED_BOUNDS, WantedOutputs, find_wanted, weighs_tokens
from worker.encoder.padding import PaddedBatch, pad_batch
from worker.openvino.conversion import find_or_convert
from worker.openvino.network import (
    STATES,
    VECTORS,
    WORD_EMBEDDINGS,
    ConversionFailed,
    LinearHeads,
    OpenVINONetwork,
    list_outputs,
    pools_passages,
)
from worker.openvino.runtime import openvino as ov
from worker.openvino.streams import choose_streams
from worker.tokens.tokenized import INPUT_IDS, SPANS, TOKEN_TYPE_IDS

RELEASE_SECONDS: Final = 10.0


class Buffers:
    """A pool of reusable fp32 arrays for batches. Safe for threads."""

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._spare: list[NDArray[np.float32]] = []
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Take an uninitialized array of this shape from the pool.

        It may be a view of a larger array, its `base`.
        """
        size = math.prod(shape)
        with self._lock:
            found = next((place for place, spare in enumerate(self._spare) if spare.size >= size), None)
            if found is not None:
                buffer = self._spare.pop(found)
            else:
                del self._spare[:1]  # a buffer that is too small is dropped for a new one
                buffer = np.empty(size, dtype=np.float32)
        return buffer[:size].reshape(shape)

    def give_back(self, taken: NDArray[np.float32]) -> None:
        """Put an array that is no longer read back into the pool."""
        base = taken
        while isinstance(base.base, np.ndarray):
            base = base.base
        with self._lock:
            if len(self._spare) < self._num_kept:
                self._spare.append(base)

    def release(self) -> None:
        """Free all buffers that are not in use."""
        with self._lock:
            self._spare.clear()


class BufferWatch:
    """A monitor that reports when buffers are much larger than recent batches need.

    Batch sizes are in tokens. It has no lock: if threads race, at most one batch of many is missed.
    """

    def __init__(self) -> None:
        self._kept_tokens = 0  # the size that the buffers were made for
        self._recent_tokens = 0  # the largest batch since the last check
        self._look_at = 0.0

    def note(self, num_tokens: int, now: float) -> bool:
        """Note a batch.

        Return True at most every RELEASE_SECONDS, if recent batches needed at most half of the buffers.
        """
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


# Reallocating a batch's buffers takes about 10 ms; reading the weights that are still in use again takes
# less than 1 ms.
FORGET_SECONDS: Final = 1.0


class OpenVINOEncoder(Encoder):
    """The encoder of a converted network on some cores of a CPU, with one padded batch per stream."""

    def __init__(
        self, order: EncoderOrder, backend: Choice, precision: Choice, notes: tuple[str, ...] = ()
    ) -> None:
        start = time.perf_counter()
        self.card = order.card
        if order.card.sparse_head is not None and not weighs_tokens(order.card):
            raise ConversionFailed("only torch computes the weights of words (SPLADE)")
        if obstacle := find_family(order.card.model_type).openvino_obstacle:
            raise ConversionFailed(obstacle)
        self._num_streams = choose_streams(order, precision.value)
        keep_large_blocks_apart()
        folder = find_or_convert(order, precision.value)
        self.network = OpenVINONetwork(folder, order, precision.value, self._num_streams)
        self.heads = None if order.card.outputs == (DENSE,) else LinearHeads(folder, order.card)
        head = order.card.token_head
        self._unattended = None if head is None else head.unattended
        # openvino caches kernels for each input shape, some 0.4 MiB per shape.
        self._length_buckets = LengthBuckets(order.card.max_tokens)
        self._watch = BufferWatch()
        # Buffers for the batches in progress and for the next one.
        self._buffers = Buffers(self._num_streams + 1)
        self._taking_all = threading.Lock()
        self.requests: SimpleQueue[Any] = SimpleQueue()  # one per stream
        if order.is_reproducible and order.card.classifier is not None and self.network.has_types:
            self.network.read_types()  # now, because another graph may give other bits
        for _ in range(self._num_streams):
            self.requests.put(self.network.make_request())
        self._forget_at = time.monotonic() + FORGET_SECONDS
        self.note_loading(
            order,
            start,
            self.network.num_bytes,
            backend=backend,
            precision=precision,
            attention="openvino",
            num_streams=self._num_streams,
            longest_bucket=self._length_buckets.longest,
            notes=notes,
            pools_passages=pools_passages(order.card),
        )

    def prepare(self, batch: Batch) -> "OpenVINOPass":
        """Pad the batch and look up its word embeddings, in memory that openvino reads directly."""
        if TOKEN_TYPE_IDS in batch.inputs and not self.network.reads_types:
            self._change(self.network.read_types, lambda: self.network.reads_types)
        if SPANS in batch.inputs and not self.network.gives_states:
            self._change(self.network.give_states, lambda: self.network.gives_states)
        padded = pad_batch(batch, self.network.pad_token_id, self._length_buckets, self._unattended)
        words = self._buffers.take((*padded.input_ids.shape, self.network.words.dim))
        self.network.words.read(padded.input_ids, out=words)
        wanted = find_wanted(batch, self.card, padded.input_ids.shape)
        return OpenVINOPass(self, padded, words, wanted)

    def finish(self, request: Any, words: NDArray[np.float32], num_tokens: int) -> None:
        """Take back request and word embeddings of a finished batch of `num_tokens`, padding included."""
        self.requests.put(request)
        self._buffers.give_back(words)
        now = time.monotonic()
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            self.network.forget_weights()
        if self._watch.note(num_tokens, now):
            self._buffers.release()
            # openvino refuses to free memory while it computes.
            self._change(self.network.release_memory)

    def _change(self, change: Callable[[], None], is_done: Callable[[], bool] | None = None) -> None:
        """Change the network once all streams are idle, unless that was done meanwhile.

        With `is_done` it is compiled anew, in place of the one that is there, to hold weights only once.
        """
        with self._taking_all:
            if is_done is not None and is_done():
                return
            requests = [self.requests.get() for _ in range(self._num_streams)]
            try:
                change()
                if is_done is not None:
                    requests = [self.network.make_request() for _ in requests]
            finally:
                for request in requests:
                    self.requests.put(request)


class OpenVINOPass:
    """One batch whose inputs are ready; once started, openvino's own threads compute it.

    Implements ForwardPass.
    """

    def __init__(
        self,
        encoder: OpenVINOEncoder,
        padded: PaddedBatch,
        words: NDArray[np.float32],
        wanted: WantedOutputs | None,
    ) -> None:
        self._encoder = encoder
        self._wanted = wanted
        self._words = words
        self._num_tokens = padded.input_ids.size
        self.inputs: dict[str, NDArray[Any]] = {
            **padded.tokens,
            "attention_mask": padded.attention_mask,
            "pool_mask": padded.pool_mask,
            WORD_EMBEDDINGS: words,
        }
        self._request: Any = None

    def start(self) -> None:
        self._request = request = self._encoder.requests.get()
        try:
            for place, name in enumerate(self._encoder.network.input_names):
                # Either all batches share our memory with openvino or none does: a batch that copies its
                # inputs would copy them into the memory of an earlier one that shared its own, which may be
                # freed (openvino 2026.4.1 then corrupts the heap).
                request.set_input_tensor(place, ov.Tensor(self._input(name), shared_memory=True))
            request.start_async()
        except BaseException:
            self._finish()
            raise

    def _input(self, name: str) -> NDArray[Any]:
        if name == TOKEN_TYPE_IDS and name not in self.inputs:  # a single text, after pairs
            self.inputs[name] = np.zeros_like(self.inputs[INPUT_IDS])
        return self.inputs[name]

    def results(self) -> Ragged:
        try:
            self._request.wait()
            if self._wanted is not None:
                return self._represent(self._wanted)
            # Copied, because the output is in the request's memory, which the next batch overwrites.
            vectors = np.array(self._request.get_output_tensor(0).data, dtype=np.float32)
        finally:
            self._finish()
        return Ragged.from_matrix(vectors)

    def _represent(self, wanted: WantedOutputs) -> Ragged:
        encoder = self._encoder
        names = list_outputs(encoder.card)
        states = self._request.get_output_tensor(names.index(STATES)).data
        flat = states.reshape(-1, states.shape[-1])
        parts = []
        for name in wanted.wants:
            if name == DENSE:
                parts.append(self._request.get_output_tensor(names.index(VECTORS)).data)
            elif name == POOLED:
                bounds = wanted.places[POOLED_BOUNDS]
                sums = np.add.reduceat(flat[wanted.places[name]], bounds[:-1])
                parts.append((sums / np.diff(bounds)[:, np.newaxis]).astype(np.float32))
            else:
                assert encoder.heads is not None
                parts.append(encoder.heads.compute(name, flat[wanted.places[name]]))
        content = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
        return wanted.lay_out(encoder.card, content)

    def _finish(self) -> None:
        request, self._request = self._request, None
        self._encoder.finish(request, self._words, self._num_tokens)
