"""Compute the results that certificates compare with: one text at a time, in fp32, without padding or batches.

A process of its own runs this code. It uses none of the engine's tokenizer, pooling, kernels or batching: the
model is run by sentence-transformers, or by transformers with the pooling of the model's card. "eager" is the
plain definition of attention.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import ModelError, UnsupportedModel
from vectormill.jobs.item import split_pair
from vectormill.models.families import find_family
from vectormill.models.model_card import ModelCard
from vectormill.models.poolings import CLS, LAST_TOKEN, MAX, MEAN, MEAN_SQRT_LEN, WEIGHTED_MEAN
from vectormill.models.rerankers import DOCUMENT, INSTRUCTION, QUERY, fill_in
from worker.model.network import UNUSED_WEIGHTS, load_dense
from worker.model.weights import merge_adapter

OFFLINE: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}
ARITHMETIC: Final[dict[str, Any]] = {"attn_implementation": "eager", "dtype": torch.float32}
# The arguments of sentence-transformers' models.
PLAIN: Final[dict[str, Any]] = {"device": "cpu", "model_kwargs": ARITHMETIC, **OFFLINE}
# From a text, as EncodeRequest has it, to a vector [dimension] or scores [labels].
Encode = Callable[[bytes], NDArray[np.float32]]


# The model of this process, once it is loaded.
_loaded: list[Encode] = []


def encode_plainly(
    card: ModelCard, spec: EncodingSpec, library: str, texts: Sequence[bytes]
) -> NDArray[np.float32]:
    """Return the results [n, dimensions] of the texts, each encoded alone. Raise ModelError.

    The first call loads the model, so a process calls this for one model only.
    """
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        if not _loaded:
            _loaded.append(_load(card, spec, library))
        return np.stack([_loaded[0](text) for text in texts])


def _load(card: ModelCard, spec: EncodingSpec, library: str) -> Encode:
    try:
        is_by_its_own = library == "sentence-transformers"
        if card.classifier is None:
            load = _load_with_sentence_transformers if is_by_its_own else _load_embedder
        elif card.classifier.template is None:
            load = _load_classifier
        else:
            load = _load_cross_encoder if is_by_its_own else _load_reranker
        return load(card, spec)
    except ModelError:
        raise
    except Exception as error:  # the libraries raise anything for files that they cannot read
        raise ModelError(f"{library} cannot compute the reference for {card.name}: {error}") from error


def _load_with_sentence_transformers(card: ModelCard, spec: EncodingSpec) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(card.path), **PLAIN)
    if card.static is None:
        model.max_seq_length = spec.max_tokens
    else:
        model[0].tokenizer.enable_truncation(spec.max_tokens)

    options: dict[str, Any] = {"prompt": spec.prompt, "show_progress_bar": False}
    return lambda text: model.encode([text.decode()], **options)[0]


def _load_embedder(card: ModelCard, spec: EncodingSpec) -> Encode:
    tokenizer = _load_tokenizer(card)
    config = transformers.AutoConfig.from_pretrained(card.path, **OFFLINE)
    encoder = find_family(config.model_type).encoder
    model = _read(getattr(transformers, encoder or "AutoModel"), card)
    merge_adapter(model, card)  # compared with peft in tests/contract
    dense = load_dense(card)
    # The tokens of the prompt, without the special ones after a text.
    after = len(card.special.suffix)
    num_left_out = (
        0 if card.include_prompt or not spec.prompt else len(tokenizer(spec.prompt)["input_ids"]) - after
    )

    def encode(text: bytes) -> NDArray[np.float32]:
        words = spec.prompt + text.decode()
        inputs = tokenizer(
            words.lower() if card.lowercase else words,
            truncation=True,
            max_length=spec.max_tokens,
            return_tensors="pt",
        )
        states = model(**inputs)[0][0, num_left_out:].float()
        pooled = torch.cat([POOLINGS[mode](states, num_left_out) for mode in card.pooling])
        vector: NDArray[np.float32] = dense(pooled).numpy()
        return vector

    return encode


def _load_classifier(card: ModelCard, spec: EncodingSpec) -> Encode:
    tokenizer = _load_tokenizer(card)
    model = _read(transformers.AutoModelForSequenceClassification, card)

    def encode(text: bytes) -> NDArray[np.float32]:
        first, second = split_pair(text)
        sides = [side.decode() for side in (first, second) if side is not None]
        inputs = tokenizer(*sides, truncation=True, max_length=spec.max_tokens, return_tensors="pt")
        logits: NDArray[np.float32] = model(**inputs).logits[0].numpy()
        return logits

    return encode


def _load_reranker(card: ModelCard, spec: EncodingSpec) -> Encode:
    template = card.classifier.template if card.classifier is not None else None
    assert template is not None
    tokenizer = _load_tokenizer(card)
    kinds = (transformers.AutoModelForSequenceClassification, transformers.AutoModelForCausalLM)
    model = _read(kinds[bool(template.words)], card)
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in template.words]
    pieces = template.pieces if spec.prompt else template.plain

    def encode(text: bytes) -> NDArray[np.float32]:
        first, second = split_pair(text)
        values = {INSTRUCTION: spec.prompt, QUERY: first.decode(), DOCUMENT: (second or b"").decode()}
        rows = [tokenizer(fill_in(each, values), add_special_tokens=False)["input_ids"] for each in pieces]
        # The document ends its piece in each of RERANKERS.
        place = next(number for number, each in enumerate(pieces) if each.endswith(f"{{{DOCUMENT}}}"))
        room = spec.max_tokens - sum(len(row) for row in rows) + len(rows[place])
        rows[place] = rows[place][:room]
        logits = model(input_ids=torch.tensor([[token for row in rows for token in row]])).logits[0]
        score = logits[-1, words[0]] - logits[-1, words[1:]].sum() if words else logits[0]
        return np.array([float(score)], dtype=np.float32)

    return encode


def _load_cross_encoder(card: ModelCard, spec: EncodingSpec) -> Encode:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(card.path), **PLAIN)
    model.max_seq_length = spec.max_tokens
    options: dict[str, Any] = {"prompt": spec.prompt or None, "activation_fn": torch.nn.Identity()}

    def encode(text: bytes) -> NDArray[np.float32]:
        first, second = split_pair(text)
        pair = (first.decode(), (second or b"").decode())
        scores: NDArray[np.float32] = model.predict([pair], **options)
        return scores

    return encode


def _load_tokenizer(card: ModelCard) -> Any:
    return transformers.AutoTokenizer.from_pretrained(card.path, **OFFLINE, **dict(card.special.flags))


def _read(kind: Any, card: ModelCard) -> Any:
    """Load a model of transformers. Raise UnsupportedModel if it would begin with random weights."""
    model, loading = kind.from_pretrained(
        card.path, weights_only=True, output_loading_info=True, **ARITHMETIC, **OFFLINE
    )
    if missing := [key for key in loading["missing_keys"] if not key.startswith(UNUSED_WEIGHTS)]:
        raise UnsupportedModel(
            f"transformers alone cannot compute the reference for {card.name}: its {kind.__name__} finds no weights "
            f"for {missing[0]}."
        )
    return model.eval()


def _weigh(states: Tensor, num_before: int) -> Tensor:
    """Return the mean weighted by position, from 1 in the whole sequence."""
    weights = torch.arange(1, len(states) + 1, dtype=torch.float32).unsqueeze(1) + num_before
    return (states * weights).sum(dim=0) / weights.sum()


# From states [tokens, dim], and the number of tokens before them, to a vector [dim].
POOLINGS: Final[dict[str, Callable[[Tensor, int], Tensor]]] = {
    CLS: lambda states, _: states[0],
    MAX: lambda states, _: states.amax(dim=0),
    MEAN: lambda states, _: states.mean(dim=0),
    MEAN_SQRT_LEN: lambda states, _: states.sum(dim=0) / len(states) ** 0.5,
    WEIGHTED_MEAN: _weigh,
    LAST_TOKEN: lambda states, _: states[-1],
}
