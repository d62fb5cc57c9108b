"""Choose how many batches a CPU encodes in parallel ("streams"), by its cores, its memory and the model."""

from typing import Final

from vectormill.domain.errors import ModelError
from worker.encoder.choice import find_arithmetic
from worker.encoder.encoder import EncoderOrder
from worker.placement.footprint import make_footprint

# The serial share of a batch's time. Two threads on one batch took 1/1.167 of the time that two parallel
# batches of one thread each take (docs/decisions/0015: 7,330 and 8,550 tokens/s); Amdahl's law with this
# share reproduces that and extrapolates to more threads.
SERIAL_SHARE: Final = 0.167
# The share of a core that tokenizer, executor and commit take per computing core: 4 to 6 % where it was
# counted.
HOST_SHARE: Final = 0.06
# If one core took longer than this for a batch, several cores share it, because every text waits for its
# whole batch.
LONGEST_ALONE_SECONDS: Final = 1.0
# The rate of a core with AVX2 in fp32. 70 to 95 GFLOP/s were measured; other cores are faster.
CORE_FLOP_PER_SECOND: Final = 50e9
# Such models get as many threads per stream as leave four streams, and at most four threads, which is
# openvino's own choice. With up to four cores each core has a stream, whatever the model.
FEWEST_STREAMS: Final = 4
MOST_THREADS_PER_STREAM: Final = 4
# The largest share of cores that may stay idle because threads do not divide evenly; one core always may.
IDLE_SHARE: Final = 1 / 16
# The share of the memory left next to the weights that batches of all streams may take.
STREAMS_MEMORY_SHARE: Final = 0.5
# The batch size assumed for a stream: tuning begins with it, for texts up to this length.
STREAM_BATCH_TOKENS: Final = 1024


def choose_streams(order: EncoderOrder, precision: str) -> int:
    """Return the number of streams: as many as the threads can use and the memory holds."""
    try:
        shape = order.card.find_shape()
    except ModelError:  # its files do not state its sizes
        return count_streams(order.num_threads, is_large=True)
    num_multiplied = sum(
        tensor.num_values for tensor in shape.tensors if tensor.is_matrix and not tensor.is_embedding
    )
    alone_seconds = 2.0 * num_multiplied * STREAM_BATCH_TOKENS / CORE_FLOP_PER_SECOND
    is_large = alone_seconds > LONGEST_ALONE_SECONDS and not order.is_reproducible
    if order.device.free_bytes is None:
        return count_streams(order.num_threads, is_large=is_large)
    footprint = make_footprint(
        shape, precision, "openvino", arithmetic=find_arithmetic(precision, order.device)
    )
    length = min(order.card.max_tokens, STREAM_BATCH_TOKENS)
    batch_bytes = footprint.predict_batch_bytes(STREAM_BATCH_TOKENS // length, length)
    most = count_streams_in(order.device.free_bytes, footprint.weight_bytes, batch_bytes)
    return count_streams(order.num_threads, most, is_large=is_large)


def count_streams(num_threads: int, most: int | None = None, *, is_large: bool = False) -> int:
    """Return the number of batches that share the threads evenly.

    `most` is the number that the memory holds; `is_large` means that a batch is too much for one core.
    Threads on one batch wait for one another after each operation, and all of them wait for a thread whose
    core is taken away: parallel batches are encoded 1.15 times as fast (decision 0015).
    """
    most = num_threads if most is None else min(most, num_threads)
    if is_large:
        idle = max(1, int(num_threads * IDLE_SHARE))
        fitting = (
            num_threads // threads
            for threads in range(MOST_THREADS_PER_STREAM, 0, -1)
            if num_threads // threads >= min(num_threads, FEWEST_STREAMS) and num_threads % threads <= idle
        )
        return max(1, min(next(fitting, num_threads), most))
    # Of equally fast numbers the smallest is taken: the cores that it leaves idle serve the tokenizer.
    return max(range(1, max(1, most) + 1), key=lambda streams: (predict_rate(num_threads, streams), -streams))


def predict_rate(num_threads: int, num_streams: int) -> float:
    """Return the predicted total rate of the streams, in units of a core that computes a batch alone.

    A model, not a measurement: Amdahl's law for the threads of a stream. The host's work runs on the cores
    that streams leave idle, and beyond that on theirs.
    """
    threads = num_threads // num_streams
    efficiency = 1 / (1 + SERIAL_SHARE * (threads - 1))
    return min(num_streams * threads * efficiency, num_threads / (1 / efficiency + HOST_SHARE))


def count_streams_in(free_bytes: int, weight_bytes: int, batch_bytes: int) -> int:
    """Return the number of streams whose batches fit into memory next to the weights."""
    return max(1, int(STREAMS_MEMORY_SHARE * (free_bytes - weight_bytes)) // batch_bytes)
