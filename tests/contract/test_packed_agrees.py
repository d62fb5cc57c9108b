"""Packed attention gives, for every architecture in the table, what plain transformers gives for one text at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import AttentionInterface

from tests.contract.packed_models import MODELS, make_sequences, make_transformer
from vectormill.domain.errors import ModelError
from vectormill.models.families import FAMILIES
from worker.batching.batch import Batch
from worker.encoder.choice import read_attention_shape
from worker.model import packed as packed_network
from worker.model.packed import (
    EXACT,
    FLASH,
    PackedNetwork,
    PackingFailed,
    compute_probes,
    exact_kernel,
    make_attention,
    make_probes,
    make_reference,
    pack_batch,
    pack_network,
    padded_states,
)
from worker.model.weights import Rounded, apply_quantization

SEQUENCES = make_sequences()
CPU = torch.device("cpu")


def network_of(transformer: Any) -> Any:
    """What PackedNetwork takes of an EncoderNetwork."""
    return SimpleNamespace(
        transformer=transformer,
        dense=nn.Sequential(),
        modes=("mean", "last_token"),
        pad_token_id=1,
        attention=transformer.config._attn_implementation,
    )


@torch.inference_mode()
def alone(transformer: Any) -> Tensor:
    """[tokens, dim]: plain transformers, one text at a time."""
    ids = [torch.from_numpy(sequence.astype(np.int64))[None] for sequence in SEQUENCES]
    return torch.cat([transformer(one, attention_mask=torch.ones_like(one))[0][0] for one in ids])


@torch.inference_mode()
def packed_states(network: PackedNetwork, sequences: list[np.ndarray[Any, Any]]) -> Tensor:
    shape = read_attention_shape(network.transformer.config)
    batch = pack_batch(Batch.from_ids(sequences), shape)
    return network.hidden_states(
        torch.from_numpy(batch.input_ids),
        torch.from_numpy(batch.position_ids),
        torch.from_numpy(batch.cu_seqlens).int(),
        batch.max_seqlen,
    )


def smallest_cosine(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float(cosine_similarity(a, b, dim=-1).min())


@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_what_plain_transformers_makes_of_its_text_alone(name: str) -> None:
    transformer = make_transformer(name)
    expected = alone(transformer)
    # Whose probe finds packing equal to padding.
    shape = read_attention_shape(transformer.config)
    network = pack_network(network_of(transformer), EXACT, shape, max_tokens=64, device=CPU)
    assert network.attention == EXACT
    assert smallest_cosine(packed_states(network, SEQUENCES), expected) >= 0.99999
    one_by_one = torch.cat([packed_states(network, [sequence]) for sequence in SEQUENCES])
    assert smallest_cosine(one_by_one, expected) >= 0.99999
    reversed_company = packed_states(network, SEQUENCES[::-1]).split([len(one) for one in SEQUENCES[::-1]])
    assert smallest_cosine(torch.cat(reversed_company[::-1]), expected) >= 0.99999


def test_every_architecture_of_the_table_is_compared() -> None:
    compared = {make_transformer(name).config.model_type for name in MODELS}
    assert compared == {name for name, family in FAMILIES.items() if family.positions}


@pytest.mark.parametrize(
    "name",
    [
        "mistral, window",
        "bert",
        "modernbert",
        "qwen3",
    ],
)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("one sequence", "deviates"),  # bounds ignored: every text sees every other
        ("wrong direction", "deviates"),
        ("no kernel", "No such kernel"),
        ("not a number", "deviates"),
    ],
)
def test_a_kernel_that_is_wrong_or_missing_is_found_out_and_padding_goes_on(
    name: str, fault: str, reason: str
) -> None:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu: Tensor, n: int, scale: float | None, window: Any
    ) -> Tensor:
        if fault == "no kernel":
            raise RuntimeError("No such kernel")
        if fault == "one sequence":
            cu, n = torch.tensor([0, len(q)]), len(q)
        if fault == "wrong direction":
            window = (-1, -1) if window[1] == 0 else (-1, 0)
        output = exact_kernel(q, k, v, cu, n, scale, window)
        return output * float("nan") if fault == "not a number" else output

    AttentionInterface.register("faulty", make_attention(kernel))
    transformer = make_transformer(name)
    network = network_of(transformer)
    expected = alone(transformer)
    with pytest.raises(PackingFailed, match=reason):
        pack_network(network, "faulty", read_attention_shape(transformer.config), 64, CPU)
    assert torch.equal(alone(transformer), expected)


def round_elsewhere(query: Tensor, key: Tensor, value: Tensor, *over: Any) -> Tensor:
    """Right, but for its rounding: scores and sums are in fp32, as a GPU has them."""
    return exact_kernel(query.float(), key.float(), value.float(), *over).to(query.dtype)


def scale_more(query: Tensor, key: Tensor, value: Tensor, *over: Any) -> Tensor:
    return round_elsewhere(query * 1.1, key, value, *over)


def see_all(query: Tensor, key: Tensor, value: Tensor, *over: Any) -> Tensor:
    return round_elsewhere(query, key, value, *over[:-1], (-1, -1))


def see_less(query: Tensor, key: Tensor, value: Tensor, *over: Any) -> Tensor:
    return round_elsewhere(query, key, value, *over[:-1], (60, 0))


def see_neighbours(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *over: Any) -> Tensor:
    last = int(bounds[-1])
    return round_elsewhere(query, key, value, torch.tensor([0, last]), last, *over[1:])


@pytest.mark.parametrize(
    ("kernel", "is_right"),
    [
        (round_elsewhere, True),
        (scale_more, False),
        (see_all, False),
        (see_less, False),
        (see_neighbours, False),
    ],
)
def test_a_decoder_of_many_layers_may_round_to_other_states_and_not_attend_to_others(
    kernel: Any, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 36 layers turn one rounding into a cosine far below 0.999, as padding has it to fp32, too."""
    monkeypatch.setitem(packed_network.KERNELS, "tried", kernel)
    transformer = make_transformer("qwen3", num_hidden_layers=36).to(torch.bfloat16)
    shape = read_attention_shape(transformer.config)
    network = network_of(transformer)
    if not is_right:
        with pytest.raises(PackingFailed, match="packed attention deviates from padding"):
            pack_network(network, "tried", shape, 80, CPU)
        return
    packed = pack_network(network, "tried", shape, 80, CPU)
    assert packed.attention == "tried"
    probes = make_probes(transformer.config, 80)
    with torch.inference_mode():
        found = compute_probes(packed, shape, 80, CPU)
        padded = padded_states(network_with(transformer, "sdpa"), probes, CPU)
    assert float(cosine_similarity(torch.cat(found).float(), torch.cat(padded).float(), dim=-1).min()) < 0.99
    with monkeypatch.context() as patched:
        patched.setattr(packed_network, "make_reference", lambda *_: None)
        with pytest.raises(PackingFailed, match=r"the smallest cosine is 0\.9"):
            pack_network(network_with(transformer, "sdpa"), "tried", shape, 80, CPU)


def network_with(transformer: Any, attention: str) -> Any:
    transformer.set_attn_implementation(attention)
    return network_of(transformer)


@pytest.mark.parametrize("is_rounded", [False, True], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_is_what_the_same_weights_give_in_fp32(name: str, is_rounded: bool) -> None:
    """The other model is fp32 as a whole, for which a GPU may have no memory."""
    transformer, whole = (make_transformer(name).to(torch.bfloat16) for _ in range(2))
    if is_rounded:
        for each in (transformer, whole):
            apply_quantization(each)
        for module in whole.modules():
            if isinstance(module, Rounded):
                module.dtype = torch.float32
    whole = whole.float()
    before = {name: value.dtype for name, value in transformer.named_parameters()}
    probes = make_probes(transformer.config, 64)
    with torch.inference_mode():
        padded = padded_states(network_of(transformer), probes, CPU)
        expected = padded_states(network_of(whole), probes, CPU)
    reference = make_reference(network_of(transformer), probes, padded, CPU)
    assert reference is not None
    found = torch.cat(list(reference.states))
    assert found.dtype == torch.float32
    # Gemma multiplies what it looks up, which is rounded to 16 bits here.
    smallest = 0.9998 if name.startswith("gemma") else 0.99999
    assert float(cosine_similarity(found, torch.cat(expected), dim=-1).min()) >= smallest
    assert {name: value.dtype for name, value in transformer.named_parameters()} == before
    with torch.inference_mode():
        assert torch.equal(padded_states(network_of(transformer), probes, CPU)[0], padded[0])


@pytest.mark.parametrize(
    ("name", "sizes", "max_tokens", "expected"),
    [
        # Causal models have sequences of a shared prefix besides.
        ("mistral, window", {"sliding_window": 300}, 1000, [150, 225, 322]),
        # The model reads no text that is longer.
        ("mistral, window", {"sliding_window": 300}, 200, [150, 200, 200]),
        ("mistral, window", {"sliding_window": 300}, 64, [64, 64]),
        ("mistral", {}, 1000, [150, 225]),
        ("bert", {}, 1000, [150]),
    ],
)
def test_a_probe_is_longer_than_the_window_of_the_model(
    name: str, sizes: dict[str, int], max_tokens: int, expected: list[int]
) -> None:
    config = make_transformer(name, **sizes).config
    assert [probe.max_length for probe in make_probes(config, max_tokens)] == expected


def test_a_kernel_that_breaks_the_device_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding could not go on in this process, and the next one would try the same kernel again."""
    monkeypatch.setattr(packed_network, "is_device_lost", lambda: True)
    transformer = make_transformer("bert")
    with pytest.raises(ModelError, match=r"broke cuda:99 .*; use padded attention\.$"):
        # Without a GPU the first copy to it fails, which stands for the kernel.
        pack_network(
            network_of(transformer),
            FLASH,
            read_attention_shape(transformer.config),
            64,
            torch.device("cuda", 99),
        )


@pytest.mark.parametrize(
    ("name", "windows", "is_grouped"),
    [
        ("bert", {(-1, -1)}, False),
        ("modernbert", {(-1, -1), (4, 4)}, False),  # local_attention 8: four tokens either way
        ("mistral, window", {(4, 0)}, True),  # a window of 5 counts the token itself
        ("qwen3", {(-1, 0)}, True),
        ("qwen3, window, both ways", {(-1, -1), (5, 5)}, True),
    ],
)
@pytest.mark.parametrize("is_old", [False, True], ids=["torch 2.13", "torch 2.11"])
def test_the_flash_operator_is_called_as_torch_calls_it(
    name: str, windows: set[tuple[int, int]], is_grouped: bool, is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one call that needs a GPU, with its arguments looked at and its result computed by the exact kernel.

    torch 2.11 has no `num_splits`.
    """
    seen: set[tuple[int, int]] = set()

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        dropout: float,
        is_causal: bool,
        returns_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int,
        window_size_right: int,
        **newer: Any,
    ) -> tuple[Tensor, ...]:
        tokens = sum(len(sequence) for sequence in SEQUENCES)
        assert q.shape == (tokens, 4, 8)
        assert k.shape == v.shape == (tokens, 2 if is_grouped else 4, 8)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1  # the kernel takes any other stride
        assert cu_q is cu_k
        assert cu_q.dtype == torch.int32
        assert max_q == max_k == 64
        assert (dropout, returns_mask) == (0.0, False)
        # None is what FlashAttention 2 takes.
        assert newer == ({} if is_old else {"num_splits": None})
        window = (window_size_left, window_size_right)
        assert is_causal == (window == (-1, 0))
        seen.add(window)
        return (exact_kernel(q, k, v, cu_q, max_q, scale, window),)

    monkeypatch.setattr(packed_network, "flash_operator", attend)
    monkeypatch.setattr(packed_network, "CAN_LIMIT_SPLITS", not is_old)
    transformer = make_transformer(name)
    expected = alone(transformer)
    network = PackedNetwork(network_of(transformer), FLASH)
    assert smallest_cosine(packed_states(network, SEQUENCES), expected) >= 0.99999
    assert seen == windows


def test_the_exact_kernel_computes_what_varlen_attn_documents_for_a_window_of_the_whole_sequence() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 8)
    cu = torch.tensor([0, 2, 6], dtype=torch.int32)
    everything = exact_kernel(q, k, v, cu, 4, None, (-1, -1))
    assert torch.allclose(everything, exact_kernel(q, k, v, cu, 4, None, (9, 9)), atol=1e-6)
    by_hand = torch.softmax(q[:2, 0] @ k[:2, 0].T / 8**0.5, dim=-1) @ v[:2, 0]
    assert torch.allclose(everything[:2, 0], by_hand, atol=1e-6)
