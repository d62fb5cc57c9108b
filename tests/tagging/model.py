"""A tiny tagger with random weights, for tests."""

from pathlib import Path

import torch

from tests.models import add_tokenizer

LABELS = ("O", "B-person", "I-person", "B-place", "I-place")
MAX_TOKENS = 64


def write_tagger(directory: Path) -> Path:
    """In transformers' layout, with weights large enough to tell labels apart."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=80,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
    )
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(directory)
    return add_tokenizer(directory, model_max_length=MAX_TOKENS)
