"""Tiny classifiers with random weights, and the logits that transformers computes with them for pairs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.models import DEVICE, TEXTS, add_tokenizer
from tests.processors import without_bf16
from vectormill.models.families import find_family
from vectormill.models.model_card import ModelCard
from worker.batching.batch import Batch
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.model.network import list_token_inputs
from worker.tokens.tokenized import TOKEN_TYPE_IDS
from worker.tokens.tokenizer import Tokenizer

STRUCTBERT = Path(__file__).parent / "data" / "structbert"
# model_type of each family with a classification head -> the prefix of its classes in transformers.
CLASSIFIERS = {
    "albert": "Albert", "bert": "Bert", "camembert": "Camembert", "deberta": "Deberta", "deberta-v2": "DebertaV2",
    "distilbert": "DistilBert", "electra": "Electra", "gemma": "Gemma", "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text", "llama": "Llama", "mistral": "Mistral", "modernbert": "ModernBert", "qwen2": "Qwen2",
    "qwen3": "Qwen3", "roberta": "Roberta", "xlm-roberta": "XLMRoberta",
}  # fmt: skip
PAIRS = [(TEXTS[index], TEXTS[-index - 1]) for index in range(len(TEXTS))] + [
    (TEXTS[0], TEXTS[0]),
    ("short", TEXTS[12]),
]
MAX_TOKENS = 64


def write_classifier(directory: Path, model_type: str, *, num_labels: int = 3, **more: Any) -> Path:
    """Write a tiny classifier in transformers' layout, and return its directory.

    It has the packaged model's tokenizer. Its random weights are large enough to make labels differ.
    """
    import transformers

    name = CLASSIFIERS[model_type]
    sizes = {"vocab_size": 30522, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": 0, "type_vocab_size": 2}
    if find_family(model_type).is_causal:
        more = {"num_key_value_heads": 2, "head_dim": 8} | more
    config = getattr(transformers, f"{name}Config")(**{**sizes, "num_labels": num_labels, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return add_tokenizer(directory, model_max_length=MAX_TOKENS)


def reference_logits(directory: Path, pairs: Sequence[tuple[str, str]] = PAIRS) -> NDArray[np.float32]:
    """Return the logits [n, labels] that transformers computes in fp32, one pair at a time."""
    from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

    # AutoTokenizer would create another tokenizer for some architectures, whatever the file says.
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    has_types = TOKEN_TYPE_IDS in list_token_inputs(model)
    options = {"truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    rows = []
    for pair in pairs:
        inputs = tokenizer(*pair, return_token_type_ids=has_types, **options)
        with torch.inference_mode():
            rows.append(model(**inputs).logits[0].numpy())
    return np.stack(rows)


def load_classifier(card: ModelCard, backend: str, cache_dir: Path, attention: str = "auto") -> Encoder:
    device = without_bf16(DEVICE)
    return load_encoder(EncoderOrder(card, device, backend, "fp32", 1, cache_dir, attention))


def judge(
    encoder: Encoder,
    card: ModelCard,
    pairs: Sequence[tuple[str, str]] = PAIRS,
    groups: Sequence[Sequence[int]] = (),
) -> NDArray[np.float32]:
    """Return the logits [n, labels] by our tokenizer and encoder.

    `groups` says which pairs share a batch and gives the order of the rows; by default all pairs share one.
    """
    first, second = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    inputs = Tokenizer(card.path).tokenize_pairs(first, second, card.max_tokens, truncate=True).inputs
    rows = []
    for group in groups or [range(len(pairs))]:
        places = np.array(group)
        batch = Batch({name: values.take(places) for name, values in inputs.items()})
        forward_pass = encoder.prepare(batch)
        forward_pass.start()
        rows.append(forward_pass.results().matrix)
    return np.concatenate(rows)
