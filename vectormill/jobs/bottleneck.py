"""Find the stage that bounded a job or a worker, from the busy seconds of each stage.

Nothing is measured here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LOAD: Final = "load"
TOKENIZE: Final = "tokenize"
WAIT: Final = "wait"
COLLATE: Final = "collate"
RUN: Final = "run"
COLLECT: Final = "collect"
PERSIST: Final = "persist"

# The stages in the order in which a text passes through them. All but `wait` are busy time: of one device for
# `run`, and of as many threads as chunks are being processed for the others.
STAGES: Final = (LOAD, TOKENIZE, WAIT, COLLATE, RUN, COLLECT, PERSIST)

# Three more measurements that are stored with those of the stages: how long workers held chunks, summed over
# the workers, and meanwhile how long their devices were computing, for any job, and how long a thread of a CPU waited
# for a core that another process held, on average.
HELD: Final = "held"
DEVICE: Final = "device"
STARVED: Final = "starved"

QUEUE: Final = "queue"
BUSY_SHARE: Final = 0.8  # a device is busy from here on: the rest is a job's start and end
STARVED_SHARE: Final = 0.15  # from here on the reader should know that other processes held the cores
IDLE_SHARE: Final = 0.5  # share of the time without a chunk: no stage of a worker is the cause

WORDS: Final = {
    LOAD: ("the database", "reading its texts"),
    TOKENIZE: ("the tokenizer", "tokenizing"),
    COLLATE: ("the worker", "padding or packing its batches"),
    RUN: ("the model", "the forward pass"),
    COLLECT: ("the worker", "finishing its vectors"),
    PERSIST: ("the database", "writing its vectors"),
}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage that bounded a job, and a sentence that gives the evidence.

    The stage is `queue` when workers held no chunk most of the time.
    """

    value: str
    reason: str


def share_stages(stage_seconds: Mapping[str, float], elapsed_seconds: float) -> dict[str, float]:
    """Return the busy seconds of each stage per second in which a worker held a chunk.

    The share of `run` is relative to one device and at most 1. Other shares are relative to one thread: 2
    means that two threads were busy with the stage all the time.
    """
    held = stage_seconds.get(HELD) or elapsed_seconds
    return {stage: stage_seconds[stage] / held if held else 0.0 for stage in STAGES if stage in stage_seconds}


def find_bottleneck(stage_seconds: Mapping[str, float], elapsed_seconds: float) -> Bottleneck | None:
    """Return the stage to optimize first to make the job faster; None while nothing was measured.

    A busy device comes first, because the other stages are then hidden behind it. Otherwise the device waited
    for the stage in which chunks spent the most time.
    """
    busy = {stage: stage_seconds.get(stage, 0.0) for stage in WORDS}
    if elapsed_seconds <= 0 or not any(busy.values()):
        return None
    held = stage_seconds.get(HELD) or elapsed_seconds
    computing = min(max(stage_seconds.get(DEVICE, 0.0), busy[RUN]) / held, 1.0)
    if held < (1 - IDLE_SHARE) * elapsed_seconds:
        idle = 1 - held / elapsed_seconds
        return Bottleneck(QUEUE, f"the queue: workers held no chunk for {idle:.0%} of the time")
    said = f"the device was computing for {computing:.0%} of the time"
    starved = min(stage_seconds.get(STARVED, 0.0) / held, computing)
    if starved >= STARVED_SHARE:
        said += f" (in {starved:.0%} its threads waited for cores that other processes held)"
    if computing >= BUSY_SHARE:
        others = round(100 * max(computing - busy[RUN] / held, 0.0))
        own = round(100 * computing) - others
        shared = f", {own}% for its own texts and {others}% for others" if others >= 5 else ""
        return Bottleneck(RUN, f"the model: {said}{shared}")
    stage = max(busy, key=lambda name: busy[name])
    owner, doing = WORDS[stage]
    share = busy[stage] / sum(busy.values())
    return Bottleneck(stage, f"{owner}: {said}, and {share:.0%} of each chunk's own time went into {doing}")
