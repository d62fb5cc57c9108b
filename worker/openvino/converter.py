"""Convert a model to openvino's format and compare it with torch.

It imports torch, so it runs in a short-lived process. The converted network takes word embeddings as an
input; their table is in a separate file, from which the rows of a batch are read (word_table.py). A
compressed weight becomes 8-bit constants and the operations that restore it, in the pattern that openvino
documents for compressed weights: the CPU plugin fuses them with the following product and never holds the
restored weight.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder
from openvino.tools.ovc import convert_model
from torch import Tensor, nn

from vectormill.models.rounding import SMALLEST_TABLE_ROWS, RoundedWeight, round_linear, round_table
from worker.encoder.choice import INT8
from worker.encoder.encoder import EncoderOrder
from worker.model.heads import TokenVectors, TokenWeights
from worker.model.network import Dense, EncoderNetwork, check_tokenizer, list_token_inputs
from worker.model.weights import RoundedEmbedding, find_factor, is_compressible_table
from worker.openvino.network import (
    VECTORS,
    WORD_EMBEDDINGS,
    ConversionFailed,
    Layer,
    list_outputs,
    save_heads,
)
from worker.openvino.runtime import openvino as ov
from worker.placement.footprint import COMPRESSED
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

INPUTS: Final = (INPUT_IDS, "attention_mask", "pool_mask", WORD_EMBEDDINGS)
LARGEST_DEVIATION: Final = 1e-3
# The lowest accepted cosine of vectors from compressed weights. Far below what real models reach (0.999 and
# 0.95), it tells a wrong graph (0) from a rounded one.
SMALLEST_COSINES: Final = {INT8: 0.98}
ROWS_AT_ONCE: Final = 4096
# Dense modules after the pooling process one vector per sequence: there is nothing to gain, and no sum
# averages their error.
COMPRESSED_PART: Final = "__module.network.transformer"
Rows = Sequence[NDArray[Any]]
WEIGHT_PLACES: Final = {"MatMul": 1, "Gather": 0}  # the number of the operation's input that is a weight


def convert_network(order: EncoderOrder, precision: str, folder: Path) -> None:
    """Write network.xml, network.bin, words.bin and finally network.json, if the result agrees with torch."""
    check_tokenizer(order.card)  # a cached conversion has been compared
    whole = EncoderNetwork(order.card, torch.float32)
    # The example has another shape than the one that is traced, and padding: this reveals a shape or mask
    # frozen by tracing.
    probe = _make_input(num_sequences=3, length=13)
    example = _make_input(num_sequences=2, length=8)
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            # The tracer warns of each branch on a shape that it would freeze. What matters is checked below.
            warnings.simplefilter("ignore")
            # RoBERTa accepts token_type_ids, but has only one type, so that they change nothing.
            has_types = int(getattr(whole.transformer.config, "type_vocab_size", 0) or 0) > 1
            reads_types = has_types and TOKEN_TYPE_IDS in list_token_inputs(whole.transformer)
            names = (*INPUTS, TOKEN_TYPE_IDS) if reads_types else INPUTS
            types = _make_types(probe[1]) if reads_types else None
            network = EmbeddedNetwork(whole, list_outputs(order.card))
            expected = [each.numpy() for each in network(*probe, network.embed(probe[0]), types)]
            examples = [*example, network.embed(example[0])]
            examples += [] if types is None else [_make_types(example[1])]
            # torch would trace once more to compare, which takes a third of the time; we compare below
            once = {"check_trace": False}
            traced = TorchScriptPythonDecoder(network, example_input=tuple(examples), trace_kwargs=once)
            converted = convert_model(traced, example_input=tuple(examples))
            for port, name in zip(converted.inputs, names, strict=True):
                port.get_tensor().set_names({name})  # the tracer gives some of them numbers as names
            inputs = [tensor.numpy() for tensor in (*probe, network.embed(probe[0]))]
            inputs += [] if types is None else [types.numpy()]
            mask = inputs[1].astype(bool)
            _check_exact(_run(converted, inputs), expected, mask)
            if precision in COMPRESSED:
                if not apply_compression(converted):
                    raise ConversionFailed(f"no weights were found that can be converted to {precision}")
                _check_rounded(_run(converted, inputs), expected, mask, precision)
            dim = network.write_table(folder / "words.bin", precision)
            if whole.heads:
                save_heads(folder, {name: _list_layers(head) for name, head in whole.heads.items()})
        ov.save_model(converted, folder / "network.xml", compress_to_fp16=False)
    except ConversionFailed:
        raise
    except (
        Exception
    ) as error:  # torch's tracer and openvino may raise anything; torch itself can still run the model
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ConversionFailed(reason) from error
    facts = {"pad_token_id": whole.pad_token_id, "word_embedding_dim": dim, "inputs": names}
    (folder / "network.json").write_text(json.dumps(facts))


def _run(converted: Any, inputs: list[NDArray[Any]]) -> list[NDArray[np.float32]]:
    exactly = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    found = ov.Core().compile_model(converted, "CPU", exactly)(inputs)
    return [found[place] for place in range(len(converted.outputs))]


def _pair(
    found: Rows, expected: Rows, mask: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield each output and what torch computes, without the hidden states of padding."""
    for one, other in zip(found, expected, strict=True):
        yield (one, other) if one.ndim == 2 else (one[mask], other[mask])


def _check_exact(found: Rows, expected: Rows, mask: NDArray[np.bool_]) -> None:
    for one, other in _pair(found, expected, mask):
        deviation = float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6))
        if not deviation < LARGEST_DEVIATION:
            raise ConversionFailed(f"the converted network deviates from torch by {deviation:.1e}")


def _check_rounded(found: Rows, expected: Rows, mask: NDArray[np.bool_], precision: str) -> None:
    for one, other in _pair(found, expected, mask):
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
        cosine = float(((one * other).sum(axis=1) / np.maximum(lengths, 1e-12)).min())
        if not cosine >= SMALLEST_COSINES[precision]:
            raise ConversionFailed(f"{precision} weights change its vectors too much (cosine {cosine:.2f})")


def _list_layers(head: nn.Module) -> list[Layer]:
    """Return the weights and biases of a head's linear layers. Raise ConversionFailed if it has other layers."""
    if not isinstance(head, TokenWeights | TokenVectors):
        raise ConversionFailed("only torch computes the weights of words (SPLADE)")
    inner = head.linear if isinstance(head, TokenWeights) else head.layers
    listed = []
    for layer in inner if isinstance(inner, nn.Sequential) else (inner,):
        linear = layer.linear if isinstance(layer, Dense) and layer.is_linear else layer
        if not isinstance(linear, nn.Linear):
            raise ConversionFailed(
                "its vectors of tokens need more than linear layers, which only torch computes"
            )
        bias = torch.zeros(linear.out_features) if linear.bias is None else linear.bias
        listed.append((linear.weight.float().numpy(), bias.float().numpy()))
    return listed


def _make_input(num_sequences: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, attention mask and pooling mask of sequences of different lengths.

    Only the first sequence has no padding.
    """
    lengths = torch.arange(length, length - num_sequences, -1).unsqueeze(1)
    mask = (torch.arange(length) < lengths).long()
    return torch.arange(5, 5 + length) * mask, mask, mask.clone()


def _make_types(mask: Tensor) -> Tensor:
    """Return token types as for pairs: the second half of each row is type 1."""
    is_second = mask.cumsum(dim=1) > mask.sum(dim=1, keepdim=True) // 2
    return is_second.long() * mask


def apply_compression(model: Any) -> int:
    """Compress the linear layers and large tables of an openvino model. Return the number of weights."""
    num_weights = 0
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind not in WEIGHT_PLACES or not node.get_friendly_name().startswith(COMPRESSED_PART):
            continue
        place = WEIGHT_PLACES[kind]
        constant = node.input_value(place).get_node()
        is_table = constant.get_type_name() == "Constant" and len(constant.shape) == 2
        if not is_table or constant.get_element_type() != ov.Type.f32:
            continue
        weight: NDArray[np.float32] = constant.data
        if kind == "MatMul" and node.get_attributes()["transpose_b"]:  # as torch exports linear layers
            rounded = round_linear(weight)
        elif kind == "Gather" and len(weight) >= SMALLEST_TABLE_ROWS:
            rounded = round_table(weight)
        else:
            continue
        node.input(place).replace_source_output(_restore(rounded, weight.shape).output(0))
        num_weights += 1
    model.validate_nodes_and_infer_types()
    return num_weights


def _restore(rounded: RoundedWeight, shape: tuple[int, ...]) -> Any:
    """Return openvino operations that restore a weight of this shape."""
    whole = ov.opset13.convert(ov.opset13.constant(rounded.numbers), "f32")
    restored = ov.opset13.multiply(whole, ov.opset13.constant(rounded.scales))
    return ov.opset13.reshape(restored, np.array(shape, np.int64), special_zero=False)


class EmbeddedNetwork(nn.Module):
    """A network with one more input: the word embeddings [n, length, dim] of the ids.

    It returns `outputs`, named as by `list_outputs`.

    The ids remain an input, because some architectures compute positions from them. From now on the wrapped
    network can be used only through this one.
    """

    def __init__(self, network: EncoderNetwork, outputs: Sequence[str] = (VECTORS,)) -> None:
        super().__init__()
        self._outputs = outputs
        # Not registered as a submodule, so that a walk over the modules does not find the table.
        self._lookup = (network.transformer.get_input_embeddings(),)
        self._given = GivenEmbeddings()
        network.transformer.set_input_embeddings(self._given)
        self.network = network

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        pool_mask: Tensor,
        word_embeddings: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        self._given.embeddings = word_embeddings
        tokens = {} if token_type_ids is None else {TOKEN_TYPE_IDS: token_type_ids}
        states = self.network.transformer(input_ids=input_ids, attention_mask=attention_mask, **tokens)[0]
        return tuple(
            self.network.pool(states, pool_mask) if name == VECTORS else states for name in self._outputs
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Return the word embeddings [n, length, dim] of ids [n, length].

        They are scaled if the architecture does so.
        """
        embeddings: Tensor = self._lookup[0](input_ids)
        return embeddings

    def write_table(self, path: Path, precision: str) -> int:
        """Write the embedding of each id in fp32, from weights in `precision`. Return the dimension."""
        (lookup,) = self._lookup
        num_rows, dim = lookup.weight.shape
        if precision in COMPRESSED and is_compressible_table(lookup):
            rounded = RoundedEmbedding(lookup.weight.shape, torch.float32, find_factor(lookup))
            rounded.hold(lookup.weight)
            lookup = rounded
        with path.open("wb") as file:
            for ids in torch.arange(num_rows).split(ROWS_AT_ONCE):
                file.write(lookup(ids).numpy().tobytes())
        return int(dim)


class GivenEmbeddings(nn.Module):
    """A module that replaces the word embeddings and returns the embeddings it was given."""

    embeddings: Tensor

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embeddings
