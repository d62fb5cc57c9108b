"""`gpu`: where it is refused, what stands in a switch's way, what it writes, and its report, on made records."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.cases.gpu import gpu
from benchmarks.cases.gpu.beside import count_outcomes, find_class
from benchmarks.cases.gpu.choosing import Pair, Timed, Together
from benchmarks.cases.gpu.driver import Ending
from benchmarks.cases.gpu.gpu import (
    collect_shapes,
    find_devices,
    find_obstacle,
    give,
    make_report,
    refuse_unfinished,
    write_defaults,
)
from benchmarks.cases.gpu.plan import CARD, QUICK, Step, make_plan
from benchmarks.cases.gpu.state import DONE, FAILED, Identity, Record, State
from benchmarks.cases.gpu.trials import count_texts, describe_budgets, draw_ids
from benchmarks.models.shapes import SHAPES
from benchmarks.order import BenchmarkFailed, Order
from benchmarks.probes.model_cost import ModelCost
from benchmarks.steps import Steps
from worker.devices.device import CUDA, Device, Inventory
from worker.encoder.switches import SWITCHES, Switch, load_defaults

# Two that run anywhere.
FIRST, SECOND = [name for name, each in SWITCHES.items() if not each.is_of_ranks and not each.package][:2]
H100 = Device("cuda:0", CUDA, 0, (), 1, 80 << 30, frozenset({"sm_90"}), "NVIDIA H100")
IDENTITY = Identity("NVIDIA H100", "sm_90", "2.13.0", "card", "abc")
PROCESSOR = Device("cpu:0", "cpu", 0, (0,), 1, 8 << 30)
PLAN = make_plan(
    replace(QUICK, sized=QUICK.sized[:1]), (SWITCHES[FIRST], SWITCHES[SECOND]), lambda *_: "", num_devices=1
)


def order(**fields: Any) -> Order:
    return Order(None, None, **fields)  # type: ignore[arg-type]


def machine(*gpus: Device) -> Inventory:
    return Inventory(gpus, ((0,), (1,)), 1 << 30, frozenset(), "")


def pair(added: str, speed: float, base: tuple[str, ...] = ()) -> Pair:
    """Two passes of 16,000 tokens: 1 s without, and a `speed`-th of it with."""
    by_length = {16: Timed(16_000, 2e12, (1.0, 1.0), (1 / speed,) * 2)}
    return Pair(base, added, by_length, 1 << 30, 2 << 30, "bf16", "packed")


@pytest.fixture
def state(tmp_path: Path) -> State:
    """Both switches help alone, the second not beside the first."""
    state = State.open(tmp_path, IDENTITY)
    results: dict[str, Any] = {
        "rates": {"rates": {"bf16": 4000.0, "fp32": 400.0}},
        "tests": {"counts": {"passed": 3, "failed": 1, "skipped": 0}, "failures": {"test_a.py::b": "no room"}},
        f"switch tiny {FIRST}": asdict(pair(FIRST, 1.5)),
        f"switch tiny {SECOND}": asdict(pair(SECOND, 1.25)),
        "together tiny": asdict(Together((FIRST,), (pair(SECOND, 1.0, (FIRST,)),))),
        "budgets tiny": describe_budgets((FIRST,), 16, {128: [90.0, 90.0], 256: [99.0, 99.0], 512: [100.0, 100.0]})
        | {"tuner": {"max_batch_tokens": 512, "state": "tuned", "rate": 95.0}},
        "host": {
            "switches": [FIRST],
            "by_length": {
                "16": {
                    "seconds": [2.0, 2.0],
                    "num_texts": 1000,
                    "num_tokens": 16_000,
                    "busy_share": 0.5,
                    "stage_seconds": {"run": 1.5},
                }
            },
        },
        "beside tiny": {
            "switches": [FIRST],
            "num_texts": 100,
            "flop": 1e9,
            "systems": {
                "engine": {"name": "ours", "seconds": [1.0, 1.0], "num_tokens": 500, "padding": 0.0,
                           "peak_bytes": 1 << 20, "failure": None},
                "vllm": {"name": "vLLM", "seconds": [], "num_tokens": 0, "padding": 0.0, "peak_bytes": 0,
                         "failure": "Traceback\nIt is not installed."},
                "peer": {"name": "a peer", "seconds": [3.0, 3.0], "num_tokens": 600, "padding": 0.2,
                         "peak_bytes": 1 << 20, "failure": None},
            },
        },
    }  # fmt: skip
    for step, result in results.items():
        state.add(Record(step, DONE, 1.0, "now", json.loads(json.dumps(result))))
    return state


# -- where it runs -------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_told_what_it_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "detect_inventory", machine)
    with pytest.raises(BenchmarkFailed, match="no GPU; `--device cpu --quick` tests the mechanics"):
        find_devices(order(device="cuda"))
    with pytest.raises(BenchmarkFailed, match="--device cpu --quick"):
        find_devices(order(device="cpu"))
    assert [device.name for device in find_devices(order(device="cpu", is_quick=True))] == ["cpu:0", "cpu:1"]


def test_a_model_is_shared_by_cards_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(H100, name="cuda:1", description="NVIDIA L4")
    twin = replace(H100, name="cuda:2")
    monkeypatch.setattr(gpu, "detect_inventory", lambda: machine(H100, other, twin))
    assert [device.name for device in find_devices(order(device="cuda"))] == ["cuda:0", "cuda:2"]
    assert [device.name for device in find_devices(order(device="cuda:1"))] == ["cuda:1"]
    with pytest.raises(BenchmarkFailed, match="no device 'cuda:7'; there is cuda:0, cuda:1, cuda:2"):
        find_devices(order(device="cuda:7"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpu", "engine"], "name it alone"),
        (["engine", "--quick"], "--quick is of gpu, score, accuracy"),
        (["engine", "--state", "here"], "--state is of gpu alone"),
        (["gpu", "--device", "cpu", "--quick", "--write"], "leave --quick away"),
    ],
)
def test_options_of_a_card_are_for_nothing_else(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "500"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_what_stands_in_the_way_of_a_switch_is_said_by_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Switch("newest", "Of a later card.", smallest_capability=100)
    large = Switch("large", "For large models.", pays_from_hidden_size=4096)
    monkeypatch.setattr("worker.encoder.switches.SWITCHES", {each.name: each for each in (newest, large)})
    said = find_obstacle(H100, newest, "bert-base")
    assert "10.0" in said
    assert "NVIDIA H100" in said
    assert "VECTORMILL_WORKER_SWITCHES" not in said, "nobody has asked for it"
    assert "4,096" in find_obstacle(H100, large, "bert-base")
    assert find_obstacle(H100, large, "qwen3-7b") == ""


# -- what follows --------------------------------------------------------------------------------------------


def test_steps_go_by_what_earlier_ones_found(state: State) -> None:
    assert give(Step("together tiny", "together", 1, "tiny"), state)["candidates"] == (FIRST, SECOND)
    assert give(Step("host", "host", 1, "tiny"), state)["kept"] == (FIRST,)
    assert give(Step("any", "switch", 1, "tiny"), state) == {"rates": {"bf16": 4000.0, "fp32": 400.0}}


def test_a_failed_step_together_keeps_nothing(state: State) -> None:
    """What it had found by then is in its record, and not what the card gets."""
    half = asdict(Together((FIRST,)))
    state.add(Record("together tiny", FAILED, 1.0, "now", half, "it ended"))
    assert give(Step("host", "host", 1, "tiny"), state)["kept"] == ()


def test_defaults_are_written_for_the_card_and_those_of_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "defaults.json"
    path.write_text('{"sm_80": {"measured": "then, A100, torch 2", "switches": []}}')
    write_defaults(IDENTITY, (FIRST,), path)
    found = load_defaults(path)
    assert found["sm_90"].switches == (FIRST,)
    assert found["sm_90"].measured.endswith(", NVIDIA H100, torch 2.13.0")
    assert found["sm_80"].measured == "then, A100, torch 2"


def test_nothing_is_written_while_a_step_that_decides_is_left(state: State, tmp_path: Path) -> None:
    refuse_unfinished(PLAN, state)
    state.add(Record("together tiny", FAILED, 1.0, "now", {}, "it ended"))
    refuse_unfinished(PLAN, state)  # a failure is an answer
    fresh = State.open(tmp_path / "fresh", IDENTITY)
    fresh.add(Record(f"switch tiny {FIRST}", DONE, 1.0, "now", asdict(pair(FIRST, 1.5))))
    with pytest.raises(BenchmarkFailed, match=f"2 steps that decide .*switch tiny {SECOND}, together tiny"):
        refuse_unfinished(PLAN, fresh)


def test_a_card_gets_its_defaults_when_all_that_decides_has_ended_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, ...]] = []
    monkeypatch.setattr(gpu, "find_devices", lambda order: (H100,))
    monkeypatch.setattr(gpu, "write_defaults", lambda identity, chosen: written.append(chosen))
    monkeypatch.setattr(gpu, "StepProcess", lambda *_: lambda step, given: Ending(FAILED, {}, "no such card"))
    with Steps(Console(file=io.StringIO())) as steps:
        asked = Order(None, steps, device=CUDA, state=tmp_path, is_written=True)  # type: ignore[arg-type]
        with pytest.raises(BenchmarkFailed, match="Nothing was written"):
            gpu.measure(replace(asked, minutes=0))
        assert written == []
        report = gpu.measure(asked)
    assert written == [()], "a switch that failed is none of them"
    assert report.notes[0] == "Switches for sm_90: none."


def test_the_report_has_a_row_for_all_that_was_found(state: State) -> None:
    shapes = collect_shapes(PLAN, state)
    report = make_report(IDENTITY, PLAN, state, shapes, ((FIRST,), ["b is off: why."]), PLAN[-1:])
    models, switches, budgets, host, beside, steps = report.tables
    assert models.rows == (
        ("tiny, 16 tokens", "16,000", "50.0%", "1,024 MiB", FIRST, "24,000", "75.0%", "2,048 MiB"),
    )
    assert [(row[0], row[-1]) for row in switches.rows] == [
        (f"tiny: {FIRST}", "helps"),
        (f"tiny: {SECOND}", "helps"),
        (f"tiny: {SECOND} beside {FIRST}", "neutral"),
    ]
    assert budgets.rows == (
        ("tiny, 16 tokens", "128: 90.0; 256: 99.0; 512: 100", "256", "512 (tuned)", "95.0"),
    )
    assert host.rows == (("tiny, 16 tokens", "500", "8,000", "33.3%", "50.0%", "75.0%"),)
    assert [row[:2] for row in beside.rows] == [
        ("tiny: ours", "100"),
        ("tiny: vLLM", "not measured: It is not installed."),
        ("tiny: a peer", "33.3"),
    ]
    assert beside.rows[2][4] == "3.00×"
    assert [row[1] for row in steps.rows] == ["done", "done", "to do", *["done"] * 6]
    assert report.notes[0] == f"Switches for sm_90: {FIRST}."
    assert "test_a.py::b failed: no room" in report.notes
    assert "1 steps are left" in report.notes[-1]


def test_a_report_of_a_run_that_has_just_begun_can_be_written(tmp_path: Path) -> None:
    state = State.open(tmp_path, IDENTITY)
    plan = make_plan(CARD, tuple(SWITCHES.values()), lambda *_: "", num_devices=1)
    report = make_report(IDENTITY, plan, state, collect_shapes(plan, state), ((), []), plan)
    (steps,) = report.tables
    assert len(steps.rows) == len(plan)


# -- what is measured ----------------------------------------------------------------------------------------


def test_outcomes_of_tests_are_read_as_they_come() -> None:
    lines = [
        "tests/gpu/test_a.py::test_one PASSED                       [ 25%]",
        "tests/gpu/test_a.py::test_two[cuda] FAILED                 [ 50%]",
        "tests/gpu/test_a.py::test_three SKIPPED (torch sees no two GPUs here) [ 75%]",
        "FAILED tests/gpu/test_a.py::test_two[cuda] - assert 0.5 >= 0.999",
        "=== 1 failed, 1 passed, 1 skipped in 3.2s ===",
    ]
    found = count_outcomes(lines)
    assert found["counts"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 1, "xfail": 0}
    assert found["failures"] == {"tests/gpu/test_a.py::test_two[cuda]": "assert 0.5 >= 0.999"}
    cut_off = count_outcomes(lines[:2])
    assert cut_off["failures"] == {"tests/gpu/test_a.py::test_two[cuda]": ""}


@pytest.mark.parametrize(
    ("length", "name"), [(16, "up to 32"), (32, "up to 32"), (100, "up to 128"), (900, "above 128")]
)
def test_a_budget_is_that_of_the_texts_length(length: int, name: str) -> None:
    budgets: dict[str, dict[str, Any]] = {
        each: {"name": each} for each in ("up to 32", "up to 128", "above 128")
    }
    assert find_class(budgets, length)["name"] == name


def test_a_pass_is_of_whole_batches_and_never_of_one_alone() -> None:
    sized = CARD.of("qwen3-7b")
    cost = ModelCost(36, 4096, 7_000_000_000)
    assert count_texts(sized, 512, cost, 1e12) == 2 * (16_384 // 512)
    many = count_texts(sized, 512, cost, 1e15)
    assert many % (16_384 // 512) == 0
    assert many * 512 * 14e9 == pytest.approx(0.5 * 1.5 * 1e15, rel=0.3), (
        "half of the rate for so many seconds"
    )


def test_texts_of_a_trial_are_the_same_each_time_and_of_the_lengths_that_are_asked_for() -> None:
    mixed = draw_ids(200, (16, 256))
    assert {len(ids) for ids in draw_ids(5, (100, 100))} == {100}
    lengths = [len(ids) for ids in mixed]
    assert min(lengths) >= 16
    assert max(lengths) <= 256
    assert len(set(lengths)) > 50, "or there is no padding to leave out"
    assert all((one == other).all() for one, other in zip(mixed, draw_ids(200, (16, 256)), strict=True))


def test_every_shape_and_length_of_a_card_can_be_read_by_its_model() -> None:
    for sized in CARD.sized:
        assert max(sized.lengths) <= SHAPES[sized.shape].max_tokens
