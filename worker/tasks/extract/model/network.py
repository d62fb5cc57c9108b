"""RexUniNLU's DeBERTa-v2 with its rotary head, loaded from the published weights.

The published model changes DeBERTa's positions: position ids are an input and restart in every path and every
type of a hint, so relative positions differ from sequence to sequence. Modules are named as the weights are.

The encoder may compute in 16 bits; the head computes in fp32.

For each attention head that is computed at a time, a token of a text of L tokens takes L values for each
matrix of bias or scores; as many heads are computed at a time as `bias_bytes` allows, and at least one. For
all heads and layers together a token takes 9 L bytes: for each token of its sequence the number of a relative
embedding (int64) and a bool. On a GPU it takes 5 L, because torch reads int32 there; on a CPU it would copy them.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, relu, scaled_dot_product_attention, silu, tanh

from vectormill.domain.errors import ModelError
from vectormill.domain.schema import MAX_WINDOW_TOKENS
from vectormill.models.tensor_headers import read_header
from vectormill.models.weights import find_weights
from worker.model.weights import open_weights
from worker.placement.footprint import BIAS_BYTES, BIAS_PAIR_BYTES
from worker.tasks.extract.model.config import DebertaConfig, read_config, tabulate_distances

ACTIVATIONS: Final[Mapping[str, Any]] = {
    "gelu": gelu,
    "gelu_new": lambda states: gelu(states, approximate="tanh"),
    "gelu_python": gelu,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": tanh,
    "linear": lambda states: states,
}


class Embeddings(nn.Module):
    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size = config.embedding_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = (
            nn.Embedding(config.max_position_embeddings, size) if config.position_biased_input else None
        )
        self.token_type_embeddings = (
            nn.Embedding(config.type_vocab_size, size) if config.type_vocab_size > 0 else None
        )
        is_projected = size != config.hidden_size
        self.embed_proj = nn.Linear(size, config.hidden_size, bias=False) if is_projected else None
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the embeddings [n, length, hidden] of inputs [n, length]."""
        states = self.word_embeddings(input_ids)
        if self.position_embeddings is not None:
            states = states + self.position_embeddings(position_ids)
        if self.token_type_embeddings is not None:
            states = states + self.token_type_embeddings(token_type_ids)
        if self.embed_proj is not None:
            states = self.embed_proj(states)
        normed: Tensor = self.LayerNorm(states)
        return normed


class SelfAttention(nn.Module):
    """Disentangled attention: content to content, content to position and position to content scores.

    Source: He et al., DeBERTa (2021).
    """

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.scale = config.num_attention_heads, config.score_scale
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(size, size) for _ in range(3))
        self.shares_projections, self.terms = config.share_att_key, config.position_terms
        self.bias_bytes = BIAS_BYTES
        if not self.shares_projections:
            if "c2p" in self.terms:
                self.pos_key_proj = nn.Linear(size, size)
            if "p2c" in self.terms:
                self.pos_query_proj = nn.Linear(size, size)
        # [heads, 2 * span, head size]: the scaled projections of the relative embeddings, shared by all
        # batches.
        self.position_keys: Tensor | None = None
        self.position_queries: Tensor | None = None

    def project_positions(self, relative: Tensor, whole: Callable[[Tensor], Tensor]) -> None:
        """Project the relative embeddings [2 * span, hidden] once for all batches.

        `whole` is that of DebertaEncoder.project_positions.
        """

        def project(proj: nn.Linear) -> Tensor:
            projected = linear(relative, whole(proj.weight), whole(proj.bias))
            return self._split(projected[None])[0] * self.scale

        if "c2p" in self.terms:
            self.position_keys = project(self.key_proj if self.shares_projections else self.pos_key_proj)
        if "p2c" in self.terms:
            self.position_queries = project(
                self.query_proj if self.shares_projections else self.pos_query_proj
            )

    def forward(self, states: Tensor, index: Tensor, columns: slice, is_hidden: Tensor) -> Tensor:
        """Attend over states [n, length, hidden].

        `index`, `columns` and `is_hidden` are those of Encoder.forward.
        """
        projections = (self.query_proj, self.key_proj, self.value_proj)
        query, key, value = (self._split(proj(states)) for proj in projections)
        num_sequences, length = states.shape[:2]
        bytes_a_head = BIAS_PAIR_BYTES[states.element_size()] * num_sequences * length * length
        at_once = max(1, min(self.num_heads, self.bias_bytes // bytes_a_head))
        parts = []
        for first in range(0, self.num_heads, at_once):
            heads = slice(first, first + at_once)
            bias = self._find_bias(query[:, heads], key[:, heads], index, columns, heads)
            bias.masked_fill_(is_hidden[:, None], torch.finfo(bias.dtype).min)
            parts.append(
                scaled_dot_product_attention(
                    query[:, heads], key[:, heads], value[:, heads], attn_mask=bias, scale=self.scale
                )
            )
        return torch.cat(parts, dim=1).transpose(1, 2).flatten(2)

    def _find_bias(self, query: Tensor, key: Tensor, index: Tensor, columns: slice, heads: slice) -> Tensor:
        """Return the scaled bias [n, heads, length, length]: Q_i · PK[c_ij] + K_j · PQ[c_ij]."""
        shape = (query.shape[1], -1, -1, -1)
        bias: Tensor | None = None
        if self.position_keys is not None:
            picked = index[None].expand(shape)
            bias = _score_positions(query, self.position_keys[heads, columns]).gather(-1, picked)
        if self.position_queries is not None:
            # Row j of the gathered matrix belongs to key j, so the index is transposed, and so is the result.
            picked = index.transpose(-1, -2)[None].expand(shape)
            found = _score_positions(key, self.position_queries[heads, columns]).gather(-1, picked)
            found = found.transpose(-1, -2)
            bias = found if bias is None else bias.add_(found)
        if bias is None:
            return query.new_zeros(*query.shape[:3], query.shape[2])
        return bias.transpose(0, 1)

    def _split(self, states: Tensor) -> Tensor:
        """Reshape [n, length, hidden] to [n, heads, length, head size]."""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _score_positions(states: Tensor, positions: Tensor) -> Tensor:
    """Multiply [n, heads, length, size] by [heads, columns, size] into [heads, n, length, columns].

    One product per head covers all sequences: they share the positions, which are therefore not copied.
    """
    heads, columns, size = positions.shape
    rows = states.transpose(0, 1).reshape(heads, -1, size)
    return (rows @ positions.transpose(-1, -2)).view(heads, *states.shape[0:1], -1, columns)


class Residual(nn.Module):
    """A linear layer with a residual connection and layer normalization."""

    def __init__(self, in_features: int, config: DebertaConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(states) + before)
        return normed


class Layer(nn.Module):
    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": Residual(config.hidden_size, config)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = Residual(config.intermediate_size, config)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, states: Tensor, index: Tensor, columns: slice, is_hidden: Tensor) -> Tensor:
        attended = self.attention["self"](states, index, columns, is_hidden)
        attended = self.attention["output"](attended, states)
        widened = self.activation(self.intermediate["dense"](attended))
        output: Tensor = self.output(widened, attended)
        return output


class Convolution(nn.Module):
    """A convolution over the embeddings of neighbouring tokens, whose result is added to the first layer."""

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size, kernel = config.hidden_size, config.conv_kernel_size
        self.conv = nn.Conv1d(size, size, kernel, padding=(kernel - 1) // 2, groups=config.conv_groups)
        self.LayerNorm = nn.LayerNorm(size, config.layer_norm_eps)
        self.activation = ACTIVATIONS[config.conv_act]

    def forward(self, embedded: Tensor, states: Tensor, is_token: Tensor) -> Tensor:
        """Convolve [n, length, hidden]; `is_token` is [n, length, 1].

        Padding is read as zeros, like the positions beyond a sequence's ends. In the reference the last token
        sees the padding, so its results depend on the batch; these equal the reference's results for batches
        of one.
        """
        found = self.conv((embedded * is_token).transpose(1, 2)).transpose(1, 2) * is_token
        normed: Tensor = self.LayerNorm(states + self.activation(found))
        return normed * is_token


class DebertaEncoder(nn.Module):
    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.rel_embeddings = nn.Embedding(2 * config.span, config.hidden_size)
        if config.norm_rel_ebd:
            self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.conv = Convolution(config) if config.conv_kernel_size > 0 else None

    def project_positions(self, whole: Callable[[Tensor], Tensor]) -> None:
        """Project the relative embeddings for every layer.

        `whole` returns the full parameter where this process holds only a part of it.
        """
        relative = whole(self.rel_embeddings.weight)
        if hasattr(self, "LayerNorm"):
            norm = self.LayerNorm
            relative = layer_norm(
                relative, norm.normalized_shape, whole(norm.weight), whole(norm.bias), norm.eps
            )
        for layer in self.layer:
            layer.attention["self"].project_positions(relative, whole)

    def forward(
        self, embedded: Tensor, index: Tensor, columns: slice, is_hidden: Tensor, is_token: Tensor
    ) -> Tensor:
        """Return hidden states [n, length, hidden].

        `index` [n, length, length] holds for each pair of tokens the number of its relative embedding within
        `columns`; `is_hidden` [n, length, length] is True for pairs that do not attend to each other;
        `is_token` is [n, length, 1].
        """
        states = embedded
        for number, layer in enumerate(self.layer):
            states = layer(states, index, columns, is_hidden)
            if number == 0 and self.conv is not None:
                states = self.conv(embedded, states, is_token)
        return states


# Older versions of transformers wrote this buffer (0, 1, 2, …), which nothing reads.
IGNORED_KEYS: Final = frozenset({"plm.embeddings.position_ids"})


class RotaryFrequencies(nn.Module):
    """The rotation angles per position, [hidden / 2], as stored in the weights."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(torch.empty(hidden_size // 2), requires_grad=False)


class RexNetwork(nn.Module):
    """The whole network: padded inputs [n, length] to logits [n, length, length] in fp32.

    The logits of padding are meaningless.
    """

    def __init__(self, config: DebertaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.plm = nn.ModuleDict({"embeddings": Embeddings(config), "encoder": DebertaEncoder(config)})
        self.ffnq, self.ffnk = nn.Linear(size, size), nn.Linear(size, size)
        self.rotary_emb = RotaryFrequencies(size)
        self._numbers = tabulate_distances(config, MAX_WINDOW_TOKENS)
        self._table: Tensor | None = None  # the same table, on the device
        self.eval()

    def prepare(
        self,
        device: torch.device,
        whole: Callable[[Tensor], Tensor] = lambda part: part,
        bias_bytes: int = BIAS_BYTES,
    ) -> None:
        """Compute what all batches share. Call once, after the weights are on their device.

        `whole` returns the full parameter where several devices share the parameters.
        """
        with torch.no_grad():
            self.plm["encoder"].project_positions(whole)
        for layer in self.plm["encoder"].layer:
            layer.attention["self"].bias_bytes = bias_bytes
        index_type = torch.int64 if device.type == "cpu" else torch.int32
        self._table = torch.from_numpy(self._numbers).to(device, index_type)

    def forward(self, **inputs: Any) -> Tensor:
        """Return the logits of (head, tail), (head, type) and (type, tail) cells of the inputs of `encode`.

        A stage without the head returns hidden states instead of logits.
        """
        hidden_states = self.encode(**inputs)
        if not isinstance(self.ffnq, nn.Linear):
            return hidden_states
        query, key = (
            self._rotate(ffn(hidden_states.float()), inputs["position_ids"]) for ffn in (self.ffnq, self.ffnk)
        )
        return query @ key.transpose(-1, -2)

    def encode(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        prefix_blocks: Tensor,
        type_segments: Tensor,
        is_token: Tensor,
        received: Tensor | None = None,
    ) -> Tensor:
        """Return the last hidden states [n, length, hidden]; `is_token` is bool.

        `received` are hidden states [n, length, hidden] that replace the embeddings if an earlier pipeline
        stage has the first layers.
        """
        embedded = received
        if embedded is None:
            embedded = self.plm["embeddings"](input_ids, token_type_ids, position_ids)
        index, columns = self._index_distances(position_ids)
        is_hidden = ~(_see(prefix_blocks) & _see(type_segments) & is_token[:, None, :])
        states: Tensor = self.plm["encoder"](embedded, index, columns, is_hidden, is_token[:, :, None])
        return states

    def _index_distances(self, position_ids: Tensor) -> tuple[Tensor, slice]:
        """Return the relative embedding number of each token pair, and the slice that these fall into."""
        assert self._table is not None, "prepare() comes first"
        middle = len(self._numbers) // 2
        # An upper bound on the distances between positions. On a GPU this is the number of tokens, because a look-up
        # would make the host wait. On a CPU the positions are read: they restart in every type, so a prompt of many
        # types has only a few dozen.
        is_host = position_ids.device.type == "cpu"
        farthest = min(int(position_ids.max()) if is_host else position_ids.shape[1], middle)
        # The numbers ascend with distance, so the two farthest distances have the first and the last.
        first, last = (int(self._numbers[middle + side * farthest]) for side in (-1, 1))
        distances = position_ids[:, :, None] - position_ids[:, None, :]
        # In int64, with 8 bytes per pair: make no copy that can be avoided.
        distances = distances.clamp_(-farthest, farthest).add_(middle)
        return self._table[distances].sub_(first), slice(first, last + 1)

    def _rotate(self, states: Tensor, position_ids: Tensor) -> Tensor:
        """Rotate each pair of neighbouring values of [n, length, hidden] by its position's angle, in fp32."""
        angles = position_ids[:, :, None].float() * self.rotary_emb.freqs.float()
        cosines, sines = angles.cos(), angles.sin()
        even, odd = states.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cosines - odd * sines, odd * cosines + even * sines), dim=-1).flatten(2)


def load_network(
    directory: Path, dtype: torch.dtype, device: torch.device, bias_bytes: int = BIAS_BYTES
) -> RexNetwork:
    """Load the network from a safetensors file, or else from the tensors in `pytorch_model.bin`.

    Raises ModelError if the configuration has an unknown setting, or if tensors are missing, left over or of
    another shape.
    """
    network = outline_network(directory, read_config(directory), dtype)
    with open_weights(_find_file(directory)) as file:
        network.load_state_dict(
            {
                key: file.get_tensor(key).to(device=device, dtype=outlined.dtype)
                for key, outlined in network.state_dict().items()
            },
            assign=True,
        )
    network.requires_grad_(False)
    network.prepare(device, bias_bytes=bias_bytes)
    return network


def outline_network(directory: Path, config: DebertaConfig, dtype: torch.dtype) -> RexNetwork:
    """Return the network without weights, for comparing names and shapes with the files.

    Raises ModelError.
    """
    with torch.device("meta"):
        network = RexNetwork(config)
    network.to(dtype)
    for part in (network.ffnq, network.ffnk, network.rotary_emb):
        part.float()
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    found = {key: header.shape for key, header in read_header(_find_file(directory)).items()}
    _check_keys(wanted, found, directory)
    network.requires_grad_(False)
    return network


def _see(groups: Tensor) -> Tensor:
    """Return bool [n, length, length]: True within a group, and between group 0 and all other groups."""
    rows, columns = groups[:, :, None], groups[:, None, :]
    return (rows == columns) | (rows == 0) | (columns == 0)


def _find_file(directory: Path) -> Path:
    (path,) = find_weights(directory, directory.name)
    return path


def _check_keys(
    own: Mapping[str, tuple[int, ...]], tensors: Mapping[str, tuple[int, ...]], directory: Path
) -> None:
    missing = sorted(own.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - own.keys() - IGNORED_KEYS)
    reshaped = sorted(key for key in own.keys() & tensors.keys() if own[key] != tensors[key])
    found = {"missing": missing, "unexpected": surplus, "wrong shape": reshaped}
    if any(found.values()):
        lists = (
            f"{what}: {', '.join(keys[:8])}{' …' * (len(keys) > 8)}" for what, keys in found.items() if keys
        )
        raise ModelError(
            f"The weights in {directory} do not match the RexUniNLU in its config.json: {'; '.join(lists)}."
        )
