"""The line-up: ours and the peers, made ready to be started with the same model, texts and threads."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.mixes import Mix
from benchmarks.order import BenchmarkFailed
from benchmarks.peers.catalogue import Peer, find_obstacle, runs_in_ours
from benchmarks.peers.environment import HOME, ROOT, prepare_environment
from benchmarks.systems.child import ChildSystem
from benchmarks.systems.missing import MissingSystem
from benchmarks.systems.protocol import BATCHES, ChildOrder
from benchmarks.systems.service import Service
from benchmarks.systems.system import System
from vectormill.files.ndjson import ItemJson
from vectormill.settings import process_environment
from worker.devices.device import CPU, Device, device_environment

SERVICE: Final = "service"
ENGINE: Final = "engine"
OURS: Final = (SERVICE, ENGINE)
# Behind the engine, whose batches it computes. A bound of what an engine can reach, and nobody's peer.
BARE: Final = "bare-openvino"
BOUNDS: Final = (BARE,)
MODEL: Final = "benchmark"
# Nothing is fetched while it is measured, and nobody is told of it.
QUIET: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
}


@dataclass(frozen=True, slots=True)
class LineUp:
    """Makes systems; starts none. `directory` is temporary, and `settings` are variables for our engine alone."""

    directory: Path
    model: Path
    mixes: Sequence[Mix]
    device: Device
    settings: Mapping[str, str] = field(default_factory=dict)

    def make(
        self, names: Sequence[str], peers: Sequence[Peer], bounds: Sequence[str] = ()
    ) -> dict[str, System]:
        """The named systems, or all of them; ours first. What cannot be had is a MissingSystem."""
        by_name = {peer.name: peer for peer in peers}
        self._write_texts()
        known = (*OURS, *bounds, *by_name)
        wanted = [name for name in known if name in (names or known)]
        return {name: self._make(name, by_name, wanted) for name in wanted}

    def _make(self, name: str, peers: Mapping[str, Peer], wanted: Sequence[str]) -> System:
        if name == SERVICE:
            return self.make_service()
        batches = {BATCHES: str(self.directory / "batches.bin")}
        if name == ENGINE:
            return self._make_own("our engine alone", "engine_alone", batches if BARE in wanted else {})
        if name == BARE:
            if ENGINE not in wanted:
                reason = f"It computes the batches that our engine forms; measure the system {ENGINE} too."
                return MissingSystem(BARE, reason)
            return self._make_own("openvino, a bare loop", "bound.bare_openvino", batches)
        return self._make_peer(peers[name])

    def _make_own(self, title: str, module: str, options: Mapping[str, str]) -> ChildSystem:
        """With one cache, so that a model is converted once, and sizes of batches are learned once."""
        order = self._order(module, self.directory / "cache", options)
        environment = self._environment() | dict(self.settings)
        return ChildSystem(title, f"benchmarks.systems.{module}", order, environment)

    def make_service(self) -> Service:
        items: dict[str, Sequence[ItemJson]] = {
            mix.name: [{"key": f"{number}", "text": text} for number, text in enumerate(mix.texts)]
            for mix in self.mixes
        }
        return Service(self.directory, items, self.service_settings(), MODEL)

    def service_settings(self) -> dict[str, str]:
        """The variables of our service's processes."""
        return {
            "VECTORMILL_MODELS": json.dumps({MODEL: {"path": str(self.model)}}),
            "VECTORMILL_WORKER_DEVICES": self._device_name(),
        }

    def _make_peer(self, peer: Peer) -> System:
        obstacle = find_obstacle(peer, self.device)
        if obstacle is not None:
            return MissingSystem(peer.title, obstacle)
        own = self._environment() | QUIET
        if peer.environment is None or runs_in_ours(peer):
            order = self._order(peer.name, self.directory / "exports", peer.options)
            return ChildSystem(peer.title, peer.module, order, own)
        try:
            python = prepare_environment(peer.environment)
        except BenchmarkFailed as error:
            return MissingSystem(peer.title, str(error))
        # In the environment, so that what it converted goes with it when its pins change.
        order = self._order(peer.name, HOME / peer.environment / "models", peer.options)
        # Our own packages are of other versions: of what is here the child sees the benchmarks alone.
        return ChildSystem(peer.title, peer.module, order, own | {"PYTHONPATH": str(ROOT)}, python)

    def _order(self, name: str, cache_dir: Path, options: Mapping[str, str]) -> ChildOrder:
        vectors = self.directory / f"{name}.npy"
        return ChildOrder(
            str(self.model),
            str(self.directory / "texts.json"),
            str(vectors),
            str(cache_dir),
            self._device_name(),
            options,
        )

    def _write_texts(self) -> None:
        texts = {mix.name: mix.texts for mix in self.mixes}
        (self.directory / "texts.json").write_text(json.dumps(texts), encoding="utf-8")

    def _environment(self) -> dict[str, str]:
        """Every system has the threads that our worker has."""
        return process_environment() | device_environment(self.device)

    def _device_name(self) -> str:
        """The whole processor is `cpu`, whatever its one part is called."""
        return CPU if self.device.kind == CPU else self.device.name
