"""gpu: find the encoder's switches that pay on a card. With `--write` they become the card's defaults.

Each step is a comparison of a switch, alone or beside others, or a sweep of batch sizes. It is
recorded as a line of JSON as soon as it is measured, so that the same command resumes an interrupted run.
`python -m benchmarks engine --device cuda` compares the engine with its peers on the same card.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import HOME, ROOT, BenchmarkFailed, Harness
from benchmarks.machine import GIGA, describe_rates, find_device, measure_matrix_rates
from benchmarks.models import SHAPES, VOCABULARY, ModelCost, find_random
from benchmarks.placed import Ids, PlacedModel, plan_replica
from benchmarks.tables import MEBIBYTES, NUMBER, RATIO, Report, Spread, Table
from benchmarks.turns import FAILURES, find_last_line
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, Device, parse_devices
from worker.encoder.choice import FP32, PACKED, choose_precision
from worker.encoder.encoder import AUTO
from worker.encoder.switches import (
    DEFAULTS_PATH,
    SWITCHES,
    SwitchDefaults,
    SwitchFacts,
    choose_switches,
    is_package_installed,
)  # fmt: skip
from worker.placement.strategies import REPLICATE
from worker.runner.starter import Sharing

# A switch helps when it gains at least this share in its worst repetition, and harms when it loses as much in
# its best.
LEAST_GAIN: Final = 0.01
HELPS, HARMS, NEUTRAL, FAILED = "helps", "harms", "neutral", "failed"
LENGTH_OF_SWEEP: Final = 100
FIRST_ID: Final = 1000  # lower ids are special tokens
BY_NAME: Final = frozenset(name for name, switch in SWITCHES.items() if switch.changes_vectors)


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a measurement on one model shape.

    `lengths`, `batch_tokens` and the `sizes` of batches to sweep are in tokens.
    """

    shape: str
    lengths: tuple[int, ...]
    batch_tokens: int
    pass_seconds: float
    sizes: tuple[int, ...] = ()


SIZES: Final = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
CARD: Final = (
    Scale("bert-base", (16, 100, 256), 32_768, 0.5, SIZES),
    Scale("bert-large", (16, 100, 256), 32_768, 0.5),
    Scale("qwen3-7b", (16, 100, 512), 16_384, 1.5, SIZES),
)
QUICK: Final = (Scale("tiny", (16, 100), 512, 0.02, (128, 512)),)


class Records:
    """The measured steps by name, kept in a JSON lines file for one card, torch version and code."""

    def __init__(self, path: Path, identity: Mapping[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
        if lines and lines[0] != dict(identity):
            raise BenchmarkFailed(
                f"{path} has records of {lines[0]}, and this is {identity}; name another --state."
            )
        self._path = path
        self.found: dict[str, dict[str, Any]] = {line["step"]: line for line in lines[1:]}
        if not lines:
            self._append(identity)

    def add(self, step: str, values: Mapping[str, Any]) -> None:
        line = {"step": step, **values}
        self.found[step] = line
        self._append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass(slots=True)
class Trial:
    """The context of all steps: the device, matrix rates by precision, records and deadline."""

    harness: Harness
    device: Device
    rates: Mapping[str, float]
    records: Records
    deadline: float
    num_left: int = 0

    def do(self, step: str, measure: Any) -> dict[str, Any] | None:
        """Return a step's record, measured now if there is none; None when no time is left."""
        found = self.records.found.get(step)
        if found is not None and step not in self.harness.again:
            return found
        if time.monotonic() > self.deadline:
            self.num_left += 1
            return None
        self.harness.say(step)
        try:
            self.records.add(step, measure())
        except FAILURES as error:
            self.records.add(step, {"verdict": FAILED, "reason": find_last_line(str(error))})
        return self.records.found[step]

    def place(self, scale: Scale, switches: Sequence[str]) -> PlacedModel:
        """Return the placed model, packed and not yet started, with these switches on."""
        card = find_random(scale.shape)
        is_cpu = self.device.kind == CPU
        precision = FP32 if is_cpu else choose_precision(AUTO, self.device).value
        replica = plan_replica(card, (self.device,), precision, REPLICATE, 128, scale.batch_tokens)
        # On a card `auto` means packed. On a processor packing has to be requested.
        attention = PACKED if is_cpu else AUTO
        return PlacedModel(Sharing(replica, (self.device,)), card, precision, attention, switches)

    def measure_pair(self, scale: Scale, base: tuple[str, ...], added: str) -> dict[str, Any]:
        """Compare passes without and with a switch, in turns.

        Raise BenchmarkFailed when the process does not use the switch.
        """
        cost = ModelCost.of(find_random(scale.shape))
        mixes = {f"{length}": self.draw_ids(scale, cost, (length, length)) for length in scale.lengths}
        seconds: dict[str, list[list[float]]] = {mix: [[], []] for mix in mixes}
        peaks = [0, 0]
        with ExitStack() as exits:
            pair = [self.place(scale, switches) for switches in (base, (*base, added))]
            for system in pair:
                exits.enter_context(system)
            check_switches(pair[1], (*base, added))
            for mix, ids in mixes.items():
                for number in range(1 + self.harness.repeat):
                    for place, system in enumerate(pair):
                        done = system.encode(ids, scale.batch_tokens)
                        peaks[place] = max(peaks[place], max(each.peak_bytes for each in system.readings()))
                        if number:  # the first pass is a warm-up
                            seconds[mix][place].append(done.seconds)
        ratios = [Spread.of_ratios(*each) for each in seconds.values()]
        gain = float(np.prod([ratio.median for ratio in ratios])) ** (1 / len(ratios)) - 1
        is_harm = any(ratio.high <= 1 - LEAST_GAIN for ratio in ratios)
        is_help = any(ratio.low >= 1 + LEAST_GAIN for ratio in ratios)
        verdict = HARMS if is_harm else HELPS if is_help else NEUTRAL
        tokens = {mix: sum(map(len, ids)) for mix, ids in mixes.items()}
        found = {"seconds": seconds, "tokens": tokens, "peaks": peaks, "gain": gain, "verdict": verdict}
        return {"shape": scale.shape, "base": base, "added": added, **found}

    def measure_sizes(self, scale: Scale, kept: tuple[str, ...]) -> dict[str, Any]:
        """Measure tokens per second by batch size, and find the smallest size within 2 % of the best."""
        num_texts = max(scale.sizes) // LENGTH_OF_SWEEP
        ids = draw(num_texts, (LENGTH_OF_SWEEP, LENGTH_OF_SWEEP))
        rates: dict[int, list[float]] = {size: [] for size in scale.sizes}
        with self.place(scale, kept) as system:
            for number in range(1 + self.harness.repeat):
                for size in scale.sizes:
                    done = system.encode(ids, size)
                    if number:
                        rates[size].append(done.num_tokens / done.seconds)
        medians = {size: Spread.of(values).median for size, values in rates.items()}
        best_rate = max(medians.values())
        knee = min(size for size, rate in medians.items() if rate >= 0.98 * best_rate)
        return {"switches": kept, "rates": medians, "knee": knee}

    def draw_ids(self, scale: Scale, cost: ModelCost, span: tuple[int, int]) -> Ids:
        """Return random token ids for whole batches that take about `pass_seconds`.

        There are at least two batches, so that one is always waiting.
        """
        length = sum(span) // 2
        per_batch = max(1, scale.batch_tokens // length)
        flop = cost.count_flop(np.full(per_batch, length, dtype=np.int64))
        expected = 0.5 * GIGA * max(self.rates.values())
        return draw(per_batch * max(2, round(scale.pass_seconds * expected / flop)), span)


def run(harness: Harness) -> Report:
    scales = QUICK if harness.is_quick else CARD
    device = find_tried_device(harness)
    capability = next(
        (each for each in sorted(device.features) if each.startswith(("sm_", "gfx"))), device.kind
    )
    identity = {
        "card": device.description or device.name, "capability": capability, "torch": version("torch"),
        "code": digest_code(),
    }  # fmt: skip
    home = harness.state or HOME / ("gpu-quick" if harness.is_quick else "gpu")
    records = Records(home / "records.jsonl", identity)
    rates = measure_matrix_rates(device)
    trial = Trial(harness, device, rates, records, time.monotonic() + 60 * harness.minutes)
    judged: dict[str, dict[str, str]] = {}
    sweeps = []
    for scale in scales:
        kept = choose_together(trial, scale, judged)
        if scale.sizes and not trial.num_left:
            found = trial.do(
                f"sizes {scale.shape}", lambda scale=scale, kept=kept: trial.measure_sizes(scale, kept)
            )
            if found and "rates" in found:
                listed = "; ".join(f"{int(size):,}: {NUMBER(rate)}" for size, rate in found["rates"].items())
                sweeps.append((f"{scale.shape}, {LENGTH_OF_SWEEP} tokens", listed, f"{found['knee']:,}"))
    chosen, reasons = choose_defaults(judged)
    if harness.is_written:
        if trial.num_left:
            raise BenchmarkFailed("Nothing was written because steps are left. Run it again to continue.")
        write_defaults(identity, chosen)
    pairs = [found for found in records.found.values() if "added" in found]
    failed = [f"{step}: {found['reason']}" for step, found in records.found.items() if "reason" in found]
    left = ("Steps are left; the same command goes on with them.",) if trial.num_left else ()
    return Report(
        f"{identity['card']} ({capability}), torch {identity['torch']}, random weights.",
        (
            Table(
                (
                    "switch",
                    "times as fast, by tokens of a text",
                    "in the mean",
                    "peak without",
                    "peak with",
                    "which",
                ),
                tuple(describe_pair(found) for found in pairs),
            ),
            Table(("text of", "tokens/s by tokens of a batch", "knee"), tuple(sweeps)),
        ),
        (
            f"Switches for {capability}: {', '.join(chosen) or 'none'}. The matrix rate: {describe_rates(rates)}.",
            *reasons,
            "Batches of random ids are sent to the model process, two in advance, and nothing is tokenized. Ratios are "
            "taken pass by pass. Memory is that of the tensors on a GPU, and resident memory elsewhere.",
            *failed,
            *left,
        ),
    )


def find_tried_device(harness: Harness) -> Device:
    """Return the GPU, or for a quick check of the mechanics half of the processor.

    Raise BenchmarkFailed for a full run on a processor.
    """
    if harness.device != CPU:
        return find_device(harness.device)
    if not harness.is_quick:
        raise BenchmarkFailed(
            "There is nothing to decide for a CPU; `--device cpu --quick` only tests the steps."
        )
    return parse_devices("cpu:0,cpu:1", detect_inventory())[0]


def digest_code() -> str:
    """Return a digest of the product's code, so that records of different code are not mixed."""
    digest = hashlib.sha256()
    for path in sorted(path for name in ("vectormill", "worker") for path in (ROOT / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def choose_together(trial: Trial, scale: Scale, judged: dict[str, dict[str, str]]) -> tuple[str, ...]:
    """Measure each switch alone, then add those that help, the best first. Return the combination kept."""
    gains: dict[str, float] = {}
    for name in SWITCHES:
        if find_obstacle(trial.device, name, scale.shape):
            continue
        step = f"switch {scale.shape} {name}"
        found = trial.do(step, lambda name=name: trial.measure_pair(scale, (), name))
        if found is not None:
            judged.setdefault(name, {})[scale.shape] = found["verdict"]
            if found["verdict"] == HELPS and name not in BY_NAME:
                gains[name] = found["gain"]
    ordered = sorted(gains, key=lambda name: -gains[name])
    kept = tuple(ordered[:1])
    for name in ordered[1:]:
        step = f"together {scale.shape} {name} beside {','.join(kept)}"
        found = trial.do(step, lambda kept=kept, name=name: trial.measure_pair(scale, kept, name))
        if found is not None:
            judged[name][scale.shape] = found["verdict"]
            kept = (*kept, name) if found["verdict"] == HELPS else kept
    return kept


def find_obstacle(device: Device, name: str, shape: str) -> str:
    """Return why the switch cannot be used with the shape, by the table of switches; empty when it can."""
    hidden_size = int(SHAPES[shape].config["hidden_size"])
    tried = replace(device, features=device.features | {"tried"})
    place = SwitchFacts(tried, hidden_size)
    # As a default of the card the switch is left out for a stated reason; requested by name it would raise an
    # error.
    defaults = {"tried": SwitchDefaults((name,), "it is tried")}
    choices = choose_switches(AUTO, place, is_package_installed, defaults)
    return next((choice.reason for choice in choices if not choice.is_on), "")


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


def choose_defaults(judged: Mapping[str, Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Return the switches that help some shape and harm none, and the reason why each other one is off."""
    chosen, reasons = [], []
    for name in SWITCHES:
        verdicts = judged.get(name, {})
        if name in BY_NAME:
            reasons.append(f"{name} is off unless it is asked for by name: it gives other vectors.")
        elif flaws := [
            f"{shape} {verdict}" for shape, verdict in verdicts.items() if verdict in (HARMS, FAILED)
        ]:
            reasons.append(f"{name} is off: {', '.join(flaws)}.")
        elif HELPS in verdicts.values():
            chosen.append(name)
        else:
            why = (
                f"it brings less than {LEAST_GAIN:.0%} beyond the spread"
                if verdicts
                else "it was not tried here"
            )
            reasons.append(f"{name} is off: {why}.")
    return chosen, reasons


def write_defaults(identity: Mapping[str, str], chosen: Sequence[str]) -> None:
    """Write the defaults for this card's compute capability and keep those of others."""
    written: dict[str, Any] = json.loads(DEFAULTS_PATH.read_text(encoding="utf-8"))
    measured = f"{datetime.now(UTC):%Y-%m-%d}, {identity['card']}, torch {identity['torch']}"
    written[identity["capability"]] = {"switches": list(chosen), "measured": measured}
    DEFAULTS_PATH.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def describe_pair(found: Mapping[str, Any]) -> tuple[str, ...]:
    beside = f" beside {', '.join(found['base'])}" if found["base"] else ""
    ratios = "; ".join(f"{mix}: {RATIO(Spread.of_ratios(*pair))}" for mix, pair in found["seconds"].items())
    peaks = (MEBIBYTES(peak) for peak in found["peaks"])
    return (
        f"{found['shape']}: {found['added']}{beside}",
        ratios,
        f"{found['gain']:+.1%}",
        *peaks,
        found["verdict"],
    )
