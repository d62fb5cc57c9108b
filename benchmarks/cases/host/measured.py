"""What one length of texts came to, pass by pass, and the figures that follow from it. Measures nothing."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.probes.process_tree import CELERY_WORKER, MODEL_PROCESS
from benchmarks.results.spread import Spread
from benchmarks.systems.host.engine_pass import EnginePass
from benchmarks.systems.host.host_stack import JobCost
from benchmarks.systems.host.tokenizer_pass import TokenizerPass

MICRO: Final = 1e6
# Those of a stack whose time grows with the texts; what is left is one row.
PROCESSES: Final = (CELERY_WORKER, MODEL_PROCESS, "api", "scheduler", "postgres", "valkey")
OTHERS: Final = "others"


@dataclass(slots=True)
class Measured:
    """One checkout's passes over texts of one length: equally many of each kind, in the order of the repetitions."""

    jobs: list[JobCost] = field(default_factory=list)
    engine: list[EnginePass] = field(default_factory=list)
    tokenizer: list[TokenizerPass] = field(default_factory=list)
    counted: EnginePass | None = None  # of blocks, and not of speed

    def job_rate(self) -> Spread:
        """Texts a second, from the first claim to the last commit."""
        return Spread.of([job.num_texts / job.seconds for job in self.jobs])

    def engine_rate(self) -> Spread:
        return Spread.of([each.num_texts / each.seconds for each in self.engine])

    def tokenizer_rate(self) -> Spread:
        return Spread.of([each.num_texts / each.seconds for each in self.tokenizer])

    def engine_share(self) -> Spread:
        """Of what the bare tokenizer does, repetition by repetition."""
        pairs = zip(self.engine, self.tokenizer, strict=True)
        return Spread.of(
            [(own.num_texts / own.seconds) / (bare.num_texts / bare.seconds) for own, bare in pairs]
        )

    def busy_share(self, num_cores: int) -> Spread:
        """Of the cores, while a job was computed."""
        return Spread.of([job.busy_seconds / (job.seconds * num_cores) for job in self.jobs])

    def process_micros(self, name: str) -> float:
        """Processor time a text, in microseconds; `others` are all processes that have no row of their own."""
        return self._median(lambda job: find_process_seconds(job.cpu_seconds, name) / job.num_texts)

    def stage_micros(self, stage: str) -> float:
        """What a job says of a stage, a text: seconds of threads, some of them spent waiting."""
        return self._median(lambda job: job.stage_seconds.get(stage, 0.0) / job.num_texts)

    def tokenizer_micros(self) -> float:
        return MICRO * statistics.median(each.cpu_seconds / each.num_texts for each in self.tokenizer)

    def engine_micros(self) -> float:
        """Processor time of the engine's process alone."""
        return MICRO * statistics.median(each.engine_cpu_seconds / each.num_texts for each in self.engine)

    def own_tokenizer_micros(self) -> float:
        """Return the processor time of the tokenizer that the worker itself uses."""
        return MICRO * statistics.median(each.own_cpu_seconds / each.num_texts for each in self.tokenizer)

    def beside_tokenizer_micros(self) -> Spread:
        """Subtract from the Celery worker's processor time, pass by pass, what its own tokenizer takes."""
        pairs = zip(self.jobs, self.tokenizer, strict=True)
        return Spread.of(
            [
                MICRO
                * (
                    job.cpu_seconds.get(CELERY_WORKER, 0.0) / job.num_texts
                    - own.own_cpu_seconds / own.num_texts
                )
                for job, own in pairs
            ]
        )

    def host_micros(self) -> float:
        """Processor time of the whole stack a text, its submission included."""
        return sum(self.process_micros(name) for name in (*PROCESSES, OTHERS))

    def runner_bytes(self) -> float:
        """That a model process writes into its pipe, a text."""
        return statistics.median(each.runner_bytes / each.num_texts for each in self.engine)

    def read_bytes(self) -> float:
        """That an engine reads from it, a text."""
        return statistics.median(each.read_bytes / each.num_texts for each in self.engine)

    def num_blocks(self) -> float | None:
        """Python's blocks of memory a text in flight, where they were counted."""
        return None if self.counted is None else self.counted.num_blocks / self.counted.num_texts_in_flight

    def _median(self, read: Callable[[JobCost], float]) -> float:
        return MICRO * statistics.median(map(read, self.jobs))


def find_process_seconds(cpu_seconds: Mapping[str, float], name: str) -> float:
    if name == OTHERS:
        return sum(seconds for other, seconds in cpu_seconds.items() if other not in PROCESSES)
    return cpu_seconds.get(name, 0.0)


def compare_rates(now: Sequence[float], before: Sequence[float]) -> Spread:
    """How many times faster, repetition by repetition."""
    return Spread.of([one / other for one, other in zip(now, before, strict=True)])
