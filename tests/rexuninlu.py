"""Golden data of RexUniNLU, and functions that run extractions on it, by a network or recorded logits."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.tasks.extract.extract import Prompts
from worker.tasks.extract.extraction import Extraction
from worker.tasks.extract.model.config import read_config
from worker.tasks.extract.model.head import MAX_CELLS, find_cells, pad_inputs
from worker.tasks.extract.model.network import RexNetwork, load_network
from worker.tasks.extract.prompts import PromptTokenizer

GOLDEN: Final = Path(__file__).parent / "data" / "rexuninlu"
CPU: Final = torch.device("cpu")
MODELS: Final = ("model", "model_b")
# A logit closer to 0 than this may change its sign on another machine.
CERTAIN: Final = 1e-3

Case = dict[str, Any]
Compute = Callable[[Prompts], Ragged]


def compute_cells(
    network: RexNetwork, batch: Batch, device: torch.device, *, max_cells: int = MAX_CELLS
) -> Ragged:
    """Run one padded forward pass and return its cells as float32 rows.

    Sequences do not affect one another.
    """
    inputs = pad_inputs(batch, device)
    with torch.inference_mode():
        logits = network(**inputs.tokens, is_token=inputs.is_token)
        return find_cells(logits, inputs, max_cells)


@cache
def read_golden() -> dict[str, Any]:
    golden: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
    return golden


@cache
def read_arrays() -> Mapping[str, NDArray[Any]]:
    with np.load(GOLDEN / "arrays.npz") as arrays:
        return dict(arrays)


def list_cases(kind: str | None = None, model: str | None = None) -> list[Case]:
    return [
        case
        for case in read_golden()["cases"]
        if kind in (None, case["kind"]) and model in (None, case["model"])
    ]


def find_case(name: str) -> Case:
    return next(case for case in list_cases() if case["id"] == name)


@cache
def load_tokenizer(model: str) -> PromptTokenizer:
    return PromptTokenizer(GOLDEN / model)


@cache
def load(model: str) -> RexNetwork:
    return load_network(GOLDEN / model, torch.float32, CPU)


def extract_of(case: Case, *, with_confidences: bool = False) -> Extraction:
    return Extraction(
        load_tokenizer(case["model"]), case["schema"], [case["text"]], with_confidences=with_confidences
    )


def drive(extraction: Extraction, compute: Compute) -> list[Prompts]:
    """Run the extraction to its end; return the prompts of each level."""
    levels = []
    prompts = extraction.start()
    while prompts is not None:
        levels.append(prompts)
        prompts = extraction.take(compute(prompts))
    return levels


def by_network(network: RexNetwork) -> Compute:
    return lambda prompts: compute_cells(network, Batch(prompts.inputs), CPU)


def read_logits(call: dict[str, Any]) -> NDArray[np.float32] | None:
    """Return the logits [length, length] of a call, or None if only some of them are recorded."""
    if "cells" in call:
        logits = np.full((call["length"], call["length"]), -9, np.float32)
        for row, column, logit in call["cells"]:
            logits[row, column] = logit
        return logits
    if call["logits_step"] > 1:
        return None
    stored: NDArray[np.float32] = read_arrays()[f"{call['key']}/logits"]
    return stored


class FromCase:
    """A replacement for the network that takes the logits of each call from the case."""

    def __init__(self, case: Case) -> None:
        self._calls: Iterator[dict[str, Any]] = iter(case["calls"])

    def __call__(self, prompts: Prompts) -> Ragged:
        return Ragged.join([self._read(prompts, number) for number in range(len(prompts))])

    def _read(self, prompts: Prompts, number: int) -> Ragged:
        logits = read_logits(next(self._calls))
        assert logits is not None
        return read_head(Batch(prompts.inputs).part(number, number + 1), logits[None])


def read_head(batch: Batch, logits: NDArray[np.float32], max_cells: int = MAX_CELLS) -> Ragged:
    """Return the cells that the head selects from these logits [n, length, length]."""
    return find_cells(torch.from_numpy(logits.copy()), pad_inputs(batch, CPU), max_cells)


def write_wide(directory: Path) -> Path:
    """Write a model with random weights that is wide enough for its memory to be measured."""
    shutil.copytree(GOLDEN / "model", directory)
    sizes = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 12, "attention_head_size": 32}
    sizes |= {"intermediate_size": 1536}
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | sizes))
    network = RexNetwork(read_config(directory))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    save_file(network.state_dict(), directory / "model.safetensors")
    return directory


def list_certain_cases(model: str) -> list[Case]:
    """Return the cases whose records equal the reference's on every machine."""
    return [case for case in list_cases("natural", model) if is_certain(case) and not case.get("raises")]


def list_sequences(model: str) -> Batch:
    """Return the sequences of all prompts of the certain cases, case by case and level by level."""
    levels = [drive(extract_of(case), by_network(load(model))) for case in list_certain_cases(model)]
    return join_inputs([prompts for case in levels for prompts in case])


def read_records(model: str, rows: Ragged) -> Iterator[tuple[Case, object]]:
    """Run the certain cases with these results for their sequences; yield each case and its records."""
    place = 0

    def answer(prompts: Prompts) -> Ragged:
        nonlocal place
        place += len(prompts)
        return rows.take(np.arange(place - len(prompts), place))

    for case in list_certain_cases(model):
        extraction = extract_of(case)
        drive(extraction, answer)
        yield case, extraction.finish()[0]
    assert place == len(rows)


def join_inputs(levels: Sequence[Prompts]) -> Batch:
    """Return the sequences of all these prompts as one batch."""
    names = dict.fromkeys(name for prompts in levels for name in prompts.inputs)
    return Batch(
        {
            name: Ragged.join(
                [
                    prompts.inputs.get(name) or Ragged.from_scalars(np.zeros(len(prompts), np.int32))
                    for prompts in levels
                ]
            )
            for name in names
        }
    )


def is_certain(case: Case) -> bool:
    """Return whether every logit that is read is far enough from 0 for its sign to be certain."""
    smallest = [call.get("logits_stats", {}).get("min_abs_decode") for call in case["calls"]]
    return case["num_calls"] == len(case["calls"]) and all(
        value is None or value > CERTAIN for value in smallest
    )


def has_all_logits(case: Case) -> bool:
    return case["num_calls"] == len(case["calls"]) and all(
        "cells" in call or call["logits_step"] == 1 for call in case["calls"]
    )


def describe(records: object) -> dict[str, Any]:
    """Return count and hash of the records, as the golden data describes an output."""
    assert isinstance(records, list), records
    text = json.dumps(records, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return {"count": len(records), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def summarize(output: dict[str, Any]) -> dict[str, Any]:
    """Return count and hash of a case's output, in the form of `describe`."""
    return {name: output[name] for name in ("count", "sha256")}
