"""Which attention an architecture gets on a device, and why."""

from types import SimpleNamespace

import pytest

from vectormill.domain.errors import ModelError
from vectormill.models.families import FAMILIES
from worker.devices.device import CPU, CUDA, MPS, Device
from worker.encoder.choice import (
    AttentionShape,
    choose_attention,
    read_attention_shape,
)


def device(kind: str, *features: str) -> Device:
    return Device(
        f"{kind}:0",
        kind,
        0,
        (),
        1,
        1 << 30,
        frozenset(features),
        "a T4" if "sm_75" in features else "a device",
    )


PROCESSOR, AMPERE, TURING, APPLE = device(CPU), device(CUDA, "sm_80"), device(CUDA, "sm_75"), device(MPS)


@pytest.mark.parametrize(
    ("model_type", "head_dim", "where", "precision", "expected", "reason"),
    [
        ("bert", 64, AMPERE, "bf16", "packed", "no padding"),
        ("xlm-roberta", 64, AMPERE, "fp16", "packed", "no padding"),
        ("modernbert", 64, AMPERE, "bf16", "packed", "no padding"),
        ("qwen3", 128, AMPERE, "bf16", "packed", "no padding"),
        ("mistral", 256, AMPERE, "bf16", "packed", "no padding"),  # the largest head the kernel takes
        (
            "bert",
            64,
            device(CUDA),
            "bf16",
            "packed",
            "no padding",
        ),  # a capability not told is found by the probe
        (
            "bert",
            32,
            PROCESSOR,
            "fp32",
            "padded",
            "no packed kernel",
        ),  # the loop costs more than little padding
        ("mpnet", 64, AMPERE, "bf16", "padded", "relative position bias"),
        ("deberta-v2", 64, AMPERE, "bf16", "padded", "disentangled"),
        ("t5", 64, AMPERE, "bf16", "padded", "relative position bias"),
        ("gemma2", 64, AMPERE, "bf16", "padded", "not one that was compared"),  # it caps its scores
        ("bert", 64, AMPERE, "fp32", "padded", "16 bit only"),
        ("bert", 20, AMPERE, "bf16", "padded", "have 20"),  # not a multiple of 8
        ("llama", 264, AMPERE, "bf16", "padded", "have 264"),  # more than 256
        ("bert", 64, TURING, "fp16", "padded", "a T4 has 7.5"),
        ("bert", 64, APPLE, "fp32", "padded", "mps has no packed kernel"),
    ],
)
def test_auto_packs_where_that_is_exact_and_says_why_elsewhere(
    model_type: str, head_dim: int, where: Device, precision: str, expected: str, reason: str
) -> None:
    choice = choose_attention("auto", AttentionShape(model_type, head_dim, 0), where, precision)
    assert choice.value == expected
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("model_type", "where", "precision"),
    [
        ("mpnet", PROCESSOR, "fp32"),  # not exact anywhere
        ("gemma2", PROCESSOR, "fp32"),  # unknown anywhere
        ("bert", AMPERE, "fp32"),
        ("bert", TURING, "fp16"),
        ("bert", APPLE, "fp32"),
    ],
)
def test_packed_attention_that_was_asked_for_in_vain_is_refused_with_what_to_do(
    model_type: str, where: Device, precision: str
) -> None:
    with pytest.raises(ModelError, match=r"because .*; use padded or auto\.$"):
        choose_attention("packed", AttentionShape(model_type, 64, 0), where, precision)


def test_a_wish_that_can_be_met_is_followed() -> None:
    odd = AttentionShape("bert", 20, 0)
    assert choose_attention("packed", odd, PROCESSOR, "fp32").reason == "asked for"  # any head size on a CPU
    assert choose_attention("padded", odd, AMPERE, "bf16").value == "padded"
    assert choose_attention("padded", AttentionShape("gemma2", 64, 0), AMPERE, "bf16").reason == "asked for"


def test_no_architecture_is_both_packable_and_not() -> None:
    assert not [family for family in FAMILIES.values() if family.positions and family.packing_obstacle]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 384, "num_attention_heads": 12, "pad_token_id": 0}, (32, 0)),
        ({"hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128, "pad_token_id": None}, (128, 0)),
        ({"hidden_size": 768, "num_attention_heads": 12, "head_dim": None, "pad_token_id": 1}, (64, 1)),
    ],
)
def test_the_head_size_is_read_or_worked_out(config: dict[str, int], expected: tuple[int, int]) -> None:
    shape = read_attention_shape(SimpleNamespace(model_type="qwen3", **config))
    assert (shape.head_dim, shape.padding_id) == expected
