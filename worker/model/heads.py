"""The heads of networks: of classifiers, for sparse and multi-vector outputs; and files that transformers cannot read.

A classifier is a transformer, a pooling that gives one vector per sequence, and a head on that vector: so it
is packed, padded, converted and shared like any encoder. tests/contract/test_classifiers_agree.py compares
each row of HEADS with the whole model of transformers.

StructBERT's config.json names neither a `model_type` nor an architecture, and its tensors are called
`encoder.…`. transformers would find none of them and silently start from random weights: so it is told their
prefix, and each tensor must be there.

A sparse or multi-vector head gets states [tokens, hidden size] without padding, and the numbers of tokens of the
sequences that they belong to. All shapes follow from these, so that nothing waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vectormill.domain.errors import ModelError
from vectormill.domain.task import MULTI_VECTOR, SPARSE
from vectormill.models.classifiers import STRUCTBERT
from vectormill.models.model_card import ModelCard, SparseHead
from vectormill.models.rerankers import Template
from vectormill.models.stored import read_stored
from vectormill.models.tensor_headers import read_header
from vectormill.models.weights import find_weights
from worker.model.runtime import transformers
from worker.model.weights import open_weights, read_tensors
from worker.tokens.reference import Reference

# The names of StructBERT's tensors begin with this, and those of BERT with `bert` or with no prefix.
PUBLISHED_PREFIX: Final = "encoder"
# A table 0, 1, 2, …, which newer versions compute.
_BUFFERS: Final = frozenset({f"{PUBLISHED_PREFIX}.embeddings.position_ids"})


def is_published(card: ModelCard) -> bool:
    """Return True if the model's files were published for code that transformers does not have."""
    return card.classifier is not None and card.classifier.architecture == STRUCTBERT


def load_config(card: ModelCard, **more: Any) -> Any:
    """Return the transformers configuration. Raises whatever transformers raises."""
    if not is_published(card):
        return transformers.AutoConfig.from_pretrained(
            card.path, local_files_only=True, trust_remote_code=False, **more
        )
    values = dict(read_stored(card.path / "config.json", card.name).values)
    del values["base_model_prefix"]
    return transformers.BertConfig(**values, **more)


def outline_classifier(card: ModelCard) -> Any:
    """Return transformers' whole model with its head, without weights."""
    with torch.device("meta"):
        return transformers.AutoModelForSequenceClassification.from_config(
            load_config(card, num_labels=card.dimension)
        )


def check_published(card: ModelCard) -> None:
    """Raise ModelError if published files lack a tensor of the model or have another; transformers only warns."""
    if not is_published(card):
        return
    wanted = {_name_stored(card, name) for name in outline_classifier(card).state_dict()}
    found = {name for path in find_weights(card.path, card.name) for name in read_header(path)} - _BUFFERS
    flaws = [
        f"{name} {'is missing' if name in wanted else 'does not belong to this model'}"
        for name in sorted(wanted ^ found)
    ]
    if flaws:
        more = f", and {len(flaws) - 3} more" if len(flaws) > 3 else ""
        raise ModelError(
            f"The weights in {card.path} do not match the model {card.name!r}: {'; '.join(flaws[:3])}{more}."
        )


def _name_stored(card: ModelCard, name: str) -> str:
    """Return the name in the model's files of a tensor of transformers' whole model."""
    is_renamed = is_published(card) and name.startswith("bert.")
    return PUBLISHED_PREFIX + name.removeprefix("bert") if is_renamed else name


def _with_context_pooler(model: Any) -> nn.Module:
    act = transformers.activations.get_activation(model.config.pooler_hidden_act)
    return nn.Sequential(model.pooler.dense, act, model.classifier)


def _with_activation(activation: str, model: Any) -> nn.Module:
    act = transformers.activations.get_activation(activation)
    return nn.Sequential(model.classifier.dense, act, model.classifier.out_proj)


# One per family with `head_pooling` (vectormill/models/families.py), which says which hidden state the head
# reads.
HEADS: Final[Mapping[str, Callable[[Any], nn.Module]]] = {
    "albert": lambda model: nn.Sequential(
        model.base_model.pooler, model.base_model.pooler_activation, model.classifier
    ),
    "bert": lambda model: nn.Sequential(
        model.base_model.pooler.dense, model.base_model.pooler.activation, model.classifier
    ),
    "distilbert": lambda model: nn.Sequential(model.pre_classifier, nn.ReLU(), model.classifier),
    "electra": partial(_with_activation, "gelu"),
    "modernbert": lambda model: nn.Sequential(model.head, model.classifier),
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta"), partial(_with_activation, "tanh")),
    **dict.fromkeys(("deberta", "deberta-v2"), _with_context_pooler),
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3"),
        lambda model: nn.Sequential(model.score),
    ),
}


class WordScore(nn.Module):
    """The head of a generative reranker: the logit of one word, minus that of another one if there is one.

    `rows` [1 or 2, hidden] are those of the words in the matrix that predicts words, whose other rows are
    never multiplied. Gemma 2 bounds its logits by `softcap`.
    """

    def __init__(self, rows: Tensor, softcap: float | None) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows.float(), requires_grad=False)
        self.softcap = softcap

    def forward(self, states: Tensor) -> Tensor:  # [n, hidden] -> [n, 1]
        logits = nn.functional.linear(states, self.rows)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits[:, :1] - logits[:, 1:].sum(dim=1, keepdim=True)


def load_word_score(card: ModelCard, template: Template) -> WordScore:
    """Load the rows of a template's words. Raises ModelError if one of them is missing."""
    reference = Reference(card.path, lowercase=card.lowercase, special=card.special)
    numbers: list[int] = []
    for word in template.words:
        ids = [word]
        if isinstance(word, str):
            ids = reference.encode([word], add_special_tokens=False).row(0).tolist()
        if len(ids) != 1:
            raise ModelError(
                f"The tokenizer of model {card.name!r} has no token for {word!r}, by whose logit its template scores "
                "pairs."
            )
        numbers.append(int(ids[0]))
    config = load_config(card)
    is_tied = getattr(config, "tie_word_embeddings", False)
    for path in find_weights(card.path, card.name):
        with open_weights(path) as file:
            # The output's own matrix, or that of the input, which both share.
            names = sorted(file.keys(), key=lambda name: name != "lm_head.weight")
            for name in names:
                if name == "lm_head.weight" or (is_tied and name.endswith("embed_tokens.weight")):
                    weight = file.get_slice(name)
                    rows = torch.cat([weight[number : number + 1] for number in numbers])
                    return WordScore(rows, getattr(config, "final_logit_softcapping", None))
    raise ModelError(
        f"The weights in {card.path} have no lm_head.weight, of which the model {card.name!r} reads the rows of "
        f"{', '.join(map(repr, template.words))}."
    )


def load_head(card: ModelCard) -> nn.Module:
    """Load the classifier's head [n, hidden] -> [n, labels] in fp32. No other weights are read.

    Raises ModelError if one of its weights is missing. The head is one product per sequence: fp32 costs
    nothing here, and an error in a score would be noticed.
    """
    template = None if card.classifier is None else card.classifier.template
    if template is not None and template.words:
        return load_word_score(card, template)
    head, names = outline_head(card)
    stored = {own: _name_stored(card, name) for own, name in names.items()}
    values = read_tensors(find_weights(card.path, card.name), set(stored.values()).__contains__)
    if missing := sorted(set(stored.values()) - values.keys()):
        raise ModelError(
            f"The weights in {card.path} are incomplete for the head of model {card.name!r}, which would be random: "
            f"missing {', '.join(missing)}."
        )
    head.to_empty(device="cpu").float()
    try:
        head.load_state_dict({own: values[name].float() for own, name in stored.items()})
    except RuntimeError as error:
        raise ModelError(
            f"The weights in {card.path} do not fit the head of model {card.name!r}: {error}"
        ) from error
    return head.eval().requires_grad_(False)


def outline_head(card: ModelCard) -> tuple[nn.Module, dict[str, str]]:
    """Return the head without weights, and each parameter's name in transformers' whole model."""
    model = outline_classifier(card)
    head = HEADS[model.config.model_type](model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return head, {own: names[id(parameter)] for own, parameter in head.named_parameters()}


# The most numbers of tokens for words that are held at once: 64 MiB in fp32.
MOST_LOGITS: Final = 1 << 24


class TokenWeights(nn.Module):
    """A weight for each token, float32 [tokens]: bge-m3's sparse head.

    It has one output, so that fp32 costs nothing.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        weights: Tensor = self.linear(states.float()).relu().squeeze(-1)
        return weights


class TokenVectors(nn.Module):
    """A vector for each token, float16 [tokens, card.token_dimensions]."""

    def __init__(self, layers: nn.Module, *, normalizes: bool) -> None:
        super().__init__()
        self.layers = layers
        self.normalizes = normalizes

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        vectors: Tensor = self.layers(states).float()
        return (normalize(vectors, dim=-1) if self.normalizes else vectors).half()


class WordWeights(nn.Module):
    """A weight for each word of the vocabulary, float32 [n, words]: SPLADE.

    The language model's head gives numbers [tokens, words], of which only some rows are held at once. Of the sources,
    sentence_transformers/sparse_encoder/modules/splade_pooling.py applies the logarithm to each; since it grows with
    its argument, the largest number is found first here.
    """

    def __init__(self, whole: nn.Module, head: SparseHead, num_words: int) -> None:
        """Take the head of a masked language model, which loses its transformer."""
        super().__init__()
        self._given = GivenStates()
        setattr(whole, str(whole.base_model_prefix), self._given)
        self.whole = whole
        self.head = head
        self.num_words = num_words

    def forward(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        least = 0.0 if self.head.sums else float("-inf")
        totals = torch.full((len(lengths), self.num_words), least, device=states.device)
        bounds = list(pairwise(accumulate(lengths, initial=0)))
        size = max(MOST_LOGITS // self.num_words, 1)
        for first in range(0, len(states), size):
            self._given.states = states[first : first + size].unsqueeze(0)
            logits = self.whole(inputs_embeds=self._given.states).logits[0]
            for row, (start, end) in enumerate(bounds):
                if start < first + size and end > first:
                    self._add(totals[row], logits[max(start - first, 0) : end - first])
            del logits  # before the next are computed
        return totals if self.head.sums else self._weigh(totals)

    def _add(self, total: Tensor, logits: Tensor) -> None:
        if self.head.sums:
            total += self._weigh(logits.float()).sum(dim=0)
        else:
            torch.maximum(total, logits.amax(dim=0).float(), out=total)

    def _weigh(self, numbers: Tensor) -> Tensor:
        weights = numbers.relu()
        for _ in range(self.head.num_logs):
            weights = weights.log1p()
        return weights


class GivenStates(nn.Module):
    """A module that replaces a transformer and returns the hidden states it was given."""

    states: Tensor

    def forward(self, *_: object, **__: object) -> object:
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.states)


def load_heads(
    card: ModelCard, whole: nn.Module, dtype: torch.dtype, dense: Sequence[nn.Module]
) -> nn.ModuleDict:
    """Return the heads of a model by the output that each makes.

    `whole` is what was loaded of its own weights, and `dense` the Dense modules of its token head.
    """
    heads: dict[str, nn.Module] = {}
    if card.sparse_head is not None and card.sparse_head.file:
        heads[SPARSE] = TokenWeights(_load_linear(card, card.sparse_head.file, "").float())
    elif card.sparse_head is not None:
        heads[SPARSE] = WordWeights(whole, card.sparse_head, card.sparse_dimensions)
    if card.token_head is not None:
        layers = (
            nn.Sequential(*dense)
            if dense
            else _load_linear(card, card.token_head.file, card.token_head.prefix)
        )
        heads[MULTI_VECTOR] = TokenVectors(layers.to(dtype), normalizes=card.token_head.normalizes)
    return nn.ModuleDict(heads)


def _load_linear(card: ModelCard, file: str, prefix: str) -> nn.Linear:
    """Return the linear layer whose tensors have this prefix; its bias may be missing."""
    names = {f"{prefix}weight", f"{prefix}bias"}
    paths = [card.path / file] if file else find_weights(card.path, card.name)
    found = {
        name.removeprefix(prefix): each for name, each in read_tensors(paths, names.__contains__).items()
    }
    if "weight" not in found:
        raise ModelError(
            f"The weights in {card.path} lack {prefix}weight, a head of the model {card.name!r}."
        )
    num_outputs, num_inputs = found["weight"].shape
    linear = nn.Linear(num_inputs, num_outputs, bias="bias" in found)
    linear.load_state_dict(found)
    return linear
