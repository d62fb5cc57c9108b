"""outputs: what several outputs of one pass cost, and what the same bits in any batch cost.

The engine runs alone in this process, on texts of equally many tokens, so that nothing else is measured.
"""

import threading
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import HOME, Harness
from benchmarks.machine import find_device
from benchmarks.models import find_packaged
from benchmarks.random_embedder import M3, SMALL, write_random_embedder
from benchmarks.tables import NUMBER, RATIO, Report, Spread, Table
from benchmarks.texts import list_docstrings
from vectormill.cli.stack import workplace
from vectormill.domain.encoding import EncodingOptions
from vectormill.domain.task import DENSE, MULTI_VECTOR, SPARSE
from vectormill.models.layouts import read_model_card
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import make_spec
from worker.engine.engine import Engine
from worker.engine.request import EncodeRequest
from worker.settings import WorkerSettings

NUM_TEXTS: Final = 200  # of bge-m3's shape
NUM_SHORT_TEXTS: Final = 4000  # of MiniLM's
MAX_TOKENS: Final = 128
WAYS: Final[dict[str, dict[str, Any]]] = {
    "any bits": {},
    "the same bits": {"reproducible": True},
    "the same bits, batches of 8,192 tokens": {"reproducible": True, "max_batch_tokens": 8192},
    "any bits, batches of 8,192 tokens": {"max_batch_tokens": 8192},
}
WISHES: Final = (DENSE, f"{DENSE},{SPARSE}", f"{DENSE},{SPARSE},{MULTI_VECTOR}")


def run(harness: Harness) -> Report:
    card = find_m3(is_quick=harness.is_quick)
    texts = [item["text"] for item in list_docstrings(harness.items or NUM_TEXTS)]
    short = [item["text"] for item in list_docstrings(harness.items or NUM_SHORT_TEXTS)]
    with workplace(None) as directory:
        plain = WorkerSettings(reuse_bytes=0)
        by_outputs = measure(harness, card, directory, texts, [(wish, plain) for wish in WISHES])
        ways = [(DENSE, WorkerSettings(reuse_bytes=0, **own)) for own in WAYS.values()]
        by_bits = measure(harness, find_packaged(), directory, short, ways)
    return Report(
        f"{find_device(harness.device).description}, {harness.repeat} passes of each in turn; docstrings, at most "
        f"{MAX_TOKENS} tokens.",
        (
            make_table(f"bge-m3's shape, {len(texts)} texts", WISHES, by_outputs),
            make_table(f"all-MiniLM-L6-v2, {len(short):,} texts", tuple(WAYS), by_bits),
        ),
        (
            "The weights of bge-m3's shape are random. Seconds are those of the engine, from texts to vectors.",
        ),
    )


def find_m3(*, is_quick: bool) -> ModelCard:
    """Return a model of bge-m3's shape with random weights, or a small one."""
    directory = HOME / ("outputs-small" if is_quick else "outputs-m3")
    if not (directory / "config.json").is_file():
        write_random_embedder(SMALL if is_quick else M3, find_packaged().path, directory)
    return read_model_card("bge-m3", directory)


def measure(
    harness: Harness,
    card: ModelCard,
    directory: Path,
    texts: list[str],
    ways: list[tuple[str, WorkerSettings]],
) -> list[list[float]]:
    """Return for each way, outputs and settings, the seconds of each pass, taken in turn."""
    engines = []
    try:
        for _, settings in ways:
            engines.append(Engine(card, find_device(harness.device), settings, directory))
            engines[-1].start()
        seconds: list[list[float]] = [[] for _ in ways]
        for number in range(harness.repeat + 1):  # the first pass finds out the sizes of batches
            for place, (outputs, _) in enumerate(ways):
                spec = make_spec(card, EncodingOptions(outputs=outputs, max_tokens=MAX_TOKENS))
                request = EncodeRequest("pass", spec, [text.encode() for text in texts], False, 1 << 30)
                began = time.monotonic()
                engines[place].encode(request, threading.Event())
                if number:
                    seconds[place].append(time.monotonic() - began)
            harness.say(f"{card.name}: pass {number} of {harness.repeat}")
    finally:
        for engine in engines:
            engine.stop()
    return seconds


def make_table(title: str, names: tuple[str, ...], seconds: list[list[float]]) -> Table:
    rows = tuple(
        (name, NUMBER(Spread.of(own)), RATIO(Spread.of_ratios(own, seconds[0])))
        for name, own in zip(names, seconds, strict=True)
    )
    return Table((title, "seconds", f"to {names[0]}"), rows)
