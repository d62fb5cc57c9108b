"""The families of transformers, a row each: what is known of an architecture without its code. Imports no framework.

What needs torch besides stands in worker/model: the head of a classifier is a row of HEADS
(worker/model/classifiers.py). An architecture without a row is computed padded, on one device, and judges nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from vectormill.domain.errors import ModelError

FROM_ZERO: Final = "from zero"
# RoBERTa counts from its padding token's id + 1, and gives a padding token that a text itself contains no number.
BEHIND_PADDING: Final = "behind the padding id"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a transformer keeps its layers, and along which side each of their matrices may be cut. Paths of modules.

    `columns` and `rows` are within a layer: linear layers that are cut by output, and by input. Between a column
    and the row behind it every rank has its own heads or its own intermediate values, so that one all-reduce at the
    end of each makes them whole (Shoeybi et al., Megatron-LM, 2019, section 3). `joined` are columns that hold
    several matrices one below the other, each of which is cut by itself.

    `after_first_layer` is a module that may be there, and works behind the first layer of the whole model only;
    `behind_layers` are those that work on what comes out of the last one.
    `tensor_obstacle` says why an architecture without columns and rows has none.
    """

    layers: str
    embeddings: str
    behind_layers: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    joined: dict[str, int] = field(default_factory=dict)
    after_first_layer: str | None = None
    tensor_obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, by the `model_type` of a transformers configuration.

    `positions` says how position_ids run within a sequence when sequences are packed one behind the other. It is given
    only where nothing but attention and positions sees more than one token, which was read for each, and is compared
    with plain transformers in tests/contract/test_packed_agrees.py; else `packing_obstacle` may say what is in the way.

    `never_waits` says that no forward pass asks the device anything, packed or padded, so that the next may be
    queued behind it (tests/contract/test_no_waiting.py). In a causal one a token sees none behind it, where padding
    is, unless the configuration says `is_causal: false`. One that `needs_mask` looks for padding, or for the bounds
    of packed sequences, on the device where it is given none. Position embeddings that are `offset` start behind
    the padding id, so that two of them are never used.

    `head_pooling` is the state that a classifier's head reads, by a name of POOLING_NAMES. One without a `layout` was
    never compared, divided with whole, and runs on one device.
    """

    model_type: str
    positions: str = ""
    packing_obstacle: str = ""
    never_waits: bool = True
    is_causal: bool = False
    needs_mask: bool = False
    has_offset: bool = False
    head_pooling: str = ""
    layout: Layout | None = None


_BERT: Final = Layout(
    layers="encoder.layer",
    embeddings="embeddings",
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
    after_first_layer="encoder.conv",
    tensor_obstacle="its attention multiplies the queries and keys of all heads with those of relative positions, "
    "which no rank has whole",
)
_DISENTANGLED: Final = "its disentangled attention adds scores of positions, which the packed kernel cannot"
_RELATIVE: Final = "it adds a relative position bias to the scores, which the packed kernel cannot"
_SPARSE: Final = "its sparse attention is not the kernel's"


def _roberta(model_type: str) -> Family:
    return Family(model_type, BEHIND_PADDING, has_offset=True, head_pooling="cls", layout=_BERT)


def _decoder(model_type: str) -> Family:
    """Return a row with rotary positions, grouped key heads, and windows where the configuration has them."""
    # Read from left to right, so that the last token has seen all.
    return Family(
        model_type, FROM_ZERO, is_causal=True, needs_mask=True, head_pooling="last_token", layout=_DECODER
    )


def _unpackable(model_type: str, obstacle: str, *, has_offset: bool = False) -> Family:
    return Family(model_type, packing_obstacle=obstacle, never_waits=False, has_offset=has_offset)


FAMILIES: Final[Mapping[str, Family]] = {
    family.model_type: family
    for family in (
        Family("albert", FROM_ZERO, head_pooling="cls"),
        Family("bert", FROM_ZERO, head_pooling="cls", layout=_BERT),
        _unpackable("big_bird", _SPARSE),
        _roberta("camembert"),
        _unpackable("data2vec-text", "", has_offset=True),
        # Its scores' scale is read from the device in every layer.
        Family(
            "deberta", packing_obstacle=_DISENTANGLED, never_waits=False, needs_mask=True, head_pooling="cls"
        ),
        # A number for its relative positions is copied from the host.
        Family(
            "deberta-v2",
            packing_obstacle=_DISENTANGLED,
            never_waits=False,
            needs_mask=True,
            head_pooling="cls",
            layout=_DEBERTA,
        ),
        Family("distilbert", FROM_ZERO, head_pooling="cls"),
        Family("electra", FROM_ZERO, head_pooling="cls", layout=_BERT),
        Family("eurobert", FROM_ZERO),
        Family("gte", FROM_ZERO),
        Family("jina_embeddings_v3", FROM_ZERO),
        _decoder("llama"),
        _unpackable("longformer", _SPARSE, has_offset=True),
        _decoder("mistral"),
        # In local windows on most layers. The head reads the first token unless its configuration says mean.
        Family("modernbert", FROM_ZERO, head_pooling="cls", layout=_MODERNBERT),
        Family("mpnet", packing_obstacle=_RELATIVE, has_offset=True),
        _unpackable("mt5", _RELATIVE),
        Family("nomic_bert", FROM_ZERO),
        _decoder("qwen2"),
        _decoder("qwen3"),
        _roberta("roberta"),
        _unpackable("t5", _RELATIVE),
        _unpackable("umt5", _RELATIVE),
        _roberta("xlm-roberta"),
        _unpackable("xlm-roberta-xl", "", has_offset=True),
        _unpackable("xlnet", _RELATIVE),
    )
}
_UNKNOWN: Final = Family("", never_waits=False)


def find_family(model_type: str) -> Family:
    """Return the row of an architecture; one of which nothing is known where it has none."""
    return FAMILIES.get(model_type, _UNKNOWN)


def find_layout(model_type: str) -> Layout:
    """Return the layout of the architecture. Raises ModelError if it was never compared, divided with whole."""
    layout = find_family(model_type).layout
    if layout is None:
        known = ", ".join(family.model_type for family in FAMILIES.values() if family.layout is not None)
        raise ModelError(
            f"A model of the architecture {model_type!r} cannot be shared between devices, only {known}; "
            "use the strategy replicate."
        )
    return layout
