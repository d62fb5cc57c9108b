"""Layouts: where a transformer keeps its layers, and along which side each of their matrices may be cut.

A plain model is divided from outside by these names alone. An architecture that is not here runs on one device only.
"""

from dataclasses import dataclass, field
from typing import Final

from vectormill.domain.errors import ModelError


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths of modules. `columns` and `rows` are within a layer: linear layers that are cut by output, and by input.

    Between a column and the row behind it every rank has its own heads or its own intermediate values, so that one
    all-reduce at the end of each makes them whole (Shoeybi et al., Megatron-LM, 2019, section 3). `joined` are columns
    that hold several matrices one below the other, each of which is cut by itself.

    `after_first_layer` is a module that may be there, and works behind the first layer of the whole model only;
    `behind_layers` are those that work on what comes out of the last one.
    `tensor_obstacle` says why an architecture without columns and rows has none.
    """

    layers: str
    embeddings: str
    behind_layers: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    joined: dict[str, int] = field(default_factory=dict)
    after_first_layer: str | None = None
    tensor_obstacle: str = ""


_BERT: Final = Layout(
    layers="encoder.layer",
    embeddings="embeddings",
    behind_layers=(),
    columns=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    rows=("attention.output.dense", "output.dense"),
)
_MODERNBERT: Final = Layout(
    layers="layers",
    embeddings="embeddings",
    behind_layers=("final_norm",),
    columns=("attn.Wqkv", "mlp.Wi"),
    rows=("attn.Wo", "mlp.Wo"),
    joined={"attn.Wqkv": 3, "mlp.Wi": 2},
)
_DECODER: Final = Layout(
    layers="layers",
    embeddings="embed_tokens",
    behind_layers=("norm",),
    columns=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    rows=("self_attn.o_proj", "mlp.down_proj"),
)
# The embeddings of relative positions stand beside the layers, all of which read them: every stage has them whole.
_DEBERTA: Final = Layout(
    layers="encoder.layer",
    embeddings="embeddings",
    behind_layers=(),
    columns=(),
    rows=(),
    after_first_layer="encoder.conv",
    tensor_obstacle="its attention multiplies the queries and keys of all heads with those of relative positions, "
    "which no rank has whole",
)
# model_type of a transformers configuration.
LAYOUTS: Final[dict[str, Layout]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "deberta-v2": _DEBERTA,
    "modernbert": _MODERNBERT,
    "qwen3": _DECODER,
    "qwen2": _DECODER,
    "mistral": _DECODER,
    "llama": _DECODER,
}


def find_layout(model_type: str) -> Layout:
    """Return the layout of the architecture. Raises ModelError if it was never compared, divided with whole."""
    if model_type not in LAYOUTS:
        raise ModelError(
            f"A model of the architecture {model_type!r} cannot be shared between devices, only {', '.join(LAYOUTS)}; "
            "use the strategy replicate."
        )
    return LAYOUTS[model_type]
