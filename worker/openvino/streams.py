"""Choose how many batches a processor encodes side by side, by its cores, its memory and the model. Loads no model."""

from typing import Final

from vectormill.domain.errors import ModelError
from worker.encoder.choice import find_arithmetic
from worker.encoder.encoder import EncoderOrder
from worker.placement.footprint import make_footprint
from worker.placement.model_shape import ModelShape, read_model_shape

# The share of a batch's time that its threads do not share. Two threads took 1/1.167 of the time that two batches
# side by side take of one each (docs/decisions/0015: 7,330 and 8,550 tokens/s): Amdahl's law with this part gives
# that, and says of more.
SERIAL_SHARE: Final = 0.167
# The part of a core that tokenizer, executor and commit take, for each core that computes: 4 to 6 % where it was
# counted.
HOST_SHARE: Final = 0.06
# Where a batch takes one core longer than this, several share it: whoever waits for one text waits for all of it.
LONGEST_ALONE_SECONDS: Final = 1.0
# A core with AVX2 in fp32, whose rate is 70 to 95 where it was measured; others are faster.
CORE_FLOP_PER_SECOND: Final = 50e9
# For such models: as many threads a stream as leave four streams, and no more than four of them, which is what openvino
# takes by itself where it chooses. Up to four cores each has a stream, whatever the model.
FEWEST_STREAMS: Final = 4
MOST_THREADS_PER_STREAM: Final = 4
# Cores that none of their streams uses: one, and of many no more than this part.
IDLE_SHARE: Final = 1 / 16
# The share of the memory beside the weights that streams take for their batches.
STREAMS_MEMORY_SHARE: Final = 0.5
# A stream's batch, as large as tuning begins with, of texts no longer than that.
STREAM_BATCH_TOKENS: Final = 1024


def choose_streams(order: EncoderOrder, precision: str) -> int:
    """Choose the number of streams: as many as the threads want and the planned memory holds."""
    try:
        shape = read_model_shape(order.card)
    except ModelError:  # its files do not tell its sizes
        return count_streams(order.num_threads, is_large=True)
    is_large = is_slow_alone(shape)
    if order.device.free_bytes is None:
        return count_streams(order.num_threads, is_large=is_large)
    footprint = make_footprint(
        shape, precision, "openvino", arithmetic=find_arithmetic(precision, order.device)
    )
    length = min(order.card.max_tokens, STREAM_BATCH_TOKENS)
    batch_bytes = footprint.predict_batch_bytes(STREAM_BATCH_TOKENS // length, length)
    most = count_streams_in(order.device.free_bytes, footprint.weight_bytes, batch_bytes)
    return count_streams(order.num_threads, most, is_large=is_large)


def is_slow_alone(shape: ModelShape) -> bool:
    """Return True if one core would take too long for a stream's batch."""
    num_multiplied = sum(
        tensor.num_values for tensor in shape.tensors if tensor.is_matrix and not tensor.is_embedding
    )
    return 2.0 * num_multiplied * STREAM_BATCH_TOKENS / CORE_FLOP_PER_SECOND > LONGEST_ALONE_SECONDS


def count_streams(num_threads: int, most: int | None = None, *, is_large: bool = False) -> int:
    """Return how many batches share the threads, each with equally many. `most` is how many the memory holds;
    `is_large` says that a batch is too much for one core.

    Threads that share a batch wait for one another behind each of its operations, and all of them for the one whose
    core something else has: batches side by side are encoded 1.15 times as fast (decision 0015).
    """
    most = num_threads if most is None else min(most, num_threads)
    if is_large:
        return max(1, min(_count_large(num_threads), most))
    # The fewest among equals: what they leave over is for the tokenizer.
    return max(range(1, max(1, most) + 1), key=lambda streams: (predict_rate(num_threads, streams), -streams))


def _count_large(num_threads: int) -> int:
    idle = max(1, int(num_threads * IDLE_SHARE))
    for threads in range(MOST_THREADS_PER_STREAM, 0, -1):
        streams = num_threads // threads
        if streams >= min(num_threads, FEWEST_STREAMS) and num_threads % threads <= idle:
            return streams
    return num_threads


def predict_rate(num_threads: int, num_streams: int) -> float:
    """Return what so many streams compute together, in cores that compute nothing but a batch of their own. A model,
    and no measurement.

    Amdahl's law for the threads of a stream; the host has what streams leave over, and beyond that their cores.
    """
    threads = num_threads // num_streams
    efficiency = 1 / (1 + SERIAL_SHARE * (threads - 1))
    return min(num_streams * threads * efficiency, num_threads / (1 / efficiency + HOST_SHARE))


def count_streams_in(free_bytes: int, weight_bytes: int, batch_bytes: int) -> int:
    """Return how many streams' batches the memory holds beside the weights."""
    return max(1, int(STREAMS_MEMORY_SHARE * (free_bytes - weight_bytes)) // batch_bytes)
