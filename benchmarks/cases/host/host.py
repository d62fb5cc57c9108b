"""host: what the host spends on a text, with a device that costs nothing; `--against` one more checkout."""

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

from benchmarks.cases.host.host_tables import (
    BEFORE,
    NOW,
    judge,
    tabulate_micros,
    tabulate_rates,
    tabulate_stages,
)
from benchmarks.cases.host.host_texts import HostTexts
from benchmarks.cases.host.measured import Measured
from benchmarks.order import Order
from benchmarks.results.report import Report
from benchmarks.results.table import tabulate
from benchmarks.systems.host import engine_pass, tokenizer_pass
from benchmarks.systems.host.engine_pass import EngineOrder, EnginePass
from benchmarks.systems.host.host_stack import HostStack
from benchmarks.systems.host.made_up import MadeUpDevice
from benchmarks.systems.host.one_pass import run_pass
from benchmarks.systems.host.tokenizer_pass import TokenizerOrder, TokenizerPass
from benchmarks.systems.host.tree import ROOT, link_tree
from vectormill.cli.workplace import workplace
from vectormill.files.ndjson import ItemJson
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import DEFAULT_MODEL, Registry

# Tokens of a text -> texts of a pass, some ten seconds when this was written.
NUM_TEXTS: Final[Mapping[int, int]] = {16: 100_000, 100: 40_000, 256: 20_000}
FEWEST_TEXTS: Final = 2_000
# As on an accelerator; a processor's would be smaller.
BATCH_TOKENS: Final = {"VECTORMILL_WORKER_MAX_BATCH_TOKENS": "32768"}
NUM_KINDS: Final = 3


def measure(order: Order) -> Report:
    card = Registry({}).card(DEFAULT_MODEL, weights=True)
    trees = {NOW: ROOT, **({BEFORE: order.against} if order.against else {})}
    sizes = plan_sizes(order.items)
    num_passes = len(trees) * len(sizes) * (NUM_KINDS * order.repeat + 1)
    order.steps.begin("host", 2 + len(trees) + num_passes)
    order.steps.step("making texts")
    texts = HostTexts(card.path)
    results = {num_tokens: {name: Measured() for name in trees} for num_tokens in sizes}
    with workplace(None) as directory, ExitStack() as exits:
        benches = {}
        for name, tree in trees.items():
            order.steps.step(f"starting the stack of {name}")
            benches[name] = exits.enter_context(Bench(name, tree, directory / name, card))
        for num_tokens, num_texts in sizes.items():
            for number in range(order.repeat):
                for name, bench in benches.items():
                    order.steps.step(
                        f"{num_tokens} tokens: {name} end to end, pass {number + 1} of {order.repeat}"
                    )
                    bench.run_job(texts.draw(num_tokens, num_texts), results[num_tokens][name])
                    order.steps.step(f"{num_tokens} tokens: the engine of {name} alone")
                    bench.run_engine(texts.draw(num_tokens, num_texts), results[num_tokens][name])
                    order.steps.step(f"{num_tokens} tokens: the bare tokenizer")
                    bench.run_tokenizer(texts.draw(num_tokens, num_texts), results[num_tokens][name])
            for name, bench in benches.items():
                order.steps.step(f"{num_tokens} tokens: counting blocks of the engine of {name}")
                bench.count_blocks(texts.draw(num_tokens, num_texts // 4), results[num_tokens][name])
        order.steps.step("stopping")
    num_cores = len(os.sched_getaffinity(0))
    measures = judge(results, num_cores)
    return Report(
        "host",
        f"texts of {', '.join(map(str, sizes))} tokens, no two equal; {card.name}, "
        f"a device that takes no time, {num_cores} cores, {order.repeat} passes of each in turn.",
        (
            *((tabulate(measures),) if measures else ()),
            tabulate_rates(results, num_cores),
            tabulate_micros(results),
            tabulate_stages(results),
        ),
        NOTES,
    )


NOTES: Final = (
    "Texts a second: end to end from the first chunk's claim to the last commit, the submission before it; the engine "
    "alone with as many chunks of 512 at a time as a worker has slots; the tokenizer's encode_batch_fast of 512 texts, "
    "with a thread on every core.",
    "Processor time is user and system time of whole processes, the submission of the job included; cores busy is that "
    "of all processes since the submission, by the seconds from claim to commit.",
    "Stages are the job's own: seconds of threads, of which some wait for the interpreter's lock.",
    "Bytes in the pipe are those that the model's process wrote for a text (wchar of /proc), and bytes read those that "
    "the engine's process read. Blocks are Python's own blocks of memory for each text in flight, at their peak "
    "(sys.getallocatedblocks every 5 ms, in a pass of its own).",
)


class Bench:
    """One checkout: its stack, kept running, and its engine, started for each pass."""

    def __init__(self, name: str, tree: Path, directory: Path, card: ModelCard) -> None:
        self._directory = directory
        self._card = card
        directory.mkdir(mode=0o711)
        self._linked = link_tree(tree.resolve(), directory / "tree")
        self._texts = directory / "texts.json"
        device = MadeUpDevice("null", str(directory / "clock"))
        self._environment = {**device.to_environment(), **BATCH_TOKENS}
        self.stack = HostStack(name, self._linked, directory / "data", device, BATCH_TOKENS)

    def __enter__(self) -> "Bench":
        self.stack.__enter__()
        # A first job makes connections and caches, and what a collection needs.
        self.stack.encode([{"key": "first", "text": "The first text of all."}])
        return self

    def __exit__(self, *exception: object) -> None:
        self.stack.__exit__(None, None, None)

    def run_job(self, texts: list[str], into: Measured) -> None:
        items: list[ItemJson] = [{"key": f"text-{number}", "text": text} for number, text in enumerate(texts)]
        into.jobs.append(self.stack.encode(items))

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


def plan_sizes(items: int | None) -> dict[int, int]:
    """Texts of a pass by their tokens: the usual ones, or in proportion to `items` of the shortest."""
    if items is None:
        return dict(NUM_TEXTS)
    share = items / max(NUM_TEXTS.values())
    return {tokens: max(FEWEST_TEXTS, round(number * share)) for tokens, number in NUM_TEXTS.items()}
