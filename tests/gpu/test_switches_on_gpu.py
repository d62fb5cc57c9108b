"""Each switch on a GPU: taken, and the vectors are those of fp32 on a processor. Rows for the CPU run what can be here.

What a kernel that is wrong comes to is shown where none is needed: tests/contract/test_switches_agree.py.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl
from torch.nn.functional import cosine_similarity

from tests.compiled import IGNORES_TORCHS_WARNING, NEEDS_COMPILER, count_graphs, fresh_compiler
from tests.contract.packed_models import MODELS, make_transformer
from tests.gpu.devices import NEEDS_GPU, find_device
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.choice import read_attention_shape
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.encoder.switches import SWITCHES, SwitchChoice, is_installed
from worker.model.packed import (
    EXACT,
    FLASH,
    PackedNetwork,
    compute_probes,
)
from worker.model.switching import (
    FLASH_VERSIONS,
    JOINED,
    apply_switches,
    multiply_restored,
    multiply_scaled,
    scale_rows,
)

pytestmark = IGNORES_TORCHS_WARNING

CARD = Registry({}).card(DEFAULT_MODEL)


def has_capability(smallest: int, largest: int = 999) -> bool:
    if not torch.cuda.is_available():
        return False
    major, minor = torch.cuda.get_device_capability()
    return smallest <= int(10 * major + minor) <= largest


# What only such a card has: its kernels cannot be run, nor imitated, elsewhere.
NEEDS_FLASH3 = pytest.mark.skipif(
    not (has_capability(90, 90) and is_installed("flash_attn_interface")),
    reason="it needs a GPU of compute capability 9.0 and the package flash_attn_interface",
)
NEEDS_FLASH4 = pytest.mark.skipif(
    not (has_capability(90, 109) and is_installed("flash_attn.cute")),
    reason="it needs a GPU of compute capability 9.0 to 10.9 and the package flash_attn.cute",
)
NEEDS_FP8 = pytest.mark.skipif(not has_capability(89), reason="torch sees no GPU of compute capability 8.9")
TRIED = (
    ("cpu", "fused_gelu", ()),
    ("cpu", "fused_gelu,compile", NEEDS_COMPILER),
    ("cuda", "flash3", NEEDS_FLASH3),
    ("cuda", "flash4", NEEDS_FLASH4),
    ("cuda", "fused_gelu", NEEDS_GPU),
    ("cuda", "compile", NEEDS_GPU),
    ("cuda", "fused_gelu,compile", NEEDS_GPU),
    ("cuda", "flash4,fused_gelu,compile", NEEDS_FLASH4),
)


@pytest.fixture(autouse=True)
def as_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels and compilers are of the process, which is not a model's own here."""
    with fresh_compiler(tmp_path_factory.getbasetemp() / "compiled"):
        yield
    restore_flash_attention_impl(_raise_warn=False)


def load(kind: str, directory: Path, precision: str, switches: str) -> Encoder:
    order = EncoderOrder(
        CARD, find_device(kind), "torch", precision, 1, directory, "packed", switches=switches
    )
    return load_encoder(order)


def make_batch(lengths: tuple[int, ...] = (3, 120, 17, 64, 128, 40, 9)) -> Batch:
    tokens = np.random.default_rng(sum(lengths))
    return Batch.from_ids([tokens.integers(1000, 30000, length).astype(np.int32) for length in lengths])


def smallest_cosine(a: NDArray[np.float32] | Tensor, b: NDArray[np.float32] | Tensor) -> float:
    one, other = (torch.as_tensor(each).float().cpu() for each in (a, b))
    assert one.shape == other.shape
    return float(cosine_similarity(one, other, dim=-1).min())


def test_every_switch_has_a_row_here() -> None:
    tried = {name for _, names, _ in TRIED for name in names.split(",")}
    assert tried | {"fp8"} == set(SWITCHES)  # whose rows are below: the packaged model is too small for it


@pytest.mark.parametrize(
    ("device", "switches"), [pytest.param(device, names, marks=marks) for device, names, marks in TRIED]
)
def test_a_switch_is_taken_and_the_vectors_are_those_without_it(
    device: str, switches: str, tmp_path: Path
) -> None:
    batches = [make_batch(), make_batch((250,)), make_batch((5, 5, 5)), make_batch((2,))]
    plain = load("cpu", tmp_path, "fp32", "none")
    expected = np.concatenate([plain.encode(batch).matrix for batch in batches])
    encoder = load(device, tmp_path, "fp32" if device == "cpu" else "auto", switches)
    report = encoder.describe()
    assert (report.switches, report.notes) == (tuple(switches.split(",")), ())
    flash = [version for name, version in FLASH_VERSIONS.items() if name in switches]
    assert current_flash_attention_impl() == (flash[0] if flash else None)
    num_graphs = count_graphs()
    found = np.concatenate([encoder.encode(batch).matrix for batch in batches])
    assert smallest_cosine(found, expected) >= (0.9999 if device == "cpu" else 0.999)
    assert count_graphs() == num_graphs, "no batch waits for a compiler"
    alone = np.concatenate([encoder.encode(batches[0].part(row, row + 1)).matrix for row in range(7)])
    assert smallest_cosine(alone, found[:7]) >= 0.999


def pack(name: str, device: str, dtype: torch.dtype, kernel: str, **more: Any) -> PackedNetwork:
    transformer = make_transformer(name, **more).to(device, dtype)
    network: Any = SimpleNamespace(transformer=transformer, dense=nn.Sequential(), modes=("mean",))
    is_causal = read_attention_shape(transformer.config).is_causal
    return PackedNetwork(network, kernel, shares_prefixes=is_causal)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("device", "dtype", "kernel", "names"),
    [
        ("cpu", torch.float32, EXACT, (JOINED.name,)),
        pytest.param("cuda", torch.float16, FLASH, (JOINED.name, "compile"), marks=NEEDS_GPU),
    ],
)
def test_every_architecture_takes_all_that_need_no_certain_card(
    device: str, dtype: torch.dtype, kernel: str, names: tuple[str, ...], name: str
) -> None:
    """By their own probe, which raises for what was asked for and differs."""
    packed = pack(name, device, dtype, kernel)
    shape = read_attention_shape(packed.transformer.config)
    choices = [SwitchChoice(one, True, "requested", True) for one in names]
    settled = apply_switches(packed, choices, lambda: compute_probes(packed, shape, 64, torch.device(device)))
    assert all(choice.is_on for choice in settled)
    assert packed.attention == kernel


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_FP8)])
@pytest.mark.parametrize("sizes", [(1, 1024, 1024), (300, 2048, 1024), (4096, 1024, 4096)])
def test_products_in_8_bits_are_those_of_their_restored_numbers(
    device: str, sizes: tuple[int, int, int]
) -> None:
    num_tokens, num_inputs, num_outputs = sizes
    torch.manual_seed(0)
    states, weight = (scale_rows(torch.randn(rows, num_inputs)) for rows in (num_tokens, num_outputs))
    bias = torch.randn(num_outputs).bfloat16()
    expected = multiply_restored(*states, *weight, bias)
    rows, row_scales, columns, column_scales = (part.to(device) for part in (*states, *weight))
    found = multiply_scaled(rows, row_scales, columns, column_scales, bias.to(device))
    torch.testing.assert_close(found.cpu().float(), expected, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [("cpu", torch.float32, EXACT), pytest.param("cuda", torch.bfloat16, FLASH, marks=NEEDS_FP8)],
)
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_a_model_of_large_layers_is_taken_with_products_in_8_bits(
    name: str, device: str, dtype: torch.dtype, kernel: str
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16}
    packed = pack(name, device, dtype, kernel, **sizes)
    for parameter in packed.transformer.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    shape = read_attention_shape(packed.transformer.config)
    choices = [SwitchChoice(one, True, "requested", True) for one in (JOINED.name, "fp8")]
    settled = apply_switches(packed, choices, lambda: compute_probes(packed, shape, 64, torch.device(device)))
    assert all(choice.is_on for choice in settled)
