"""A prefix that sequences of a causal model share is computed once, and each token has the states that it has alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from tests.contract.packed_models import MODELS, TOKENIZER, make_transformer
from vectormill.models.layouts import read_model_card
from vectormill.settings import ModelEntry
from worker.batching.batch import Batch
from worker.devices.device import CPU, Device
from worker.encoder.choice import PACKED, read_attention_shape
from worker.encoder.encoder import Choice, EncoderOrder
from worker.model import packed as packed_network
from worker.model.forms import PackedForm
from worker.model.network import list_token_inputs
from worker.model.packed import EXACT, register_packed_attention
from worker.model.prefixes import find_shared_prefixes
from worker.model.torch_encoder import TorchEncoder

DEVICE = Device("cpu:0", CPU, 0, (), 1, 1 << 30)
CAUSAL = [name for name in MODELS if read_attention_shape(make_transformer(name).config).is_causal]
Sequences = list[NDArray[np.int32]]


def make_pairs(num_documents: int, prefix: int = 20) -> Sequences:
    """Return pairs as a reranker reads them: instruction and query first, then one of the documents, then the end."""
    tokens = np.random.default_rng(prefix)
    first, last = tokens.integers(4, 300, prefix), tokens.integers(4, 300, 3)
    documents = [tokens.integers(4, 300, 2 + number) for number in range(num_documents)]
    return [np.concatenate((first, document, last)).astype(np.int32) for document in documents]


@torch.inference_mode()
def compute_packed(
    transformer: Any, sequences: Sequences, *, shares_prefixes: bool
) -> tuple[Tensor, list[int]]:
    """Return the states [tokens, dim], and of how many rows each layer computed its feed-forward block."""
    register_packed_attention()
    transformer.set_attn_implementation(EXACT)
    shape, token_inputs = read_attention_shape(transformer.config), list_token_inputs(transformer)
    form = PackedForm(transformer, token_inputs, ("mean",), shape, EXACT, shares_prefixes)
    part = form.lay_out(Batch.from_ids(sequences))
    num_rows: list[int] = []
    hooks = [
        layer.mlp.register_forward_hook(lambda _module, inputs, _output: num_rows.append(inputs[0].shape[1]))
        for layer in transformer.layers
    ]
    states = form.run(part, {name: torch.from_numpy(array) for name, array in part.arrays.items()}, None)
    for hook in hooks:
        hook.remove()
    return states, num_rows


@torch.inference_mode()
def compute_alone(transformer: Any, sequences: Sequences) -> Tensor:
    transformer.set_attn_implementation("sdpa")
    ids = [torch.from_numpy(sequence.astype(np.int64))[None] for sequence in sequences]
    return torch.cat([transformer(one, attention_mask=torch.ones_like(one))[0][0] for one in ids])


def smallest_cosine(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float(cosine_similarity(one, other, dim=-1).min())


def test_decoders_are_causal_and_others_are_not() -> None:
    decoders = [
        "gemma",
        "gemma3_text",
        "llama",
        "mistral",
        "mistral, window",
        "qwen2",
        "qwen3",
        "qwen3, window",
    ]
    assert decoders == CAUSAL


@pytest.mark.parametrize("name", CAUSAL)
def test_pairs_with_one_query_have_the_states_of_each_alone(name: str) -> None:
    transformer, pairs = make_transformer(name), make_pairs(6)
    found, num_rows = compute_packed(transformer, pairs, shares_prefixes=True)
    unshared, all_rows = compute_packed(transformer, pairs, shares_prefixes=False)
    num_tokens = sum(map(len, pairs))
    assert (set(num_rows), set(all_rows)) == ({num_tokens - 5 * 20}, {num_tokens})
    assert smallest_cosine(found, unshared) >= 0.99999
    assert smallest_cosine(found, compute_alone(transformer, pairs)) >= 0.99999


QWEN3 = make_transformer("qwen3, window")
DRAWN = st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(DRAWN)
def test_any_tree_of_prefixes_has_the_states_of_each_sequence_alone(drawn: list[list[int]]) -> None:
    sequences = [np.array(sequence, np.int32) for sequence in drawn]
    found, _ = compute_packed(QWEN3, sequences, shares_prefixes=True)
    assert smallest_cosine(found, compute_alone(QWEN3, sequences)) >= 0.99999


@pytest.mark.parametrize("name", ["qwen3", "qwen3, both ways", "bert"])
@pytest.mark.parametrize("case", ["usual", "reproducible", "faulty", "failing"])
def test_an_encoder_shares_where_it_may_and_gives_the_vector_of_each_text_alone(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_wrongly(*given: Any) -> Any:
        if case == "failing":
            raise ValueError("there are no prefixes")
        found = find_shared_prefixes(*given)
        return {key: rows[::-1].copy() for key, rows in found.items()}

    if case in ("faulty", "failing"):
        monkeypatch.setattr(packed_network, "find_shared_prefixes", find_wrongly)
    is_reproducible = case == "reproducible"
    make_transformer(name).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    card = read_model_card(name, tmp_path, ModelEntry(path=name, pooling="mean+last_token"))
    order = EncoderOrder(
        card, DEVICE, "torch", "fp32", 1, tmp_path, attention=PACKED, is_reproducible=is_reproducible
    )
    encoder = TorchEncoder(order, Choice("torch", "for tests"), Choice("fp32", "for tests"))
    pairs = make_pairs(6)
    num_rows: list[int] = []
    for module in encoder._network.transformer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: num_rows.append(output.shape[-2]))
            break
    found = encoder.encode(Batch.from_ids(pairs)).matrix
    saved = 5 * 20 if (name, case) == ("qwen3", "usual") else 0
    assert num_rows == [sum(map(len, pairs)) - saved]
    alone = np.concatenate([encoder.encode(Batch.from_ids([pair])).matrix for pair in pairs])
    assert smallest_cosine(torch.from_numpy(found), torch.from_numpy(alone)) >= 0.99999
