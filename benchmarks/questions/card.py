"""card: in ten minutes, what this GPU reaches and what keeps it from more. The first command on a new card.

It needs no network, and no file but the checkout: weights are random, and where the packaged model is not
installed a tokenizer is learned. Each step is a process with a share of the time, whose result is told as it ends. A
step that fails or is late is named with its reason, and what it had measured is kept.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import HOME, ROOT, Harness
from benchmarks.machine import find_device
from benchmarks.tables import MEBIBYTES, NUMBER, RATIO, SHARE, Report, Table, judge
from benchmarks.turns import find_last_line
from vectormill.processes.lifetimes import kill_group
from vectormill.settings import process_environment
from worker.devices.detect import detect_inventory
from worker.devices.device import CPU, Device

# Kept for the report at the end.
LAST_SECONDS: Final = 5.0
BILLION: Final = 1e9
VERSIONS: Final = ("torch", "transformers", "triton", "flash-attn", "sentence-transformers")
# The share of a large product that a model has to reach with texts of TARGET_LENGTH tokens.
TARGETS: Final = {"bert-base": 0.60, "bge-m3": 0.60, "qwen3-0.6b": 0.50, "qwen3-8b-third": 0.60}
TARGET_LENGTH: Final = 100
# Dollars an hour for a machine with one large card.
PRICES: Final = (2.0, 3.5)
WAYS: Final = {"eager": [], "compiled": ["compile"], "fused and compiled": ["fused_gelu", "compile"]}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of a run: the lengths of texts of each shape, and how much a pass computes."""

    lengths: Mapping[str, tuple[int, ...]]
    ways: Mapping[str, Sequence[str]]
    batch_tokens: int
    pass_seconds: float
    product: int
    copied_bytes: int
    peer_tokens: int
    service: Mapping[str, Any]


CARD: Final = Scale(
    {
        "bert-base": (16, 100, 256),
        "bge-m3": (16, 100, 256),
        "qwen3-0.6b": (16, 100, 512),
        "qwen3-8b-third": (16, 100, 512),
    },
    WAYS,
    batch_tokens=32_768,
    pass_seconds=1.0,
    product=8192,
    copied_bytes=4 << 30,
    peer_tokens=2_000_000,
    service={"shape": "bert-base", "length": 100, "num_texts": 200_000},
)
QUICK: Final = Scale(
    {"tiny": (16,)},
    {"eager": [], "fused": ["fused_gelu"]},
    batch_tokens=512,
    pass_seconds=0.1,
    product=512,
    copied_bytes=1 << 24,
    peer_tokens=4_000,
    service={"shape": "tiny", "length": 16, "num_texts": 200},
)


@dataclass(slots=True)
class Step:
    """A step of the run: its command, the seconds that it may take, and afterwards its rows and its flaw."""

    name: str
    command: tuple[str, ...]
    seconds: float
    rows: list[Row]
    flaw: str = ""

    def run(self, directory: Path, seconds: float) -> None:
        """Run the command; kill it, with all its processes, when it takes more than `seconds`."""
        log, late, lines = directory / f"{self.name.replace(' ', '-')}.log", threading.Event(), []
        with (
            log.open("w", encoding="utf-8") as output,
            subprocess.Popen(
                self.command, stdout=subprocess.PIPE, stderr=output, text=True, cwd=ROOT, start_new_session=True,
                env=process_environment() | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            ) as process,
        ):  # fmt: skip

            def end() -> None:
                late.set()
                kill_group(process.pid)

            timer = threading.Timer(seconds, end)
            timer.start()
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line.startswith("{"):
                    self.rows.append(json.loads(line))
            status = process.wait()
            timer.cancel()
            kill_group(process.pid)
        if not self.rows:  # pytest, whose last line counts the tests
            said = [
                line.strip("= \n")
                for line in lines
                if " in " in line and ("passed" in line or "failed" in line)
            ]
            failed = [line.strip() for line in lines if line.startswith("FAILED")]
            self.rows += [{"said": line} for line in [*failed, *said[-1:]]]
        if late.is_set():
            self.flaw = f"it was ended after {seconds:.0f} s"
        elif status:
            self.flaw = find_last_line(log.read_text(encoding="utf-8")) or f"it ended with status {status}"


def run(harness: Harness) -> Report:
    scale = QUICK if harness.is_quick else CARD
    device = find_device(harness.device)
    deadline = time.monotonic() + 60 * harness.minutes - LAST_SECONDS
    directory = harness.state or HOME / "card"
    directory.mkdir(parents=True, exist_ok=True)
    steps = list(plan_steps(scale, device, harness))
    left = sum(step.seconds for step in steps)
    for step in steps:
        # What earlier steps did not use, or used beyond their share, is divided among those that are left.
        seconds = step.seconds / left * (deadline - time.monotonic())
        left -= step.seconds
        if seconds < 1:
            step.flaw = "no time was left"
            continue
        harness.say(f"{step.name}, {seconds:.0f} s at most")
        step.run(directory, seconds)
        harness.say(f"{step.name}: {step.flaw or 'done'}; " + "; ".join(map(describe_row, step.rows)))
    facts = read_facts(device)
    record = {"facts": facts, "steps": {step.name: {"rows": step.rows, "flaw": step.flaw} for step in steps}}
    (directory / "card.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    harness.say(f"all figures are in {directory / 'card.json'}")
    return make_report(steps, facts, harness)


def plan_steps(scale: Scale, device: Device, harness: Harness) -> Iterator[Step]:
    """Yield all steps, the most important first, each with its share of the time."""
    own = {"device": harness.device, "batch_tokens": scale.batch_tokens, "seconds": scale.pass_seconds}

    def child(name: str, kind: str, seconds: float, **order: Any) -> Step:
        command = (sys.executable, "-m", "benchmarks.children.card_step", kind, json.dumps(own | order))
        return Step(name, command, seconds, [])

    shapes = list(scale.lengths)
    yield child(
        "ceilings", "ceilings", 40, shapes=shapes, size=scale.product, copied_bytes=scale.copied_bytes
    )
    tests = "tests/gpu/test_pooling_on_gpu.py" if harness.is_quick else "tests/gpu"
    pytest = ("-m", "pytest", "-m", "", "-q", "-x", "--no-header", "-p", "no:cacheprovider", tests)
    yield Step("tests", (sys.executable, *pytest), 120, [])
    for shape, lengths in scale.lengths.items():
        # Decoders have gates instead of a GELU, and refuse a switch that is named in vain.
        ways = {
            way: switches
            for way, switches in scale.ways.items()
            if not (shape.startswith("qwen") and "fused_gelu" in switches)
        }
        yield child(f"model {shape}", "model", 50, shape=shape, lengths=lengths, ways=ways)
    for shape, lengths in scale.lengths.items():
        yield child(
            f"peer {shape}",
            "peer",
            20,
            shape=shape,
            lengths=lengths[1:] or lengths,
            num_tokens=scale.peer_tokens,
        )
    most = 1 if device.kind == CPU else max(1, min(4, len(os.sched_getaffinity(0)) // 2))
    workers = [number for number in (1, 2, 4) if number <= most]
    yield child("service to Parquet", "service", 100, workers=workers, target="Parquet", **scale.service)
    # Last, where time is left.
    yield child(
        "service to Postgres", "service", 40, workers=workers[-1:], target="Postgres", **scale.service
    )


def read_facts(device: Device) -> dict[str, str]:
    """Return the card, its driver and the versions of what computes on it."""
    inventory = detect_inventory()
    facts = {
        "device": device.description or device.name,
        "capability": next((each for each in sorted(device.features) if each.startswith(("sm_", "gfx"))), device.kind),
        "cores": str(len(os.sched_getaffinity(0))),
        "processor": inventory.description,
        "Python": sys.version.split()[0],
    }  # fmt: skip
    for name in VERSIONS:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            continue
    return facts


def describe_row(row: Row) -> str:
    """Return a row in a few words, for the person who waits."""
    if "said" in row:
        return str(row["said"])
    named = [
        str(row[name]) for name in ("name", "system", "way", "target", "workers", "length") if name in row
    ]
    figures = {"tokens_per_second": "tokens/s", "tflops": "TFLOP/s", "gb_per_second": "GB/s"}
    return " ".join(
        [*named, *(f"{NUMBER(row[name])} {unit}" for name, unit in figures.items() if name in row)]
    )


def make_report(steps: Sequence[Step], facts: Mapping[str, str], harness: Harness) -> Report:
    rows = {step.name: step.rows for step in steps}
    ceilings = {row["name"]: row.get("tflops", row.get("gb_per_second")) for row in rows["ceilings"]}

    def collect(kind: str) -> list[Row]:
        return [row for name, found in rows.items() if name.partition(" ")[0] == kind for row in found]

    def share(row: Row, ceiling: str) -> str:
        return SHARE(row["tflops"] / ceilings[ceiling]) if ceilings.get(ceiling) else ""

    models = Table(
        ("model, way, tokens of a text", "tokens/s", "TFLOP/s", "of a large product", "of its own products", "idle",
         "launches", "peak memory", "dollars for 10⁹ tokens"),
        tuple(
            (
                f"{row['shape']}, {row['way']}, {row['length']}",
                NUMBER(row["tokens_per_second"]), NUMBER(row["tflops"]),
                share(row, "product"), share(row, row["shape"]), "" if row["idle"] is None else SHARE(row["idle"]),
                NUMBER(row["launches"]), MEBIBYTES(row["peak_bytes"]),
                price(row["tokens_per_second"], harness.price),
            )
            for row in collect("model")
        ),
    )  # fmt: skip
    kernels = Table(
        ("model, way, tokens of a text", "kernel", "share of the device's time"),
        tuple(
            (f"{row['shape']}, {row['way']}, {row['length']}", name, SHARE(part))
            for row in collect("model")
            if harness.is_quick or row["length"] == TARGET_LENGTH
            for name, part in row["kernels"]
        ),
    )
    best: dict[str, Row] = {}
    for row in collect("model"):
        if row["length"] == TARGET_LENGTH and row["shape"] in TARGETS:
            found = best.setdefault(row["shape"], row)
            best[row["shape"]] = max(found, row, key=lambda each: each["tokens_per_second"])
    targets = Table(
        ("model, texts of 100 tokens", "fastest way", "of a large product", "target", "tokens/s at the target",
         *(f"dollars for 10⁹ tokens there, at {each:g} an hour" for each in PRICES)),
        tuple(
            (
                shape, row["way"], SHARE(reached),
                judge(f"≥ {SHARE.write_bound(TARGETS[shape])}", reached >= TARGETS[shape]),
                NUMBER(rate), *(price(rate, each) for each in PRICES),
            )
            for shape, row in best.items()
            if ceilings.get("product")
            for reached in [row["tflops"] / ceilings["product"]]
            for rate in [row["tokens_per_second"] * TARGETS[shape] / reached]
        ),
    )  # fmt: skip
    peers = Table(
        (
            "texts of one length, tokenized too",
            "sentence-transformers, tokens/s",
            "our engine, tokens/s",
            "times as fast",
        ),
        tuple(pair_up(collect("peer"))),
    )
    service = Table(
        ("whole service", "tokens/s committed", "dollars for 10⁹ tokens"),
        tuple(
            (
                f"{row['shape']}, {row['length']} tokens, to {row['target']}, {row['workers']} workers",
                NUMBER(row["tokens_per_second"]), price(row["tokens_per_second"], harness.price),
            )
            for row in collect("service")
        ),
    )  # fmt: skip
    said = [row["said"] for row in rows["tests"] if "said" in row]
    return Report(
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        (models, targets, kernels, peers, service),
        (
            "Ceilings: "
            + ", ".join(
                f"{name} {NUMBER(value)} {'GB/s' if name == 'copy' else 'TFLOP/s'}"
                for name, value in ceilings.items()
            )
            + ". A model's own products are those of its layers, with as many tokens as a batch.",
            f"Tests: {'; '.join(said) or 'none ended'}.",
            f"Dollars at {harness.price:g} an hour for the whole machine. Weights are random. A model's batches are "
            "made of token ids, as many in flight as in a worker; memory is that of its tensors on a GPU, and resident "
            "memory elsewhere.",
            *(f"{step.name}: {step.flaw.rstrip('.')}." for step in steps if step.flaw),
        ),
    )


def price(tokens_per_second: float, dollars_per_hour: float) -> str:
    return NUMBER(dollars_per_hour / 3600 * BILLION / tokens_per_second)


def pair_up(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each shape and length that the peer and our engine have both encoded."""
    rates = {(row["shape"], row["length"], row["system"]): row["tokens_per_second"] for row in rows}
    for (shape, length, system), theirs in rates.items():
        ours = rates.get((shape, length, "engine"))
        if system != "engine" and ours is not None:
            yield f"{shape}, {length} tokens", NUMBER(theirs), NUMBER(ours), RATIO(ours / theirs)
