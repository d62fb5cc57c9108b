"""One model in the processes that a worker starts, without tokenizer, Celery, HTTP and Postgres.

The model's encoder records how much memory it takes (benchmarks.children.gauged).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.children.gauged import FACTORY, KERNELS, PROFILE, Reading, read_rank
from benchmarks.children.serving import Pass
from benchmarks.harness import BenchmarkFailed
from benchmarks.models import VOCABULARY
from vectormill.models.model_card import ModelCard
from vectormill.settings import process_environment
from worker.batching.batch import Batch
from worker.devices.device import Device
from worker.encoder.encoder import EncoderOrder, EncoderReport
from worker.encoder.switches import NONE
from worker.placement.capacity import GIB, DeviceCapacity
from worker.placement.placement import PlanSettings, Replica
from worker.placement.replicas import ReplicaBuilder
from worker.runner.starter import RunnerStarter, Sharing
from worker.tuning.trial import Trial, TrialFailed

# A rank that hangs should fail one row of the table, not the whole run.
ANSWER_SECONDS: Final = 300.0

FIRST_ID: Final = 1000  # lower ids are special tokens

Ids = Sequence[NDArray[np.int32]]


def plan_replica(
    card: ModelCard, devices: Sequence[Device], precision: str, strategy: str, length: int, tokens: int
) -> Replica:
    """Return the planner's replica for batches of `tokens`, on devices with ample memory.

    Raise BenchmarkFailed when the planner refuses.
    """
    rooms = tuple(DeviceCapacity(device.name, device.kind, 1024 * GIB, 1e12) for device in devices)
    settings = PlanSettings(precision, length, attention="padded (sdpa)", full_batch_tokens=tokens)
    built = ReplicaBuilder(card.find_shape(), settings, devices[0].kind).build(strategy, rooms, "pcie")
    if not isinstance(built, Replica):
        raise BenchmarkFailed(built.reason)
    return built


class PlacedModel:
    """A context manager around one replica, on one device or shared by several.

    By default batches are padded and all switches are off.
    """

    def __init__(
        self,
        sharing: Sharing,
        card: ModelCard,
        precision: str,
        attention: str = "padded",
        switches: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._sharing = sharing
        self._card = card
        self._precision = precision
        self._attention = attention
        self._switches = switches
        self._environment = process_environment() | dict(environment or {})
        self._exits = ExitStack()

    def __enter__(self) -> Self:
        device = self._sharing.devices[0]
        with ExitStack() as exits:
            self._directory = Path(exits.enter_context(TemporaryDirectory(prefix="vectormill-placed-")))
            order = EncoderOrder(
                self._card, device, "torch", self._precision, device.num_threads, self._directory, self._attention,
                switches=",".join(self._switches) or NONE,
            )  # fmt: skip
            starter = RunnerStarter(
                FACTORY,
                order,
                self._environment,
                sharing=self._sharing if len(self._sharing.devices) > 1 else None,
                collective_timeout_seconds=ANSWER_SECONDS,
            )
            with naming(self._card.name):
                trial = Trial(starter, load_seconds=ANSWER_SECONDS, answer_seconds=ANSWER_SECONDS)
                self._trial = exits.enter_context(trial)
            self._exits = exits.pop_all()
        self.loaded: EncoderReport = trial.report
        return self

    def __exit__(self, *exception: object) -> None:
        self._exits.close()

    def encode(self, ids: Ids, batch_tokens: int) -> Pass:
        """Encode token ids in batches of up to `batch_tokens` padded tokens."""
        batches = [
            Batch.from_ids([ids[place] for place in places])
            for places in cut_places([len(each) for each in ids], batch_tokens)
        ]
        with naming(self._card.name):
            seconds = self._trial.measure(batches)
        num_computed = sum(batch.num_padded_tokens for batch in batches)
        return Pass(seconds, sum(batch.num_tokens for batch in batches), num_computed)

    def profile(self, ids: Ids, batch_tokens: int) -> dict[str, Any]:
        """Return the kernels of a pass: `launches` a batch, the `idle` share, and the dearest `kernels`."""
        asked, found = self._directory / PROFILE, self._directory / KERNELS
        asked.touch()
        self.encode(ids, batch_tokens)
        asked.unlink()
        self.encode(ids, batch_tokens)  # the first of these batches ends the recording
        kernels: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
        return kernels

    def readings(self) -> list[Reading]:
        """Return the memory reading of every rank, in the order of the devices."""
        return [read_rank(self._directory, rank) for rank in range(len(self._sharing.devices))]


@contextmanager
def naming(model: str) -> Iterator[None]:
    """Raise BenchmarkFailed with the model's name and the reason if its process fails in the block."""
    try:
        yield
    except TrialFailed as error:
        raise BenchmarkFailed(f"{model}: {error}.") from error


def cut_places(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the positions of texts that share a batch, longest texts first."""
    places: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if places and lengths[places[0]] * (len(places) + 1) > batch_tokens:
            yield places
            places = []
        places.append(place)
    if places:
        yield places


def check_switches(system: PlacedModel, wanted: Sequence[str]) -> None:
    """Raise BenchmarkFailed, with the process's explanation, when a wanted switch is not in use."""
    missing = [name for name in wanted if name not in system.loaded.switches]
    if missing:
        notes = " ".join(note for note in system.loaded.notes if any(name in note for name in missing))
        raise BenchmarkFailed(notes or f"It does not use {', '.join(missing)}, and does not say why.")


def draw(num_texts: int, span: tuple[int, int]) -> Ids:
    """Return random token ids with a fixed seed, of lengths within `span`, both ends included."""
    random = np.random.default_rng(span[1])
    drawn = random.integers(FIRST_ID, VOCABULARY, (num_texts, span[1]), dtype=np.int32)
    lengths = random.integers(*span, num_texts, endpoint=True)
    return [row[:length] for row, length in zip(drawn, lengths, strict=True)]
