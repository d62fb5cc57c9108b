"""The families of transformers, one row each: what is known of an architecture without its code.

What needs torch is in worker/model: the head of a classifier is a row of HEADS (worker/model/heads.py).
An architecture without a row is computed padded, on one device, and cannot be a classifier. Imports no
framework.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from vectormill.domain.errors import ModelError

FROM_ZERO: Final = "from zero"
# RoBERTa counts positions from its padding token's id + 1, and skips padding tokens within a text.
BEHIND_PADDING: Final = "behind the padding id"


@dataclass(frozen=True, slots=True)
class Layout:
    """The module paths of a transformer's layers, and the dimensions along which their matrices may be split.

    `columns` and `rows`, relative to a layer, are the linear layers that are split by output and by input.
    Between a column and the following row every rank has its own heads or its own intermediate values, so
    that a single all-reduce after each row completes them (Shoeybi et al., Megatron-LM, 2019, section 3).
    `joined` are columns that stack several matrices, each of which is split separately, and `key_columns` those
    that make keys and values of fewer heads than there are queries.

    `behind_embeddings` are optional modules between the embeddings and the first layer. `after_first_layer` is
    an optional module that runs only after the model's first layer; `behind_layers` are those that process the
    last layer's output. `tensor_obstacle` says why an architecture has no columns and rows.
    """

    layers: str
    embeddings: str
    behind_layers: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    joined: dict[str, int] = field(default_factory=dict)
    key_columns: tuple[str, ...] = ()
    behind_embeddings: tuple[str, ...] = ()
    after_first_layer: str | None = None
    tensor_obstacle: str = ""


@dataclass(frozen=True, slots=True)
class ScoreMatrices:
    """The matrices of scores that a layer has in memory together where no fused kernel computes them.

    A matrix has one number for each head and each pair of tokens of a sequence, in the type of the hidden states.
    `num_matrices` are alive while attention is computed, of which `num_kept` are kept until the end of the layer;
    `num_shared` more are kept during all layers, once for all sequences (a bias by distance), and `num_in_half` are
    alive in 16 bits besides, since torch multiplies some matrices in fp32. Beside each number of
    the scores there are `index_bytes`. A mask takes `mask_bytes` for each pair of tokens (None: one number), and
    the distances between tokens take `distance_bytes` for each pair of the longest sequence. If it
    `copies_positions`, every sequence has its own projections of the relative positions, and the scores of all of
    these exist before each pair picks its own.
    """

    num_matrices: int = 2
    num_kept: int = 1
    num_shared: int = 0
    num_in_half: int = 0
    index_bytes: int = 0
    mask_bytes: int | None = None
    distance_bytes: int = 0
    copies_positions: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, by the `model_type` of a transformers configuration.

    `positions` says how position_ids count within a packed sequence. It is set only if nothing but attention
    and positions looks at more than one token, which was checked by reading each architecture and is compared
    with plain transformers in tests/contract/test_packed_agrees.py; otherwise `packing_obstacle` may say what
    prevents packing. `openvino_obstacle` says why the architecture cannot be converted for openvino, if it cannot
    (tests/contract/test_encoder_agrees.py).

    `never_waits` means that no forward pass, packed or padded, waits for the device, so that the next may be
    queued (tests/contract/test_no_waiting.py). If `is_causal`, no token attends to later ones, where the
    padding is, unless the configuration says `is_causal: false`. If `needs_mask`, a forward pass without a
    mask would search for padding, or for the bounds of packed sequences, on the device. If `has_offset`,
    position embeddings start after the padding id, so that the table has two unused rows; MPNet's `padding_id` is 1
    whatever its configuration says. If `counts_itself`,
    the window of a layer that looks both ways includes the token itself on either side. If `overflows_fp16`, its hidden
    states exceed 65,504, the largest number of fp16.

    `num_states`, `num_wide` and `num_rotary` are what is alive in the feed-forward block of a layer: hidden states,
    tensors of the intermediate size (0 if the names of the weights tell), and tables of rotary positions. If it
    `keeps_states`, the output of every layer is alive too. `scores` are those of a family that no fused kernel
    computes (worker.placement.footprint). tests/contract/test_footprint_agrees.py measures them, for every family.

    `encoder` is the class of transformers for the encoder alone of an encoder-decoder model, since no vector
    depends on the decoder; it has no table of positions, so that only its tokenizer limits a text. `head_pooling`
    is the hidden state that a classifier's head reads, a name from POOLING_NAMES. `bare` are the architectures of
    checkpoints without modules.json, each with the reason why their mean is pooled. A family without a `layout` was
    never compared in divided form with the whole model, and runs on one device.
    """

    model_type: str
    positions: str = ""
    packing_obstacle: str = ""
    openvino_obstacle: str = ""
    never_waits: bool = True
    is_causal: bool = False
    needs_mask: bool = False
    has_offset: bool = False
    padding_id: int | None = None
    counts_itself: bool = False
    overflows_fp16: bool = False
    num_states: int = 5
    num_wide: int = 0
    num_rotary: int = 1
    keeps_states: bool = False
    scores: ScoreMatrices | None = None
    encoder: str = ""
    head_pooling: str = ""
    bare: Mapping[str, str] = field(default_factory=dict)
    layout: Layout | None = None


# Authors pool one architecture in different ways: BERT with the mean
# (https://huggingface.co/intfloat/e5-base-v2) or with the first token
# (https://huggingface.co/BAAI/bge-base-en-v1.5). So for a checkpoint without modules.json only a convention
# decides: that of sentence-transformers, which uses mean pooling, and the last token for a …ForCausalLM
# (`_load_default_modules` of version 6.2.0):
# https://github.com/huggingface/sentence-transformers/blob/v6.2.0/sentence_transformers/sentence_transformer/model.py
_CONVENTION: Final = "a bare encoder, for which sentence-transformers uses mean pooling"
# https://github.com/facebookresearch/contriever/blob/main/src/contriever.py: `forward` divides the sum of the last
# hidden states by the number of tokens.
_CONTRIEVER: Final = "Contriever, whose authors use mean pooling"
# https://huggingface.co/jinaai/jina-embeddings-v3, "Apply mean pooling".
_JINA: Final = "jina-embeddings-v3, whose authors use mean pooling"
# https://huggingface.co/nomic-ai/nomic-embed-text-v1/discussions/1/files: its pooling file and its example.
_NOMIC: Final = "nomic-embed, whose authors use mean pooling"

_BERT: Final = Layout(
    layers="encoder.layer",
    embeddings="embeddings",
    columns=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense"),
    rows=("attention.output.dense", "output.dense"),
)
# From the size of the embeddings to the hidden size, if these differ.
_ELECTRA: Final = replace(_BERT, behind_embeddings=("embeddings_project",))
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
    key_columns=("self_attn.k_proj", "self_attn.v_proj"),
)
# The embeddings of relative positions are outside the layers, all of which read them: every stage has all of
# them.
_DEBERTA: Final = Layout(
    layers="encoder.layer",
    embeddings="embeddings",
    after_first_layer="encoder.conv",
    tensor_obstacle="its attention multiplies the queries and keys of all heads by those of relative positions, "
    "which no rank holds completely",
)
_DISENTANGLED: Final = "its disentangled attention adds position scores, which the packed kernel cannot do"
_RELATIVE: Final = "it adds a relative position bias to the scores, which the packed kernel cannot do"
_SOFTCAP: Final = "it bounds its attention scores, which the packed kernel cannot do"
_SPARSE: Final = "the packed kernel does not support its sparse attention"


def _bert(model_type: str, architecture: str, layout: Layout | None = _BERT, **more: Any) -> Family:
    """Return a family with learned positions whose classifiers read the first token."""
    bare = {architecture: _CONVENTION, **more.pop("bare", {})}
    own = {"positions": FROM_ZERO, "num_states": 3, "num_rotary": 0, "head_pooling": "cls"}
    return Family(model_type, bare=bare, layout=layout, **{**own, **more})


def _roberta(model_type: str, architecture: str) -> Family:
    return _bert(model_type, architecture, positions=BEHIND_PADDING, has_offset=True)


def _decoder(model_type: str, obstacle: str = "", **more: Any) -> Family:
    """Return a family with rotary positions, grouped key heads, and windows if the configuration has them."""
    # Texts are read from left to right, so that only the last token has seen all others.
    return Family(
        model_type,
        "" if obstacle else FROM_ZERO,
        obstacle,
        is_causal=True,
        needs_mask=True,
        num_states=4,
        head_pooling="last_token",
        layout=_DECODER,
        **more,
    )


def _t5(model_type: str, encoder: str) -> Family:
    return Family(
        model_type,
        packing_obstacle=_RELATIVE,
        num_states=4,
        num_rotary=0,
        scores=ScoreMatrices(2, 0, num_shared=1),
        never_waits=False,
        overflows_fp16=True,  # transformers keeps the second matrix of each block in fp32 for it
        encoder=encoder,
    )


FAMILIES: Final[Mapping[str, Family]] = {
    family.model_type: family
    for family in (
        _bert("albert", "AlbertModel", None),
        _bert("bert", "BertModel", bare={"Contriever": _CONTRIEVER}),
        Family("big_bird", packing_obstacle=_SPARSE, never_waits=False, num_rotary=0, scores=ScoreMatrices()),
        _roberta("camembert", "CamembertModel"),
        Family("data2vec-text", never_waits=False, has_offset=True, num_states=3, num_rotary=0),
        # The scale of its scores is read from the device in every layer.
        Family(
            "deberta",
            packing_obstacle=_DISENTANGLED,
            never_waits=False,
            needs_mask=True,
            num_states=3,
            num_rotary=0,
            keeps_states=True,
            scores=ScoreMatrices(6, 0, num_in_half=2, mask_bytes=8, distance_bytes=3 * 8),
            head_pooling="cls",
            bare={"DebertaModel": _CONVENTION},
        ),
        Family(
            "deberta-v2",
            num_states=0,
            num_rotary=0,
            keeps_states=True,
            scores=ScoreMatrices(3, 0, index_bytes=8, mask_bytes=8, copies_positions=True),
            packing_obstacle=_DISENTANGLED,
            needs_mask=True,
            head_pooling="cls",
            bare={"DebertaV2Model": _CONVENTION},
            layout=_DEBERTA,
        ),
        _bert("distilbert", "DistilBertModel", None),
        _bert("electra", "ElectraModel", _ELECTRA),
        Family("eurobert", FROM_ZERO, num_states=4, bare={"EuroBertModel": _CONVENTION}),
        _decoder("gemma"),
        # Gemma 2 and 3 were trained in bf16: https://github.com/huggingface/transformers/issues/36822, and
        # https://huggingface.co/google/embeddinggemma-300m: "activations do not support float16".
        _decoder("gemma2", _SOFTCAP, overflows_fp16=True, scores=ScoreMatrices()),
        # EmbeddingGemma looks both ways (use_bidirectional_attention).
        _decoder("gemma3_text", counts_itself=True, overflows_fp16=True, num_rotary=2),
        Family("gte", FROM_ZERO, num_states=4, num_wide=3),
        Family("jina_embeddings_v3", FROM_ZERO, num_states=4, bare={"JinaEmbeddingsV3Model": _JINA}),
        _decoder("llama"),
        Family(
            "longformer",
            packing_obstacle=_SPARSE,
            openvino_obstacle="it pads texts to a multiple of its window, and a conversion would fix their length",
            never_waits=False,
            has_offset=True,
            num_states=3,
            num_rotary=0,
            scores=ScoreMatrices(0, 0),
        ),
        _decoder("mistral"),
        # Most layers attend within local windows. The head reads the first token unless the configuration
        # says mean.
        Family(
            "modernbert",
            FROM_ZERO,
            num_rotary=2,
            head_pooling="cls",
            bare={"ModernBertModel": _CONVENTION},
            layout=_MODERNBERT,
        ),
        Family(
            "mpnet",
            packing_obstacle=_RELATIVE,
            num_states=4,
            num_rotary=0,
            scores=ScoreMatrices(3, distance_bytes=8),
            has_offset=True,
            padding_id=1,
            bare={"MPNetModel": _CONVENTION},
        ),
        _t5("mt5", "MT5EncoderModel"),
        Family("nomic_bert", FROM_ZERO, num_states=4, num_wide=3, bare={"NomicBertModel": _NOMIC}),
        _decoder("qwen2"),
        _decoder("qwen3"),
        _roberta("roberta", "RobertaModel"),
        _t5("t5", "T5EncoderModel"),
        _t5("umt5", "UMT5EncoderModel"),
        _roberta("xlm-roberta", "XLMRobertaModel"),
        Family("xlm-roberta-xl", never_waits=False, has_offset=True, num_states=4, num_rotary=0),
    )
}
# RexUniNLU's own DeBERTa (worker.tasks.extract.model.network) has for each pair of tokens the number of a relative
# position, as int64 on a CPU, and a bool, and computes the scores of some heads at a time.
EXTRACTOR: Final = Family("", num_states=3, num_rotary=0, scores=ScoreMatrices(0, 0, mask_bytes=8 + 1))
_UNKNOWN: Final = Family("", never_waits=False)
# Why the mean of a checkpoint without modules.json is pooled, by the architecture in its config.json.
CONVENTIONS: Final = {name: why for family in FAMILIES.values() for name, why in family.bare.items()}


def find_family(model_type: str) -> Family:
    """Return the architecture's family; a Family without any facts if the architecture is unknown."""
    return FAMILIES.get(model_type, _UNKNOWN)


def find_layout(model_type: str) -> Layout:
    """Return the architecture's layout.

    Raises ModelError if the architecture was never compared in divided form with the whole model.
    """
    layout = find_family(model_type).layout
    if layout is None:
        known = ", ".join(family.model_type for family in FAMILIES.values() if family.layout is not None)
        raise ModelError(
            f"A model of the architecture {model_type!r} cannot be split over devices, only {known}; "
            "use the strategy replicate."
        )
    return layout
