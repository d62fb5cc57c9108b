"""Tiny models of random weights in every supported layout, with vectors by sentence-transformers and us."""

import ast
import inspect
import json
import shutil
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.processors import with_bf16, without_bf16
from vectormill.domain.errors import UnsupportedModel
from vectormill.models.model_card import ModelCard
from vectormill.models.poolings import POOLING_NAMES, parse_pooling
from vectormill.models.registry import EncodingOptions, Registry, find_packaged_model, make_spec
from vectormill.settings import ModelEntry
from worker.batching.batch import Batch
from worker.devices.backends import BACKENDS as _BACKENDS
from worker.devices.detect import detect_inventory
from worker.devices.device import Device, split_processor
from worker.encoder.backends import load_encoder
from worker.encoder.encoder import Encoder, EncoderOrder
from worker.tasks.finishing import finish_vectors
from worker.tokens.tokenizer import Tokenizer

PACKED = "torch, packed"
# The backends, and packed attention where one has it.
BACKENDS = (*_BACKENDS, *(PACKED for each in _BACKENDS.values() if each.has_packed_attention))
SENTENCES = [line.strip() for line in inspect.getsource(ast).split("\n") if len(line.strip()) > 20]
TEXTS = [*SENTENCES[:12], " ".join(SENTENCES[:60]), "short", "Ünïcödé, 漢字かな交じり文, русский"]
DEVICE = split_processor(detect_inventory(), 1)[0]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
HIDDEN_SIZE = 32


def packaged_model() -> Path:
    directory = find_packaged_model()
    assert directory is not None
    return directory


def write_transformer(directory: Path, architecture: str, *, pads_left: bool = False) -> Path:
    """Write a tiny transformer of random weights with the packaged model's tokenizer, in the plain layout."""
    import transformers

    sizes = {
        "vocab_size": 30522,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 80, "pad_token_id": 0}
    more: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8} if architecture == "Qwen3" else {}
    # sentence-transformers reads and writes only the encoder of an encoder-decoder model.
    whole = getattr(transformers, f"{architecture}Model")
    kind = getattr(transformers, f"{architecture}EncoderModel", whole)
    more |= {"d_ff": 64, "d_kv": 8} if kind is not whole else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**sizes, **more)
    kind(config).save_pretrained(directory)
    # Set explicitly, because sentence-transformers gives RoBERTa and MPNet two tokens more than they have
    # positions.
    return add_tokenizer(directory, model_max_length=64, **{"padding_side": "left"} if pads_left else {})


def add_tokenizer(directory: Path, **changes: Any) -> Path:
    """Copy the packaged model's tokenizer into a model's directory, with these changes of its configuration."""
    for name in TOKENIZER_FILES:
        shutil.copy(packaged_model() / name, directory / name)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return directory


def write_wide_bert(directory: Path) -> Path:
    """Write a BERT of 8,192 positions that needs much memory per token (260 kB) and little work.

    Its weights are random.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32768,
        max_position_embeddings=8192,
    )
    transformers.BertModel(config).save_pretrained(directory)
    return add_tokenizer(directory, model_max_length=8192)


def write_sentence_transformer(
    directory: Path,
    transformer: Path,
    pooling: str,
    *,
    dense: bool = False,
    normalize: bool = False,
    include_prompt: bool = True,
) -> Path:
    """Write the transformer with pooling and further modules, in the layout of sentence-transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import itself warns that the classes move in a later version
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

        modes = tuple(
            next(name for name in POOLING_NAMES[mode] if name in Pooling.POOLING_MODES)
            for mode in parse_pooling(pooling)
        )
        first = Transformer(str(transformer), max_seq_length=64)
        modules: list[Any] = [first, Pooling(HIDDEN_SIZE, pooling_mode=modes, include_prompt=include_prompt)]
        if dense:
            torch.manual_seed(1)
            modules.append(Dense(HIDDEN_SIZE * len(modes), 24))
        if normalize:
            modules.append(Normalize())
        SentenceTransformer(modules=modules, device="cpu").save(str(directory))
    return directory


class TinyModels:
    """A cache of tiny models by their parts; each combination is written once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def transformer(self, architecture: str, *, pads_left: bool = False) -> Path:
        directory = self._directory / f"{architecture}{'-left' * pads_left}"
        return (
            directory
            if directory.exists()
            else write_transformer(directory, architecture, pads_left=pads_left)
        )

    def sentence_transformer(
        self,
        pooling: str,
        *,
        architecture: str = "Bert",
        pads_left: bool = False,
        dense: bool = False,
        normalize: bool = False,
        include_prompt: bool = True,
    ) -> Path:
        transformer = self.transformer(architecture, pads_left=pads_left)
        directory = self._directory / f"{transformer.name}-{pooling}-{dense}-{normalize}-{include_prompt}"
        if not directory.exists():
            write_sentence_transformer(
                directory,
                transformer,
                pooling,
                dense=dense,
                normalize=normalize,
                include_prompt=include_prompt,
            )
        return directory


@cache
def reference(directory: Path, prompt: str = "") -> NDArray[np.float32]:
    """Return the vectors of TEXTS that sentence-transformers computes in one batch."""
    from sentence_transformers import SentenceTransformer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SentenceTransformer(str(directory), device="cpu", local_files_only=True)
        vectors: NDArray[np.float32] = model.encode(TEXTS, prompt=prompt, show_progress_bar=False)
    return vectors


def read_card(directory: Path) -> ModelCard:
    """Read a model as published, or with mean pooling if its files do not say how it pools."""
    try:
        return Registry({"m": ModelEntry(path=str(directory))}).card("m", weights=True)
    except UnsupportedModel:
        return Registry({"m": ModelEntry(path=str(directory), pooling="mean")}).card("m", weights=True)


@cache
def loaded_encoder(
    directory: Path, backend: str, cache_dir: Path, precision: str = "fp32", device: Device = DEVICE
) -> Encoder:
    card = read_card(directory)
    is_packed, name = backend == PACKED, backend.partition(",")[0]
    attention = "packed" if is_packed else "auto"
    order = EncoderOrder(
        card, device, name, precision, 1, cache_dir, attention
    )  # one thread: see conftest.py
    encoder = load_encoder(order)
    report = encoder.describe()
    assert (report.backend.value, report.precision.value, report.is_packed) == (name, precision, is_packed)
    return encoder


def encode(
    directory: Path,
    backend: str,
    cache_dir: Path,
    *,
    precision: str = "fp32",
    prompt: str | None = None,
    device: Device | None = None,
    groups: Sequence[Sequence[int]] = (range(len(TEXTS)),),
) -> NDArray[np.float32]:
    """Return our vectors of TEXTS, through registry, tokenizer and encoder as the engine uses them.

    By default the device is one without bf16 instructions, so that the arithmetic is the same on every
    machine; for precision bf16 one with them, which a processor that lacks them emulates. `groups` says which
    texts share a batch and gives the order of the vectors.
    """
    card = read_card(directory)
    spec = make_spec(card, EncodingOptions(prompt=prompt))
    if device is None:
        device = with_bf16(DEVICE) if precision == "bf16" else without_bf16(DEVICE)
    encoder = loaded_encoder(directory, backend, cache_dir, precision, device)
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase, special=card.special)
    texts = tokenizer.tokenize([spec.prompt + text for text in TEXTS], spec.max_tokens, truncate=True)
    prompt_length = 0 if card.include_prompt else tokenizer.count_prompt_tokens(spec.prompt)
    outputs = [
        encoder.encode(Batch.from_ids([texts.ids(i) for i in group], [prompt_length] * len(group))).matrix
        for group in groups
    ]
    assert all(output.dtype == np.float32 and output.shape[1] == card.dimension for output in outputs)
    return finish_vectors(np.concatenate(outputs), spec)


def smallest_cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    assert a.shape == b.shape
    return float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).min())
