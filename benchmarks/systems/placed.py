"""PlacedModel: one model held by devices in one way, fed with batches. Without tokenizer, Celery, HTTP and Postgres.

Its processes are those that a worker starts; their encoder writes down what it takes (benchmarks.systems.gauged).
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.order import BenchmarkFailed
from benchmarks.probes.device_use import DeviceUseSampler
from benchmarks.systems.gauged import ALONE_FACTORY, SHARD_FACTORY, Reading, read_rank
from benchmarks.systems.peers.serving import WARM_UP_SHARE
from benchmarks.systems.protocol import Pass
from benchmarks.systems.system import EncodingProcesses
from vectormill.models.model_card import ModelCard
from vectormill.settings import process_environment
from worker.batching.batch import Batch
from worker.devices.detect import DeviceSampler
from worker.devices.device import CUDA, Device
from worker.encoder.encoder import EncoderOrder, EncoderReport
from worker.encoder.switches import NONE
from worker.placement.strategies import PIPELINE
from worker.runner.messages import BATCHES_AHEAD, Encode, Encoded, EncodeFailed, Loaded, LoadFailed
from worker.runner.runner import Runner, RunnerLost
from worker.runner.runner_group import RunnerGroup
from worker.runner.starter import RunnerStarter, Sharing

# A rank that hangs shall end the row, not the evening.
ANSWER_SECONDS: Final = 300.0
# Batches that go through a pipeline one by one, for its bubble.
NUM_BUBBLE_BATCHES: Final = 6

Ids = Sequence[NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Way:
    """How devices hold the model: its replicas, the padded tokens of a batch, how many batches a replica has, and which
    switches its ranks are asked for: with those of packing they pack.
    """

    name: str
    replicas: tuple[Sharing, ...]
    batch_tokens: int
    batches_ahead: int = 1 + BATCHES_AHEAD
    switches: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(device for sharing in self.replicas for device in sharing.devices)


class PlacedModel:
    """A System. All replicas take batches from one queue, as workers take chunks; the longest texts come first.

    Batches are padded and no switch is on unless it is told otherwise: what differs between two placements shall be the
    placement alone.
    """

    def __init__(
        self,
        way: Way,
        card: ModelCard,
        precision: str,
        mixes: Mapping[str, Ids],
        environment: Mapping[str, str] | None = None,
        attention: str = "padded",
        switches: Sequence[str] = (),
    ) -> None:
        self.name = way.name
        self.loaded: EncoderReport | None = None
        self._attention = attention
        self._switches = ",".join(switches) or NONE
        self._way = way
        self._card = card
        self._precision = precision
        self._mixes = mixes
        self._environment = process_environment() | dict(environment or {})
        self._exits = ExitStack()
        self._directories: list[Path] = []
        self._runners: list[Runner | RunnerGroup] = []
        self._vectors = np.empty((0, card.dimension), dtype=np.float32)
        self._use: tuple[float, ...] = ()
        self._last: list[Batch] = []

    def __enter__(self) -> "PlacedModel":
        with ExitStack() as exits:
            for sharing in self._way.replicas:
                directory = Path(exits.enter_context(TemporaryDirectory(prefix="vectormill-placed-")))
                runner = self._starter(sharing, directory).start()
                exits.callback(runner.stop)
                self._directories.append(directory)
                self._runners.append(runner)
            for runner in self._runners:
                self._wait_until_loaded(runner)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def warm_up(self, mix: str) -> None:
        ids = self._mixes[mix][::WARM_UP_SHARE]
        batches = [batch for _, batch in cut_batches(ids, self._way.batch_tokens)]
        # Every replica has to see some.
        self._encode(batches if len(batches) >= len(self._runners) else batches * len(self._runners))

    def encode(self, mix: str) -> Pass:
        planned = cut_batches(self._mixes[mix], self._way.batch_tokens)
        batches = [batch for _, batch in planned]
        with ExitStack() as exits:
            samplers = [
                exits.enter_context(
                    DeviceUseSampler(partial(_read_utilisation, DeviceSampler(device, lambda: None)))
                )
                for device in self._way.devices
                if device.kind == CUDA
            ]
            busy_before = self._count_cpu_seconds()
            started = time.perf_counter()
            answers = self._encode(batches)
            seconds = time.perf_counter() - started
            busy = [
                after - before for before, after in zip(busy_before, self._count_cpu_seconds(), strict=True)
            ]
        threads = [device.num_threads for device in self._way.devices]
        self._use = tuple(sampler.share for sampler in samplers) or tuple(
            each / (seconds * count) for each, count in zip(busy, threads, strict=True)
        )
        self._vectors = np.empty((len(self._mixes[mix]), self._card.dimension), dtype=np.float32)
        for (places, _), vectors in zip(planned, answers, strict=True):
            self._vectors[places] = vectors
        self._last = batches
        num_tokens = sum(batch.num_tokens for batch in batches)
        return Pass(seconds, num_tokens, sum(batch.num_padded_tokens for batch in batches))

    def resize(self, batch_tokens: int) -> None:
        """Batches hold so many padded tokens from now on."""
        self._way = replace(self._way, batch_tokens=batch_tokens)

    def vectors(self) -> NDArray[np.float32]:
        return self._vectors

    def report(self) -> dict[str, Any]:
        """How busy each device was in the last pass; of a pipeline also its bubble, and that of an ideal one."""
        texts = [len(batch) for batch in self._last]
        report: dict[str, Any] = {
            "use": self._use,
            "batch_tokens": self._way.batch_tokens,
            "batch_texts": sum(texts) / len(texts) if texts else 0.0,
        }
        replica = self._way.replicas[0].replica
        # The clocks of stages are the host's, which does not wait for a GPU.
        if replica.strategy == PIPELINE and self._way.devices[0].kind != CUDA:
            report |= self._measure_bubble(replica.micro_batches)
        return report

    def find_processes(self) -> EncodingProcesses:
        processes = [psutil.Process(reading.pid) for reading in self.readings()]
        return EncodingProcesses(model=processes, whole=processes)

    def readings(self) -> list[Reading]:
        """What every rank says of itself, in the order of the devices."""
        return [
            read_rank(directory, rank)
            for directory, sharing in zip(self._directories, self._way.replicas, strict=True)
            for rank in range(len(sharing.devices))
        ]

    def _starter(self, sharing: Sharing, directory: Path) -> RunnerStarter:
        device = sharing.devices[0]
        order = EncoderOrder(
            self._card,
            device,
            "torch",
            self._precision,
            device.num_threads,
            directory,
            self._attention,
            switches=self._switches,
        )
        return RunnerStarter(
            ALONE_FACTORY,
            order,
            self._environment,
            sharing=sharing if len(sharing.devices) > 1 else None,
            shard_factory=SHARD_FACTORY,
            collective_timeout_seconds=ANSWER_SECONDS,
        )

    def _wait_until_loaded(self, runner: Runner | RunnerGroup) -> None:
        for message in self._listen(runner, Loaded):
            self.loaded = message.report
            return

    def _encode(self, batches: Sequence[Batch], ahead: int | None = None) -> list[NDArray[np.float32]]:
        """The vectors of each batch. One thread for each replica."""
        waiting = deque(enumerate(batches))
        answers: list[NDArray[np.float32]] = [self._vectors] * len(batches)

        def drive(runner: Runner | RunnerGroup) -> None:
            num_sent = 0
            while True:
                while num_sent < (ahead or self._way.batches_ahead):
                    try:
                        number, batch = waiting.popleft()
                    except IndexError:
                        break
                    runner.send(Encode(number, batch, is_urgent=False))
                    num_sent += 1
                if not num_sent:
                    return
                for message in self._listen(runner, Encoded):
                    answers[message.number] = message.results.matrix.copy()
                    num_sent -= 1

        with ThreadPoolExecutor(len(self._runners)) as threads:
            try:
                list(threads.map(drive, self._runners))
            except RunnerLost as error:
                raise BenchmarkFailed(f"{self.name}: {error}") from error
        return answers

    def _listen(self, runner: Runner | RunnerGroup, kind: type) -> list[Any]:
        """The next messages of that kind. Raises BenchmarkFailed with the reason of a failure."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if not wait(runner.connections, max(0.0, deadline - time.monotonic())):
                raise BenchmarkFailed(f"{self.name} did not answer within {ANSWER_SECONDS:.0f} s.")
            try:
                said = runner.receive()
            except RunnerLost as error:
                raise BenchmarkFailed(f"{self.name}: {error}") from error
            for message in said:
                if isinstance(message, LoadFailed | EncodeFailed):
                    raise BenchmarkFailed(message.reason)
            if found := [message for message in said if isinstance(message, kind)]:
                return found

    def _count_cpu_seconds(self) -> list[float]:
        """User and system time of each rank so far."""
        times = [psutil.Process(reading.pid).cpu_times() for reading in self.readings()]
        return [each.user + each.system for each in times]

    def _measure_bubble(self, micro_batches: int) -> dict[str, float]:
        """1 - busy / wall over all stages, while each batch waits for the one before: else the next batch fills it."""
        from worker.parallel.pipeline import (
            split_micro_batches,
        )  # torch, which is not needed while a pass is timed

        batches = self._last[:: max(1, len(self._last) // NUM_BUBBLE_BATCHES)]
        before = self.readings()
        self._encode(batches, ahead=1)
        after = self.readings()
        busy = sum(new.busy_seconds - old.busy_seconds for old, new in zip(before, after, strict=True))
        # The last stage is there from the batch's arrival to its end.
        wall = after[-1].wall_seconds - before[-1].wall_seconds
        stages = len(after)
        ideals = [
            (find_ideal_bubble(stages, len(split_micro_batches(batch, micro_batches))), batch.num_tokens)
            for batch in batches
        ]
        ideal = sum(share * tokens for share, tokens in ideals) / sum(tokens for _, tokens in ideals)
        return {"bubble": 1 - busy / (stages * wall), "ideal_bubble": ideal}


def find_ideal_bubble(stages: int, micro_batches: int) -> float:
    """Share of the time that stages of equal length are idle. Source: Huang et al., GPipe (2019), section 2.3."""
    return (stages - 1) / (micro_batches + stages - 1)


def cut_batches(ids: Ids, batch_tokens: int) -> list[tuple[list[int], Batch]]:
    """Batches of up to so many padded tokens, longest texts first, with the places of their texts."""
    return [
        (places, Batch.from_ids([ids[place] for place in places]))
        for places in _cut_places([len(each) for each in ids], batch_tokens)
    ]


def _cut_places(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    places: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if places and lengths[places[0]] * (len(places) + 1) > batch_tokens:
            yield places
            places = []
        places.append(place)
    if places:
        yield places


def _read_utilisation(sampler: DeviceSampler) -> float | None:
    return sampler.sample().utilisation
