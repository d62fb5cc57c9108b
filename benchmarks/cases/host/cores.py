"""How many cores of the host a GPU keeps busy, from the processor time a text and the GPU's rate. Measures nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.models.shapes import SHAPES
from benchmarks.results.table import Table
from benchmarks.results.writing import write_number
from benchmarks.systems.host.devices import KINDS, find_shape_cost, find_text_rate

MODELS: Final = ("minilm", "bert-base", "bert-large")
MICRO: Final = 1e-6


def count_cores(texts_per_second: float, host_micros: float) -> float:
    """Cores that are busy all the time at that rate."""
    return texts_per_second * host_micros * MICRO


def tabulate_cores(host_micros: Mapping[int, float], models: Sequence[str] = MODELS) -> Table:
    """One row a device and a model; `host_micros` is the whole stack's processor time a text, by its tokens."""
    rows = []
    for kind in KINDS.values():
        for model in models:
            device = kind.make_device(find_shape_cost(SHAPES[model]), Path())
            rates = {tokens: find_text_rate(device, tokens) for tokens in host_micros}
            rows.append(
                (
                    f"{kind.name}, {model}",
                    *(
                        f"{write_number(count_cores(rates[tokens], micros))} for {rates[tokens]:,.0f} texts/s"
                        for tokens, micros in host_micros.items()
                    ),
                )
            )
    return Table(("cores for one GPU", *(f"{tokens} tokens" for tokens in host_micros)), tuple(rows))
