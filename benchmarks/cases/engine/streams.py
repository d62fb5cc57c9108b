"""streams: how the cores of large processors are shared out, and what that is predicted to bring. Measures nothing.

Source of the model: decision 0015, which has what two cores were measured to do, and Amdahl's law for more.
"""

from collections.abc import Sequence
from typing import Final

from benchmarks.order import Order
from benchmarks.results.report import Report
from benchmarks.results.table import Table
from benchmarks.results.writing import write_ratio, write_share
from worker.devices.described import describe_inventory
from worker.devices.device import CPU, parse_devices
from worker.openvino.streams import HOST_SHARE, SERIAL_SHARE, count_streams, predict_rate

PROCESSORS: Final = (
    "1x2cores", "1x7cores", "1x8cores", "1x11cores", "1x13cores", "1x16cores", "1x17cores", "1x31cores", "1x32cores",
    "1x61cores", "1x64cores", "2x16cores", "2x32cores", "2x31cores",
)  # fmt: skip
MEMORY: Final = "256GiB"
FORMER_STREAMS: Final = 4
HEADER: Final = (
    "NUMA nodes and cores",
    "streams",
    "rate a core",
    "to four streams",
    "large: streams",
    "rate a core",
)


def measure(order: Order) -> Report:
    order.steps.begin("streams", 1)
    order.steps.step("planning")
    return Report(
        "streams",
        "predicted, of processors that were not there.",
        (Table(HEADER, tuple(make_row(processor) for processor in PROCESSORS)),),
        (
            "A rate is in cores that compute nothing but a batch of their own. Threads of a stream share a batch by "
            f"Amdahl's law, {SERIAL_SHARE:.1%} of it not shared: two streams of a thread were 1.167 times as fast as "
            "one of two (docs/decisions/0015). The host takes "
            f"{HOST_SHARE:.0%} of a core for each that computes. Neither caches nor the bandwidth of memory are in it.",
            "Each NUMA node is a device with a process of its own. Streams are written as so many of so many threads; "
            "four streams are those of all cores of a node, as it once was.",
            "Large are models of which a batch of 1,024 tokens takes one core more than a second: from BERT-base on.",
        ),
    )


def make_row(processor: str) -> tuple[str, ...]:
    threads = split(processor)
    small, large = (
        [count_streams(each, is_large=is_large) for each in threads] for is_large in (False, True)
    )
    rate = find_rate(threads, small)
    former = find_rate(threads, [min(each, FORMER_STREAMS) for each in threads])
    return (
        processor.removesuffix("cores").replace("x", " × "),
        write_streams(threads, small),
        write_share(rate),
        write_ratio(rate / former),
        write_streams(threads, large),
        write_share(find_rate(threads, large)),
    )


def split(processor: str) -> list[int]:
    """The cores of each device that a worker makes of it."""
    return [device.num_threads for device in parse_devices(CPU, describe_inventory(f"{processor},{MEMORY}"))]


def find_rate(threads: Sequence[int], streams: Sequence[int]) -> float:
    """A core, of all devices together."""
    rates = (predict_rate(each, count) for each, count in zip(threads, streams, strict=True))
    return sum(rates) / sum(threads)


def write_streams(threads: Sequence[int], streams: Sequence[int]) -> str:
    each = f"{streams[0]} × {threads[0] // streams[0]}"
    return each if len(threads) == 1 else f"{len(threads)} × ({each})"
