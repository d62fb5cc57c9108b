"""Bench: one checkout of the project on a made-up device: its stack, its engine alone, and the bare tokenizer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.cases.host.measured import Measured
from benchmarks.systems.host import engine_pass, tokenizer_pass
from benchmarks.systems.host.devices import BATCH_TOKENS
from benchmarks.systems.host.engine_pass import EngineOrder, EnginePass
from benchmarks.systems.host.host_stack import HostStack, JobCost
from benchmarks.systems.host.made_up import MadeUpDevice
from benchmarks.systems.host.one_pass import run_pass
from benchmarks.systems.host.tokenizer_pass import TokenizerOrder, TokenizerPass
from benchmarks.systems.host.tree import link_tree
from vectormill.files.ndjson import ItemJson
from vectormill.models.model_card import ModelCard

MODEL: Final = "benchmark"
MODELS: Final = "VECTORMILL_MODELS"
# A processor's batches, which the worker believes it has, would be smaller.
ACCELERATOR: Final = {"VECTORMILL_WORKER_MAX_BATCH_TOKENS": str(BATCH_TOKENS)}


def make_null_device(clock: Path) -> MadeUpDevice:
    """Takes no time at all."""
    return MadeUpDevice("null", str(clock))


class Bench:
    """One checkout: its stack, kept running, and its engine, started for each pass."""

    def __init__(
        self,
        name: str,
        tree: Path,
        directory: Path,
        card: ModelCard,
        make_device: Callable[[Path], MadeUpDevice] = make_null_device,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._card = card
        directory.mkdir(mode=0o711)
        self._linked = link_tree(tree.resolve(), directory / "tree")
        self._texts = directory / "texts.json"
        self.device = make_device(directory / "clock")
        self._environment = {**self.device.to_environment(), **ACCELERATOR}
        variables = {**ACCELERATOR, MODELS: json.dumps({MODEL: {"path": str(card.path)}}), **(settings or {})}
        self.stack = HostStack(name, self._linked, directory / "data", self.device, variables, MODEL)

    def __enter__(self) -> "Bench":
        self.stack.__enter__()
        # A first job makes connections and caches, and what a collection needs.
        self.stack.encode([{"key": "first", "text": "The first text of all."}])
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.__exit__(None, None, None)

    def run_job(self, texts: list[str], into: Measured) -> None:
        into.jobs.append(self.encode(texts))

    def encode(self, texts: list[str]) -> JobCost:
        """One job from end to end."""
        items: list[ItemJson] = [{"key": f"text-{number}", "text": text} for number, text in enumerate(texts)]
        return self.stack.encode(items)

    def run_engine(self, texts: list[str], into: Measured) -> None:
        into.engine.append(self._encode(texts, is_counted=False))

    def count_blocks(self, texts: list[str], into: Measured) -> None:
        into.counted = self._encode(texts, is_counted=True)

    def run_tokenizer(self, texts: list[str], into: Measured) -> None:
        self._texts.write_text(json.dumps(texts), encoding="utf-8")
        asked = TokenizerOrder(str(self._texts), str(self._card.path), self._card.max_tokens)
        answer = run_pass(tokenizer_pass.__name__, asdict(asked), self._linked, {})
        into.tokenizer.append(TokenizerPass(**answer))

    def _encode(self, texts: list[str], *, is_counted: bool) -> EnginePass:
        self._texts.write_text(json.dumps(texts), encoding="utf-8")
        cache = self._directory / "engine"
        cache.mkdir(exist_ok=True)
        asked = EngineOrder(str(self._texts), str(self._card.path), str(cache), is_counted=is_counted)
        return EnginePass(**run_pass(engine_pass.__name__, asdict(asked), self._linked, self._environment))
