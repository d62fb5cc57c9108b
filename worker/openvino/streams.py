"""How many batches a processor encodes side by side, from its cores and its memory. Loads no model."""

from typing import Final

from vectormill.domain.errors import ModelError
from worker.encoder.choice import find_arithmetic
from worker.encoder.encoder import EncoderOrder
from worker.placement.sizes.footprint import make_footprint
from worker.placement.sizes.model_shape import read_model_shape

# Each stream holds the activations of a batch, and takes longer for it the fewer threads it has. Up to four cores each
# has one; beyond, as many threads a stream as leave four streams, and no more than four of them: openvino's own
# streams are of four threads where it chooses (docs/decisions/0015).
FEWEST_STREAMS: Final = 4
MOST_THREADS_PER_STREAM: Final = 4
# Cores that no stream uses: one, which tokenizes, and of many cores no more than this part.
IDLE_SHARE: Final = 1 / 16
# Of the memory that the weights leave, streams take no more for their batches.
STREAMS_MEMORY_SHARE: Final = 0.5
# A stream's batch, as large as tuning begins with, of texts no longer than that.
STREAM_BATCH_TOKENS: Final = 1024


def choose_streams(order: EncoderOrder, precision: str) -> int:
    """For a model in openvino: as many as the threads want, and the memory holds that was planned for it."""
    if order.device.free_bytes is None:
        return count_streams(order.num_threads)
    try:
        shape = read_model_shape(order.card)
    except ModelError:  # its files do not tell its sizes
        return count_streams(order.num_threads)
    footprint = make_footprint(
        shape, precision, "openvino", arithmetic=find_arithmetic(precision, order.device)
    )
    length = min(order.card.max_tokens, STREAM_BATCH_TOKENS)
    batch_bytes = footprint.predict_batch_bytes(STREAM_BATCH_TOKENS // length, length)
    most = count_streams_in(order.device.free_bytes, footprint.weight_bytes, batch_bytes)
    return count_streams(order.num_threads, most)


def count_streams(num_threads: int, most: int | None = None) -> int:
    """How many batches share the threads, each with equally many; at most one thread, or a sixteenth of many, is left
    over. `most` is how many the memory holds.

    Threads that share a batch wait for one another behind each of its operations, and all of them for the one whose
    core something else has: batches side by side are encoded 1.15 times as fast (decision 0015).
    """
    idle = max(1, int(num_threads * IDLE_SHARE))
    found = num_threads
    for threads in range(MOST_THREADS_PER_STREAM, 0, -1):
        streams = num_threads // threads
        if streams >= min(num_threads, FEWEST_STREAMS) and num_threads % threads <= idle:
            found = streams
            break
    return max(1, found if most is None else min(found, most))


def count_streams_in(free_bytes: int, weight_bytes: int, batch_bytes: int) -> int:
    """How many streams' batches the memory holds beside the weights."""
    return max(1, int(STREAMS_MEMORY_SHARE * (free_bytes - weight_bytes)) // batch_bytes)
