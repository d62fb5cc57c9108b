"""Tiny transformers with random weights, one for each way an architecture attends, and sequences for them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Puts a final token behind a text, as models that read the last one need.
TOKENIZER = """{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"},
"post_processor": {"type": "TemplateProcessing",
"single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "b", "type_id": 0}}],
"pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
"special_tokens": {"b": {"id": "b", "ids": [1], "tokens": ["b"]}}}}"""

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
GROUPED = {"num_key_value_heads": 2}
QWEN3 = {**GROUPED, "head_dim": 8}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
# Layers within a window and one that sees all; both ways the window is half as large, as EmbeddingGemma has it.
GEMMA3 = {
    **QWEN3,
    "query_pre_attn_scalar": 8,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
}
BOTH_WAYS = {"is_causal": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("Albert", {"embedding_size": 16}),
    "bert": ("Bert", {}),
    "camembert": ("Camembert", {}),
    "distilbert": ("DistilBert", {"dim": 32, "n_heads": 4, "n_layers": 3, "hidden_dim": 64}),
    "electra": ("Electra", {"embedding_size": 16}),
    "eurobert": ("EuroBert", {**GROUPED, "mask_token_id": 4}),
    "gemma": ("Gemma", QWEN3),
    "gemma3_text": ("Gemma3Text", GEMMA3),
    "gemma3_text, both ways": ("Gemma3Text", {**GEMMA3, "use_bidirectional_attention": True}),
    "gte": ("Gte", {}),
    "jina_embeddings_v3": ("JinaEmbeddingsV3", {}),
    "llama": ("Llama", GROUPED),
    "llama, both ways": ("Llama", {**GROUPED, **BOTH_WAYS}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "mistral, window": ("Mistral", {**GROUPED, "sliding_window": 5}),
    "mistral, window, both ways": ("Mistral", {**GROUPED, "sliding_window": 5, **BOTH_WAYS}),
    # Local layers see 4 tokens either way, every second layer all.
    "modernbert": (
        "ModernBert",
        {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "nomic_bert": ("NomicBert", {}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", QWEN3),
    "qwen3, window": ("Qwen3", {**QWEN3, **WINDOWED}),
    "qwen3, both ways": ("Qwen3", {**QWEN3, **BOTH_WAYS}),
    "qwen3, window, both ways": ("Qwen3", {**QWEN3, **WINDOWED, **BOTH_WAYS}),
    "roberta": ("Roberta", {}),
    "xlm-roberta": ("XLMRoberta", {}),
}
# As DeBERTa-v3 has them: positions are relative, in buckets, and multiplied with the projections of the content.
RELATIVE = {
    "relative_attention": True,
    "position_buckets": 16,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
# As DeBERTa-base has them: each distance has its own position.
DEBERTA = {
    **{name: RELATIVE[name] for name in ("relative_attention", "position_biased_input", "type_vocab_size")},
    "pos_att_type": ["c2p", "p2c"],
}
OF_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
# Those that cannot be packed.
PADDED_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mpnet": ("MPNet", {}),
    "gemma2": ("Gemma2", GEMMA3),
    "deberta-v2": ("DebertaV2", RELATIVE),
    # As the larger ones of DeBERTa-v2.
    "deberta-v2, convolution": ("DebertaV2", {**RELATIVE, "conv_kernel_size": 3}),
    "deberta": ("Deberta", DEBERTA),
    "big_bird": ("BigBird", {}),
    "data2vec-text": ("Data2VecText", {}),
    # A window of 16 tokens, 8 to either side, in every layer.
    "longformer": ("Longformer", {"attention_window": 16}),
    "xlm-roberta-xl": ("XLMRobertaXL", {}),
    "mt5": ("MT5Encoder", {**OF_T5, "feed_forward_proj": "gated-gelu"}),
    "t5": ("T5Encoder", {**OF_T5, "feed_forward_proj": "relu"}),
    "umt5": ("UMT5Encoder", {**OF_T5, "feed_forward_proj": "gated-gelu"}),
}
LENGTHS = (9, 1, 30, 2, 17, 1, 64)


def make_transformer(name: str, **more: Any) -> Any:
    """Weights ten times larger than a fresh model's, so that who sees whom changes the outcome."""
    import torch
    import transformers

    architecture, options = (MODELS | PADDED_MODELS)[name]
    torch.manual_seed(0)
    of_config = f"{architecture.removesuffix('Encoder')}Config"
    config = getattr(transformers, of_config)(**{**SIZES, **options, **more})
    if hasattr(config, "use_cache"):
        config.use_cache = False  # as load_transformer has it
    model = getattr(transformers, f"{architecture}Model")(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.25)
    return model


def make_sequences() -> list[NDArray[np.int32]]:
    """Of mixed lengths, with a padding token in the midst of one, as a text that says "<pad>" has."""
    tokens = np.random.default_rng(0)
    sequences = [tokens.integers(2, 300, length).astype(np.int32) for length in LENGTHS]
    sequences[2][4] = 1
    return sequences
