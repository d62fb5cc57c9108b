"""The ways that are measured on a device: those that are possible there, and the reasons of the others."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vectormill.models.registry import DEFAULT_MODEL, Registry
from vectormill.ragged import Ragged
from worker.batching.batch import Batch
from worker.devices.device import Device
from worker.encoder import switches
from worker.encoder.encoder import Choice, EncoderOrder
from worker.encoder.switches import C_COMPILER
from worker.tuning import tuner
from worker.tuning.tuner import WayTuner, describe_circumstances, list_impossible, list_ways

COMPILER, FLASH3, FLASH4 = C_COMPILER, "flash_attn_interface", "flash_attn.cute"


def order_on(capability: int, wanted: str = "auto") -> EncoderOrder:
    device = Device("cuda:0", "cuda", 0, (), 1, 80 << 30, frozenset({f"sm_{capability}"}), "a card")
    return EncoderOrder(
        Registry({}).card(DEFAULT_MODEL), device, "auto", "auto", 1, Path("/nowhere"), switches=wanted
    )


@pytest.mark.parametrize(
    ("capability", "wanted", "installed", "expected", "impossible"),
    [
        (
            90,
            "auto",
            {COMPILER, FLASH3},
            ["fused_gelu", "compile", "fused_gelu+compile", "flash3+fused_gelu+compile", "flash3+compile"],
            {"flash4": "the package flash_attn.cute is not installed"},
        ),
        (
            100,
            "auto",
            {COMPILER, FLASH3, FLASH4},
            ["fused_gelu", "compile", "fused_gelu+compile", "flash4+fused_gelu+compile", "flash4+compile"],
            {"flash3": "it needs compute capability 9.0, and a card has 10.0"},
        ),
        (
            89,
            "auto,fp8",
            {COMPILER, FLASH4},
            ["fused_gelu", "compile", "fused_gelu+compile", "fp8+compile"],
            {
                "flash3": "it needs compute capability 9.0, and a card has 8.9",
                "flash4": "it needs compute capability 9.0 to 10.9, and a card has 8.9",
            },
        ),
        (
            80,
            "auto, fp8",
            {FLASH3},
            ["fused_gelu"],
            {
                "flash3": "it needs compute capability 9.0, and a card has 8.0",
                "flash4": "it needs compute capability 9.0 to 10.9, and a card has 8.0",
                "compile": "it needs a C compiler, and none is installed",
                "fp8": "it needs compute capability 8.9 or higher, and a card has 8.0",
            },
        ),
        (90, "fp8", {COMPILER, FLASH3}, [], {}),
        (90, "none", {COMPILER, FLASH3}, [], {}),
    ],
)
def test_only_what_is_possible_on_a_device_is_measured_there(
    capability: int,
    wanted: str,
    installed: set[str],
    expected: list[str],
    impossible: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (switches, tuner):
        monkeypatch.setattr(module, "is_installed", lambda name: name == "torch" or name in installed)
    order = order_on(capability, wanted)
    ways = list_ways(order)
    assert ["+".join(way.switches) for way in ways] == ["", *expected]
    assert {way.backend for way in ways} == {"torch"}
    findings = list_impossible(order, ways)
    assert {finding.way.switches: finding.flaw for finding in findings} == {
        (name,): flaw for name, flaw in impossible.items()
    }


def test_a_padded_model_has_one_way_and_a_compiler_that_is_installed_later_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = order_on(90)
    assert len(list_ways(replace(order, attention="padded"))) == 1
    monkeypatch.setattr(tuner, "detect_driver", lambda: "580")
    found = []
    for compilers in (set(), {C_COMPILER}):
        monkeypatch.setattr(switches, "is_installed", lambda name, has=compilers: name in has)
        found.append(describe_circumstances(order))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("precision", "used", "cosine", "is_flawed"),
    [
        ("bf16", (), 0.9985, True),
        ("bf16", ("compile",), 0.9995, False),
        ("fp32", ("compile",), 0.9995, True),
        ("bf16", ("fp8", "compile"), 0.9985, False),
        ("bf16", ("fp8", "compile"), 0.985, True),
    ],
)
def test_a_way_keeps_the_promise_of_its_precision_and_one_with_fp8_that_of_fp8(
    precision: str, used: tuple[str, ...], cosine: float, is_flawed: bool
) -> None:
    task: Any = SimpleNamespace(find_flaw=lambda *_: "")
    report: Any = SimpleNamespace(precision=Choice(precision, ""), switches=used, gives_vectors=True)
    expected, found = (
        Ragged.from_matrix(np.array([row], np.float32)) for row in ([1, 0], [cosine, (1 - cosine**2) ** 0.5])
    )
    order = order_on(90)
    starter: Any = SimpleNamespace(order=replace(order, device=replace(order.device, kind="cpu")))
    flaw = WayTuner(starter, task, Batch({}))._find_flaw(found, expected, report)
    assert bool(flaw) == is_flawed
