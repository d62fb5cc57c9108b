"""A cross-encoder that was trained here: the packaged model, taught whether two texts are of one docstring.

What precision, packing and placement cost is told by decisions, and random weights decide nothing. It is no good model:
minutes of two cores. Kept beside the code and made anew when its recipe, its texts or the packaged model change.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.models.random_weights import TOKENIZER_FILES
from benchmarks.pair_texts import Pair, list_parts, make_pairs
from benchmarks.peers.environment import HOME
from vectormill.models.model_card import ModelCard

LABELS: Final = ("other", "same")
# How often training says how far it is.
NUM_REPORTS: Final = 20
# So many batches are sorted by length together: padding would be a third of all tokens, and the order stays random.
SORTED_BATCHES: Final = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """How it is trained. The lowest layers and the embeddings stay as they are, which saves a third of the work."""

    num_docstrings: int = 1000
    num_epochs: int = 4
    batch_size: int = 8
    max_tokens: int = 64
    num_frozen_layers: int = 2
    learning_rate: float = 1e-4
    warm_up_share: float = 0.1
    weight_decay: float = 0.01
    seed: int = 0


RECIPE: Final = Recipe()
# What a text may have when it is judged.
MAX_TOKENS: Final = 256
# What the network reads of a pair. Without the types it could not tell the two texts apart.
MODEL_INPUTS: Final = ("input_ids", "token_type_ids", "attention_mask")


def find_pair_model(packaged: ModelCard, recipe: Recipe = RECIPE, home: Path = HOME) -> Path:
    """Where it lies, or is to lie: the name holds all that it is made of."""
    pairs = make_pairs(list_parts(is_test=False), recipe.num_docstrings, recipe.seed)
    content = json.dumps(
        [asdict(recipe), MAX_TOKENS, MODEL_INPUTS, packaged.revision, [asdict(pair) for pair in pairs]],
        sort_keys=True,
    )
    return home / "models" / f"pairs-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def load_pair_tokenizer(directory: Path) -> Any:
    """transformers' own. Not AutoTokenizer, which would read the model's own limit."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        pad_token="[PAD]",
        model_input_names=list(MODEL_INPUTS),
    )


def train_pair_model(
    packaged: ModelCard, target: Path, say: Callable[[str], None], recipe: Recipe = RECIPE
) -> None:
    """Writes transformers' layout, whole or not at all. `say` is called NUM_REPORTS times."""
    import torch
    from transformers import BertForSequenceClassification

    pairs = make_pairs(list_parts(is_test=False), recipe.num_docstrings, recipe.seed)
    torch.manual_seed(recipe.seed)
    tokenizer = load_pair_tokenizer(packaged.path)
    names = dict(enumerate(LABELS))
    model: Any = BertForSequenceClassification.from_pretrained(
        packaged.path, id2label=names, label2id={label: number for number, label in names.items()}
    )
    freeze(model, recipe.num_frozen_layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    batches = list(plan_batches(pairs, recipe))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: find_rate(step, len(batches), recipe.warm_up_share)
    )
    model.train()
    losses: list[float] = []
    num_said = 0
    for number, batch in enumerate(batches):
        losses.append(learn(model, tokenizer, batch, recipe.max_tokens))
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        while num_said < NUM_REPORTS * (number + 1) // len(batches):
            num_said += 1
            recent = losses[-max(1, len(batches) // NUM_REPORTS) :]
            say(f"training a pair model, loss {sum(recent) / len(recent):.3f}")
    save(model, packaged, target)


def freeze(model: Any, num_layers: int) -> None:
    """Embeddings and the lowest layers."""
    for part in (model.bert.embeddings, *model.bert.encoder.layer[:num_layers]):
        part.requires_grad_(False)


def plan_batches(pairs: Sequence[Pair], recipe: Recipe) -> Iterator[list[Pair]]:
    """All epochs: pairs in random order, of about one length in a batch."""
    draw = random.Random(recipe.seed)
    for _ in range(recipe.num_epochs):
        shuffled = draw.sample(list(pairs), len(pairs))
        pool = recipe.batch_size * SORTED_BATCHES
        for start in range(0, len(shuffled), pool):
            near = sorted(
                shuffled[start : start + pool], key=lambda pair: len(pair.text) + len(pair.text_pair)
            )
            batches = [
                near[first : first + recipe.batch_size] for first in range(0, len(near), recipe.batch_size)
            ]
            yield from draw.sample(batches, len(batches))


def find_rate(step: int, num_steps: int, warm_up_share: float) -> float:
    """Of the learning rate: up in a line, then down to nothing."""
    warm_up = max(1, int(num_steps * warm_up_share))
    return min((step + 1) / warm_up, (num_steps - step) / max(1, num_steps - warm_up))


def learn(model: Any, tokenizer: Any, batch: Sequence[Pair], max_tokens: int) -> float:
    """Adds up the gradients of one batch, and returns its loss."""
    import torch

    inputs = tokenizer(
        [pair.text for pair in batch],
        [pair.text_pair for pair in batch],
        truncation=True,
        max_length=max_tokens,
        padding=True,
        return_tensors="pt",
    )
    labels = torch.tensor([int(pair.is_same) for pair in batch])
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    return float(loss.detach())


def save(model: Any, packaged: ModelCard, target: Path) -> None:
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for name in TOKENIZER_FILES:
        if (packaged.path / name).is_file():
            shutil.copyfile(packaged.path / name, part / name)
    path = part / "tokenizer_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | {"model_max_length": MAX_TOKENS}
    path.write_text(json.dumps(values), encoding="utf-8")
    part.rename(target)
