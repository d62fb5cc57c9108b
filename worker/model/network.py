"""The network of an encoder, a torch module of transformer, pooling and Dense modules, and its loading."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.models.families import find_family
from vectormill.models.model_card import DenseLayer, ModelCard
from vectormill.models.model_files import BLOCK_SPARSE
from vectormill.models.weights import SAFETENSORS, find_weights
from worker.batching.batch import TOKEN_INPUTS
from worker.encoder.encoder import OnRead
from worker.model.heads import (
    PUBLISHED_PREFIX,
    check_published,
    is_published,
    load_config,
    load_head,
    load_heads,
)
from worker.model.masks import tell_masks
from worker.model.pooling import pool_hidden_states
from worker.model.runtime import transformers
from worker.model.weights import merge_adapter, read_tensors
from worker.tokens.reference import Reference
from worker.tokens.tokenizer import SAMPLE

# Heads that some files leave out and that vectors do not depend on.
UNUSED_WEIGHTS = ("pooler.",)


class Dense(nn.Module):
    """A sentence-transformers Dense module: a linear layer, an activation and maybe a residual connection."""

    def __init__(self, directory: Path, layer: DenseLayer) -> None:
        """Load the weights. Raise ModelError if they do not fit what the card says."""
        super().__init__()
        sizes = layer.num_inputs, layer.num_outputs
        self.linear = nn.Linear(*sizes, bias=layer.has_bias)
        self.activation: nn.Module = getattr(nn, layer.activation)()
        self.has_residual = layer.has_residual
        if self.has_residual:
            self.residual = nn.Identity() if sizes[0] == sizes[1] else nn.Linear(*sizes, bias=False)
        path = find_weights(directory / layer.folder, layer.folder)[0]
        try:
            self.load_state_dict(read_tensors([path]))
        except RuntimeError as error:
            raise ModelError(f"The weights in {path} do not fit their module: {error}") from error

    @property
    def is_linear(self) -> bool:
        """Return True if the module is its linear layer alone."""
        return isinstance(self.activation, nn.Identity) and not self.has_residual

    def forward(self, vectors: Tensor) -> Tensor:
        projected: Tensor = self.activation(self.linear(vectors))
        return projected + self.residual(vectors) if self.has_residual else projected


class EncoderNetwork(nn.Module):
    """The whole network: token ids and masks [n, length] to fp32 vectors [n, card.dimension] or scores.

    `heads` compute further outputs from the same hidden states (worker.model.heads).

    Without an attention mask the batch has no padding; the values of a mask are never read back from the
    device.
    """

    def __init__(self, card: ModelCard, dtype: torch.dtype, on_read: OnRead | None = None) -> None:
        super().__init__()
        whole = load_transformer(card, dtype, on_read)
        self.transformer: nn.Module = whole.base_model if weighs_words(card) else whole
        self.heads = load_output_heads(card, whole, dtype)
        # Dense modules process one vector per sequence: fp32 costs nothing there, while bf16 would add a
        # noticeable error.
        self.dense = load_dense(card)
        self.modes = card.pooling
        self.pad_token_id = find_pad_token_id(self.transformer.config.to_dict())  # read once, not per batch
        self.eval()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        pool_mask: Tensor,
        **tokens: Tensor,  # [n, length], further inputs of the transformer
    ) -> Tensor:
        states = self.transformer(input_ids=input_ids, attention_mask=attention_mask, **tokens)[0]
        return self.pool(states, pool_mask)

    def pool(self, states: Tensor, pool_mask: Tensor) -> Tensor:
        """Return vectors [n, card.dimension] of padded hidden states [n, length, hidden size]."""
        vectors: Tensor = self.dense(pool_hidden_states(states, pool_mask, self.modes))
        return vectors

    @property
    def attention(self) -> str:
        return str(self.transformer.config._attn_implementation)


def load_dense(card: ModelCard) -> nn.Module:
    """Load what follows the pooled vector: the Dense modules, or a classifier's head."""
    if card.classifier is not None:
        return load_head(card)
    return nn.Sequential(*(Dense(card.path, layer) for layer in card.dense))


def load_output_heads(card: ModelCard, whole: nn.Module, dtype: torch.dtype) -> nn.ModuleDict:
    """Load the heads of outputs besides the dense vector; `whole` is the model itself, if it weighs words."""
    layers = () if card.token_head is None else card.token_head.dense
    return load_heads(card, whole, dtype, [Dense(card.path, layer) for layer in layers])


def list_token_inputs(transformer: nn.Module) -> tuple[str, ...]:
    """Return those of TOKEN_INPUTS that the transformer reads; it is given no others."""
    named = inspect.signature(transformer.forward).parameters
    return tuple(name for name in TOKEN_INPUTS if name in named)


def find_pad_token_id(config: dict[str, object]) -> int:
    """Return the token id used for padding.

    Any id will do if the model has none, since padding is masked out everywhere.
    """
    pad_token_id = config.get("pad_token_id")
    return pad_token_id if isinstance(pad_token_id, int) and pad_token_id >= 0 else 0


def count_weight_bytes(card: ModelCard) -> int:
    """Return the total size of the transformer's weight files. Raises ModelError if there are none."""
    return sum(path.stat().st_size for path in find_weights(card.path, card.name))


def load_transformer(card: ModelCard, dtype: torch.dtype, on_read: OnRead | None = None) -> nn.Module:
    """Load the bare transformer from local files. Raises ModelError if weights are missing or do not fit."""
    num_bytes = count_weight_bytes(card)
    check_published(card)
    transformers.utils.logging.disable_progress_bar()  # a worker's log is not watched live
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = load_config(card)
        encoder = find_family(config.model_type).encoder
        if config.is_encoder_decoder and not encoder:
            raise ModelError(
                f"The model {card.name!r} has both an encoder and a decoder, and of the architecture "
                f"{config.model_type!r} neither can be used alone."
            )
        with _counting(on_read, num_bytes):
            plain = getattr(transformers, encoder or "AutoModel")
            kind = transformers.AutoModelForMaskedLM if weighs_words(card) else plain
            model, loading = kind.from_pretrained(
                card.path,
                config=config,
                dtype=dtype,
                use_safetensors=find_weights(card.path, card.name)[0].suffix == SAFETENSORS,
                weights_only=True,  # only tensors are read from a pickle; it runs no code
                output_loading_info=True,
                key_mapping={rf"^{PUBLISHED_PREFIX}\.": ""} if is_published(card) else None,
                **options,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ModelError(f"Cannot load the model {card.name!r} from {card.path}: {error}") from error
    missing = [key for key in loading["missing_keys"] if not key.startswith(UNUSED_WEIGHTS)]
    if missing or loading["mismatched_keys"]:
        raise ModelError(
            f"The weights in {card.path} are incomplete for the model {card.name!r}: {len(missing)} tensors are "
            f"missing (such as {', '.join(missing[:3]) or 'none'}) and {len(loading['mismatched_keys'])} have the "
            "wrong shape."
        )
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a DeBERTa makes two of its biases fp32, whatever is asked for
            parameter.data = parameter.data.to(dtype)
    merge_adapter(model, card)
    return prepare_transformer(model)


def prepare_transformer(model: nn.Module) -> nn.Module:
    """Return the transformer without the parts that do not affect vectors."""
    tell_masks(model)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # for next-sentence prediction, which each pass would compute for nothing
    if getattr(model.config, "attention_type", "") == BLOCK_SPARSE:  # for texts that are longer than are read
        model.set_attention_type("original_full")
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # keys and values of earlier tokens are reused only in text generation
    return model


def weighs_words(card: ModelCard) -> bool:
    """Return True if the head of the model's own language model is used too."""
    return card.sparse_head is not None and not card.sparse_head.file


@contextmanager
def _counting(on_read: OnRead | None, num_bytes: int) -> Iterator[None]:
    """Report progress while transformers loads tensors in the block, as shares of the files' bytes.

    The shares are counted in tensors, because transformers reports no bytes.
    """
    if on_read is None:
        yield
        return

    def count(factory: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") != "Loading weights":
            return factory(*args, **options)
        items = list(args[0])

        def pass_on() -> Iterator[Any]:
            for number, item in enumerate(items, start=1):
                yield item
                on_read(num_bytes * number // len(items), num_bytes)

        return pass_on()

    before = transformers.utils.logging.set_tqdm_hook(count)
    try:
        yield
    finally:
        transformers.utils.logging.set_tqdm_hook(before)


logger = logging.getLogger(__name__)


def check_tokenizer(card: ModelCard) -> None:
    """Compare `tokenizer.json` with AutoTokenizer on texts in many scripts.

    Raises UnsupportedModel if they differ. A tokenizer with custom code is not compared: its code is not run,
    and a table lists the tokens it adds.
    """
    if is_published(card) or card.special.has_code:
        return
    flags = dict(card.special.flags)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(
            card.path, local_files_only=True, trust_remote_code=False, **flags
        )
    except (OSError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
        logger.warning(
            "Could not compare the tokenizer of %s with transformers, which cannot read it: %s",
            card.name,
            error,
        )
        return
    texts = [line for line in SAMPLE.read_text(encoding="utf-8").splitlines() if line]
    ours = Reference(card.path, lowercase=card.lowercase, special=card.special).encode(texts)
    # sentence-transformers lowercases a text before it is tokenized.
    given = [text.lower() for text in texts] if card.lowercase else texts
    for number, expected in enumerate(theirs(given, verbose=False)["input_ids"]):
        found = ours.row(number).tolist()
        if found != expected:
            raise UnsupportedModel(
                f"The tokenizer.json of model {card.name!r} returns different tokens from transformers' own class, "
                f"such as {found[:8]} instead of {expected[:8]} for {texts[number][:40]!r}. Regenerate it in an "
                "environment that you trust: "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)."
            )
