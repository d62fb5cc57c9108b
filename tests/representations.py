"""Models with several outputs, and those outputs as the engine's task computes them."""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from benchmarks.random_embedder import M3
from tests.models import DEVICE, PACKED, add_tokenizer, packaged_model
from tests.rounds import ask, finish
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import EncodingOptions, make_spec
from vectormill.ragged import Ragged
from vectormill.vectors.representations import Representations, unpack
from worker.batching.batch import Batch
from worker.devices.device import Device
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.tasks.table import make_tasks

GOLDEN = Path(__file__).parent / "data" / "representations"
# The width of the real bge-m3 in two layers.
WIDE = replace(M3, num_layers=2, max_tokens=512)
# A repeated word, an unknown character, one word, and a text with much punctuation.
GOLDEN_TEXTS = [
    "the cat sees the other cat, and the dog sees nothing at all",
    "a word that no vocabulary has: \U000140a8 and more",
    "short",
    "What? Nothing; (really) nothing - or so it seems... but: who knows!",
]
TOKEN_TEXTS = [*GOLDEN_TEXTS, "a text that is longer than what is read of it, again and again " * 6]


def write_masked_language_model(directory: Path, kind: str = "Bert", **sizes: int) -> Path:
    """Write a …ForMaskedLM of random weights, of BERT-base's width and of two layers unless `sizes` differ."""
    whole = getattr(transformers, f"{kind}ForMaskedLM")(_configure(kind, sizes))
    _fill(whole).save_pretrained(directory)
    return add_tokenizer(directory)


def write_stanford_colbert(directory: Path, **told: object) -> Path:
    """Write a ColBERT as Stanford's package does, with settings of artifact.metadata."""
    config = _configure("Bert", {})
    bert = transformers.BertModel(config, add_pooling_layer=False)
    config.architectures = ["HF_ColBERT"]
    config.save_pretrained(directory)
    tensors = {f"bert.{name}": tensor for name, tensor in _fill(bert).state_dict().items()}
    tensors["linear.weight"] = _fill(torch.nn.Linear(config.hidden_size, 128, bias=False)).weight.data
    save_file(tensors, directory / "model.safetensors")
    metadata: dict[str, object] = {"dim": 128, "query_maxlen": 32, "doc_maxlen": 40, "mask_punctuation": True}
    metadata |= {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "attend_to_mask_tokens": False}
    (directory / "artifact.metadata").write_text(json.dumps(metadata | told))
    return add_tokenizer(directory)


def write_pylate_colbert(directory: Path, **told: object) -> Path:
    """Write a ColBERT as PyLate does, whose markers are added tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(packaged_model())
    tokenizer.add_tokens(["[Q] ", "[D] "])
    config = _configure("Bert", {"vocab_size": len(tokenizer)})
    _fill(transformers.BertModel(config)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    parts = (("", "sentence_transformers.models.Transformer"), ("1_Dense", "pylate.models.Dense.Dense"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": kind}
        for number, (path, kind) in enumerate(parts)
    ]
    dense = {"in_features": config.hidden_size, "out_features": 128, "bias": False}
    dense |= {"activation_function": "torch.nn.modules.linear.Identity"}
    whole: dict[str, object] = {
        "model_type": "ColBERT",
        "prompts": {},
        "query_prefix": "[Q] ",
        "document_prefix": "[D] ",
    }
    whole |= {"query_length": 32, "document_length": 48, "attend_to_expansion_tokens": False}
    whole |= {"skiplist_words": list(string.punctuation), "do_query_expansion": True}
    (directory / "1_Dense").mkdir()
    linear = _fill(torch.nn.Linear(config.hidden_size, 128, bias=False))
    save_file({"linear.weight": linear.weight.data}, directory / "1_Dense" / "model.safetensors")
    for name, content in (
        ("modules.json", modules),
        ("1_Dense/config.json", dense),
        ("config_sentence_transformers.json", whole | told),
        ("sentence_bert_config.json", {"max_seq_length": 47, "do_lower_case": False}),
    ):
        (directory / name).write_text(json.dumps(content))
    return directory


def _configure(kind: str, sizes: Mapping[str, int]) -> Any:
    wide = {"vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12}
    wide |= {"intermediate_size": 3072, "max_position_embeddings": 514, "pad_token_id": 0}
    return getattr(transformers, f"{kind}Config")(**{**wide, **sizes})


def _fill(module: Any) -> Any:
    """Give a module weights that are the same with every version of torch and transformers."""
    numbers = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            is_norm = "norm" in name.lower() and name.endswith("weight")
            values = numbers.standard_normal(tuple(parameter.shape), np.float32) * 0.02
            parameter.copy_(torch.from_numpy(values + is_norm))
    return module


def load(
    card: ModelCard, backend: str, cache_dir: Path, precision: str = "fp32", device: Device = DEVICE
) -> Encoder:
    attention = "packed" if backend == PACKED else "auto"
    order = EncoderOrder(card, device, backend.partition(",")[0], precision, 1, cache_dir, attention)
    return load_encoder(order)


def represent(
    card: ModelCard,
    encoder: Encoder,
    texts: Sequence[str],
    outputs: str,
    *,
    prompt: str | None = None,
    alone: bool = False,
) -> list[Representations]:
    """Return the outputs of the texts in one batch, or of each in a batch of its own."""
    task = make_tasks(card)["embed"]
    spec = make_spec(card, EncodingOptions(outputs=outputs, prompt=prompt))
    rounds = task.process(spec, [text.encode() for text in texts], 10_000)
    read, constants = ask(rounds)
    inputs = dict(read.inputs)
    for name, value in constants.items():
        inputs[name] = Ragged.from_scalars(np.full(len(texts), value, np.int32))
    batch = Batch(inputs)
    parts = [batch.part(row, row + 1) for row in range(len(batch))] if alone else [batch]
    finished = finish(rounds, Ragged.join([encoder.encode(part) for part in parts]))
    assert not finished.failures
    return [unpack(finished.results.row(index).tobytes()) for index in range(len(texts))]
