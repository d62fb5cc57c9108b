"""DeBERTa-v2 whose relative positions come with the tokens, as torch modules named as the weights are. Knows no files.

A token of a text of L tokens takes 4 L bytes for a matrix of bias or scores, for each attention head at work; as many
heads are at work as `BIAS_BYTES` holds, and at least one. For all heads and layers together it takes 9 L bytes: the
number of a relative embedding and one truth value for each token of its sequence.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, relu, scaled_dot_product_attention, silu, tanh

from worker.placement.sizes.footprint import BIAS_BYTES, BIAS_MATRICES
from worker.tasks.extract.model.switches import Switches

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
    def __init__(self, switches: Switches) -> None:
        super().__init__()
        size = switches.embedding_size
        self.word_embeddings = nn.Embedding(switches.vocab_size, size)
        self.position_embeddings = (
            nn.Embedding(switches.max_position_embeddings, size) if switches.position_biased_input else None
        )
        self.token_type_embeddings = (
            nn.Embedding(switches.type_vocab_size, size) if switches.type_vocab_size > 0 else None
        )
        is_projected = size != switches.hidden_size
        self.embed_proj = nn.Linear(size, switches.hidden_size, bias=False) if is_projected else None
        self.LayerNorm = nn.LayerNorm(switches.hidden_size, switches.layer_norm_eps)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed inputs [n, length] each as [n, length, hidden]."""
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
    """Scores of contents, of contents to positions and of positions to contents, as He et al. 2021 (DeBERTa)."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        size = switches.hidden_size
        self.num_heads, self.scale = switches.num_attention_heads, switches.score_scale
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(size, size) for _ in range(3))
        self.shares_projections, self.terms = switches.share_att_key, switches.position_terms
        if not self.shares_projections:
            if "c2p" in self.terms:
                self.pos_key_proj = nn.Linear(size, size)
            if "p2c" in self.terms:
                self.pos_query_proj = nn.Linear(size, size)
        # [heads, 2 * span, head size] of the relative embeddings, times the scale; the same for every batch.
        self.position_keys: Tensor | None = None
        self.position_queries: Tensor | None = None

    def project_positions(self, relative: Tensor, whole: Callable[[Tensor], Tensor]) -> None:
        """Project the relative embeddings [2 * span, hidden] once for all batches. `whole` is that of Encoder."""

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
        """Attend over [n, length, hidden]. `index` and `is_hidden` are those of Encoder.forward."""
        query, key, value = (self._split(proj(states)) for proj in self._projections())
        num_sequences, length = states.shape[:2]
        # Three matrices of a head: the bias, what is added to it, and what both are gathered from, twice as wide.
        bytes_a_head = BIAS_MATRICES * num_sequences * length * length * states.element_size()
        at_once = max(1, min(self.num_heads, BIAS_BYTES // bytes_a_head))
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
        """Return the bias [n, heads, length, length]: Q_i · PK[c_ij] + K_j · PQ[c_ij], scaled."""
        shape = (query.shape[1], -1, -1, -1)
        bias: Tensor | None = None
        if self.position_keys is not None:
            scores = _score_positions(query, self.position_keys[heads, columns])
            bias = scores.gather(-1, index[None].expand(shape))
        if self.position_queries is not None:
            scores = _score_positions(key, self.position_queries[heads, columns])
            # Row j of what is gathered is the key's, so that the index is turned on its side, and so is the result.
            found = scores.gather(-1, index.transpose(-1, -2)[None].expand(shape)).transpose(-1, -2)
            bias = found if bias is None else bias.add_(found)
        if bias is None:
            return query.new_zeros(*query.shape[:3], query.shape[2])
        return bias.transpose(0, 1)

    def _projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.query_proj, self.key_proj, self.value_proj

    def _split(self, states: Tensor) -> Tensor:
        """Return [n, length, hidden] as [n, heads, length, head size]."""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _score_positions(states: Tensor, positions: Tensor) -> Tensor:
    """Multiply [n, heads, length, size] and [heads, columns, size] into [heads, n, length, columns].

    One product a head, of all sequences: the positions are the same for each, and are not copied for it.
    """
    heads, columns, size = positions.shape
    rows = states.transpose(0, 1).reshape(heads, -1, size)
    return (rows @ positions.transpose(-1, -2)).view(heads, *states.shape[0:1], -1, columns)


class Residual(nn.Module):
    """A linear layer whose result is added to what came in, and normed."""

    def __init__(self, in_features: int, switches: Switches) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, switches.hidden_size)
        self.LayerNorm = nn.LayerNorm(switches.hidden_size, switches.layer_norm_eps)

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dense(states) + before)
        return normed


class Layer(nn.Module):
    def __init__(self, switches: Switches) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(switches), "output": Residual(switches.hidden_size, switches)}
        )
        self.intermediate = nn.ModuleDict(
            {"dense": nn.Linear(switches.hidden_size, switches.intermediate_size)}
        )
        self.output = Residual(switches.intermediate_size, switches)
        self.activation = ACTIVATIONS[switches.hidden_act]

    def forward(self, states: Tensor, index: Tensor, columns: slice, is_hidden: Tensor) -> Tensor:
        attended = self.attention["self"](states, index, columns, is_hidden)
        attended = self.attention["output"](attended, states)
        widened = self.activation(self.intermediate["dense"](attended))
        output: Tensor = self.output(widened, attended)
        return output


class Convolution(nn.Module):
    """Adds to the first layer what a convolution of the embeddings finds in each token's neighbours."""

    def __init__(self, switches: Switches) -> None:
        super().__init__()
        size, kernel = switches.hidden_size, switches.conv_kernel_size
        self.conv = nn.Conv1d(size, size, kernel, padding=(kernel - 1) // 2, groups=switches.conv_groups)
        self.LayerNorm = nn.LayerNorm(size, switches.layer_norm_eps)
        self.activation = ACTIVATIONS[switches.conv_act]

    def forward(self, embedded: Tensor, states: Tensor, is_token: Tensor) -> Tensor:
        """Convolve [n, length, hidden]; `is_token` is [n, length, 1].

        Padding goes in as zeros, as beyond the ends of a sequence: the reference lets the last token see it, so that
        its numbers depend on the batch; these are its numbers for batches of one.
        """
        found = self.conv((embedded * is_token).transpose(1, 2)).transpose(1, 2) * is_token
        normed: Tensor = self.LayerNorm(states + self.activation(found))
        return normed * is_token


class DebertaEncoder(nn.Module):
    def __init__(self, switches: Switches) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(switches) for _ in range(switches.num_hidden_layers))
        self.rel_embeddings = nn.Embedding(2 * switches.span, switches.hidden_size)
        if switches.norm_rel_ebd:
            self.LayerNorm = nn.LayerNorm(switches.hidden_size, switches.layer_norm_eps)
        self.conv = Convolution(switches) if switches.conv_kernel_size > 0 else None

    def project_positions(self, whole: Callable[[Tensor], Tensor]) -> None:
        """Project the positions of every layer. `whole` makes a parameter of the part that is here."""
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
        """Return hidden states [n, length, hidden]. `index` [n, length, length] numbers the relative embedding of each
        two tokens among `columns`, `is_hidden` [n, length, length] says which do not see which, `is_token` is [n,
        length, 1].
        """
        states = embedded
        for number, layer in enumerate(self.layer):
            states = layer(states, index, columns, is_hidden)
            if number == 0 and self.conv is not None:
                states = self.conv(embedded, states, is_token)
        return states
