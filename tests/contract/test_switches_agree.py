"""Each switch, for every architecture in the table of packed attention: the vectors are those without it."""

import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import cosine_similarity

from tests.contract.packed_models import MODELS, make_sequences, make_transformer
from tests.models import DEVICE
from vectormill.domain.errors import ModelError
from vectormill.models.registry import DEFAULT_MODEL, Registry
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.choice import read_attention_shape
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.encoder.switches import SwitchChoice
from worker.model import packed as packed_attention
from worker.model import switching, torch_encoder
from worker.model.joined import JoinedProducts
from worker.model.packed import (
    EXACT,
    PackedNetwork,
    compute_probes,
    find_layers,
    flash_kernel,
    pack_batch,
    packed_states,
)
from worker.model.switching import (
    JOINED,
    STEPS,
    GeluProduct,
    Step,
    apply_switches,
    fuse_gelus,
    multiply_with_gelu,
)

CPU = torch.device("cpu")
CARD = Registry({}).card(DEFAULT_MODEL)


def pack(transformer: Any) -> PackedNetwork:
    network: Any = SimpleNamespace(transformer=transformer, dense=nn.Sequential(), modes=("mean",))
    is_causal = read_attention_shape(transformer.config).is_causal
    return PackedNetwork(network, EXACT, shares_prefixes=is_causal)


def switch_on(packed: PackedNetwork, *names: str) -> tuple[SwitchChoice, ...]:
    shape = read_attention_shape(packed.transformer.config)
    choices = [SwitchChoice(name, True, "requested", True) for name in names]
    return apply_switches(packed, choices, lambda: compute_probes(packed, shape, 64, CPU))


@torch.inference_mode()
def compute_states(packed: PackedNetwork) -> Tensor:
    """[tokens, dim]"""
    batch = pack_batch(Batch.from_ids(make_sequences()), read_attention_shape(packed.transformer.config))
    return packed_states(packed, batch, CPU)


def smallest_cosine(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float(cosine_similarity(a.float(), b.float(), dim=-1).min())


NOT_JOINED = {"modernbert"}  # its layers have one product already


@pytest.mark.parametrize("name", MODELS)
def test_one_product_gives_the_parts_that_three_gave(name: str) -> None:
    packed = pack(make_transformer(name))
    expected = compute_states(packed)
    num_before = count_parameters(packed)
    (choice,) = switch_on(packed, JOINED.name)
    assert choice.is_on
    found = compute_states(packed)
    joined = [module for module in packed.modules() if isinstance(module, JoinedProducts)]
    assert all(len(each.sizes) == 3 for each in joined)
    assert len(joined) == (0 if name in NOT_JOINED else len(find_layers(packed.transformer)))
    assert count_parameters(packed) == num_before, "joined, and not held twice"
    scale = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 1e-6 * max(1.0, scale)


HAS_GELU = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")


@pytest.mark.parametrize("name", HAS_GELU)
def test_gelu_as_a_part_of_its_product_keeps_the_promise_of_fp32(name: str) -> None:
    packed = pack(make_transformer(name))
    expected = compute_states(packed)
    (choice,) = switch_on(packed, "fused_gelu")
    assert choice.is_on
    assert any(isinstance(module, GeluProduct) for module in packed.modules())
    found = compute_states(packed)
    assert not torch.equal(found, expected), "the tanh approximation is another function"
    assert smallest_cosine(found, expected) >= 0.9999


def test_a_gelu_is_undone_and_a_model_of_gates_has_none_to_fuse() -> None:
    packed = pack(make_transformer("bert"))
    expected = compute_states(packed)
    undo = fuse_gelus(packed, lambda: compute_states(packed))
    assert undo is not None
    undo()
    assert torch.equal(compute_states(packed), expected)
    with pytest.raises(ModelError, match="no product is followed by a GELU"):
        switch_on(pack(make_transformer("qwen3")), "fused_gelu")


@torch.inference_mode()
def test_the_operator_of_product_and_gelu_gets_its_arguments_in_the_layout_that_it_takes() -> None:
    """On a processor the operator computes the exact GELU, and is otherwise the one of a GPU."""
    linear = nn.Linear(32, 48)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    found = multiply_with_gelu(states, linear.weight, linear.bias)
    torch.testing.assert_close(found, torch.nn.functional.gelu(linear(states)), rtol=0, atol=1e-6)


def count_parameters(packed: PackedNetwork) -> int:
    """Numbers in different places of memory."""
    places = {parameter.data_ptr(): parameter.numel() for parameter in packed.parameters()}
    return sum(places.values())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 64), (15, 0)])
@pytest.mark.parametrize("is_replaced", [False, True], ids=["own flash", "activated"])
def test_the_direct_call_says_to_the_operator_what_torch_says(
    window: tuple[int, int], is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Word for word, as torch's own custom operator calls it in the version that is installed."""
    import torch.nn.attention.varlen as varlen

    query: Any = torch.randn(10, 4, 8)
    key = value = torch.randn(10, 2, 8)
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    said: list[dict[str, Any]] = []
    schema = torch.ops.aten._flash_attention_forward.default._schema

    def operator(*args: Any, **options: Any) -> tuple[Any, ...]:
        names = [argument.name for argument in schema.arguments]
        defaults = {argument.name: argument.default_value for argument in schema.arguments}
        said.append(defaults | dict(zip(names, args, strict=False)) | options)
        return tuple(torch.zeros(2) for _ in range(5))

    monkeypatch.setattr(
        packed_attention, "current_flash_attention_impl", lambda: "FA3" if is_replaced else None
    )
    monkeypatch.setattr(packed_attention, "flash_operator", operator)
    flash_kernel(query, key, value, bounds, 7, 0.5, window)
    with monkeypatch.context() as patched:
        patched.setattr(torch.ops.aten, "_flash_attention_forward", operator)
        num_splits = 1 if is_replaced else None
        asked = [query, key, value, bounds, bounds, 7, 7, window == (-1, 0), 0.5, list(window)]
        asked += [True, None, None, num_splits]
        wrapped = varlen._varlen_attn._init_fn
        # torch 2.11 and 2.12 have only the first of these arguments.
        wrapped(*asked[: len(inspect.signature(wrapped).parameters)])
    ours, theirs = said
    for name, value_said in theirs.items():
        assert ours[name] is value_said or ours[name] == value_said, name


def test_an_operator_without_splits_is_called_without_them_and_no_other_flash_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.11 and 2.12, where FlashAttention 3 may split a sequence as its neighbours suggest."""
    said: list[dict[str, Any]] = []

    def operator(*_: Any, **options: Any) -> tuple[Tensor, ...]:
        said.append(options)
        return (torch.zeros(2),)

    monkeypatch.setattr(packed_attention, "flash_operator", operator)
    for module in (packed_attention, switching):
        monkeypatch.setattr(module, "CAN_LIMIT_SPLITS", False)
    key = torch.randn(10, 2, 8)
    flash_kernel(key, key, key, torch.tensor([0, 3, 10], dtype=torch.int32), 7, 0.5, (-1, -1))
    assert "num_splits" not in said[0]
    with pytest.raises(ValueError, match="cannot forbid it to split sequences"):
        STEPS["flash3"].turn_on(pack(make_transformer("bert")), list)


def load(directory: Path, switches: str, precision: str = "fp32") -> Encoder:
    order = EncoderOrder(CARD, DEVICE, "torch", precision, 1, directory, "packed", switches=switches)
    return load_encoder(order)


def test_a_model_that_is_loaded_with_a_switch_reports_it_and_not_what_is_always_done(tmp_path: Path) -> None:
    report = load(tmp_path, "fused_gelu").describe()
    assert (report.switches, report.notes) == (("fused_gelu",), ())
    assert load(tmp_path, "fused_qkv, direct_flash").describe().switches == ()
    encoder = load(tmp_path, "auto")
    assert encoder.describe().switches == ()
    assert any(isinstance(module, JoinedProducts) for module in encoder._network.modules())  # type: ignore[attr-defined]


def test_a_switch_that_fails_and_cannot_be_undone_costs_another_load_and_no_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by auto, on a card where it was measured to pay: the model is loaded again, as it was."""

    def spoil(network: PackedNetwork, _: object) -> None:
        for parameter in network.transformer.parameters():
            parameter.data.neg_()

    loads: list[str] = []
    load_network = torch_encoder.load_network

    def count(*args: Any) -> Any:
        loads.append("")
        return load_network(*args)

    expected = encode(load(tmp_path, "none"))
    choices = tuple(SwitchChoice(name, True, "measured", False) for name in ("fused_gelu", "fp8"))
    monkeypatch.setattr(torch_encoder, "choose_switches", lambda *_: choices)
    monkeypatch.setattr(torch_encoder, "load_network", count)
    steps = {**STEPS, "fp8": Step(spoil, 0.99, is_final=True)}
    monkeypatch.setattr(torch_encoder, "apply_switches", partial(apply_switches, steps=steps))
    encoder = load(tmp_path, "auto")
    report = encoder.describe()
    assert len(loads) == 2
    assert report.switches == ("fused_gelu",)
    assert [note for note in report.notes if note.startswith("The switch fp8 is off because")]
    assert cosines(encode(encoder), expected).min() >= 0.9999


def encode(encoder: Encoder) -> NDArray[np.float32]:
    ids = [
        np.random.default_rng(length).integers(999, 9999, length).astype(np.int32) for length in (3, 40, 9)
    ]
    vectors: NDArray[np.float32] = encoder.encode(Batch.from_ids(ids)).matrix
    return vectors


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_packaged_model_gives_its_vectors_with_joined_products(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load(tmp_path, "none", precision)
    monkeypatch.setattr(torch_encoder, "JOINED", JOINED.refuse("it is compared"))
    expected = encode(load(tmp_path, "none", precision))
    # A product of other sizes may add in another order; in bf16, which int8 is restored to where there is bf16, more.
    assert cosines(encode(encoder), expected).min() >= (0.999999 if precision == "fp32" else 0.9999)


def cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    products: NDArray[np.float32] = (
        (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    )
    return products


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 64)])
def test_attention_is_one_call_of_torchs_operator_whatever_the_lengths(window: tuple[int, int]) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
        return flash_kernel(query, key, value, bounds, 50, None, window)

    with FakeTensorMode(shape_env=ShapeEnv()):
        query = torch.empty(130, 4, 64, dtype=torch.bfloat16, device="cuda")
        key = torch.empty(130, 2, 64, dtype=torch.bfloat16, device="cuda")
        bounds = torch.empty(6, dtype=torch.int32, device="cuda")
    traced: Any = make_fx(attend, tracing_mode="symbolic")(query, key, key, bounds)
    calls = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert [name for name in calls if "attention" in name] == ["aten._flash_attention_forward.default"]
    (output,) = (node.args[0].meta["val"] for node in traced.graph.nodes if node.op == "output")
    assert output.shape == query.shape
    assert output.device.type == "cuda"
