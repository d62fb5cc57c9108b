"""Every task with every kind of model that it is for: what the contract of tasks (test_task_contract.py) is tried on.

Whoever adds a task adds an entry here. Models are tiny and real.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.classifiers import write_classifier
from tests.gliner_models import GOLDEN as GLINER_GOLDEN
from tests.gliner_models import KNOWN as GLINER_KNOWN
from tests.models import SENTENCES, write_transformer
from tests.rerankers import write_reranker as write_generative
from tests.rexuninlu import GOLDEN, find_case
from tests.static_models import write_static
from tests.tagging.model import write_tagger
from tests.tagging.rows import TAG, register
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.task import EMBED, EXTRACT, JUDGE
from vectormill.jobs.item import join_pair
from vectormill.models.model_card import ModelCard
from vectormill.models.registry import Registry, make_spec
from vectormill.settings import ModelEntry

MAX_CHARS: Final = 2_000
Item = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """`write` makes the model's directory. `items` are sound ones, no two alike; `failing` are by what they fail with.

    `long` has more tokens than the model reads at once, and is counted as truncated. `factory` loads the model in its
    process, as "module:function", where it is no model of ours.
    """

    name: str  # of the kind of model, as MODEL_KINDS has it, and of the task
    task: str
    write: Callable[[Path], Path]
    items: tuple[Item, ...]
    failing: Mapping[str, Item]
    long: Item
    options: Mapping[str, Any] = field(default_factory=dict)
    factory: str = "worker.encoder.backends:load_encoder"
    register: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    pooling: str | None = None
    variant: str = ""  # of several models of one kind
    backend: str = "torch"
    folder: str = ""  # of the model in its directory, where its name tells what it is

    @property
    def id(self) -> str:
        return f"{self.variant}{self.name} {self.task}"

    @property
    def model(self) -> str:
        """The name of the model; models of one kind share it."""
        return f"tiny-{self.variant.strip()}{self.name}"

    def entry(self, directory: Path) -> dict[str, ModelEntry]:
        path = directory / self.model / self.folder
        found = str(path if path.exists() else self.write(path))
        return {self.model: ModelEntry(path=found, pooling=self.pooling)}

    def card(self, directory: Path) -> ModelCard:
        return Registry(self.entry(directory)).card(self.model, weights=True)

    def spec(self, directory: Path) -> EncodingSpec:
        return make_spec(self.card(directory), EncodingOptions(task=self.told_task, **self.options))

    @property
    def told_task(self) -> str | None:
        """As a job names it; a kind of model that is for one task alone needs no name."""
        return self.task if self.name == "embedder" else None


def to_bytes(item: Item) -> bytes:
    """An item as it is stored."""
    text = item["text"].encode("utf-8", "surrogatepass")
    pair = item.get("text_pair")
    return text if pair is None else join_pair(text, pair.encode("utf-8", "surrogatepass"))


def are_alike(one: Any, other: Any) -> bool:
    """Results as JSON: numbers of another order of summation, all else the same."""
    if isinstance(one, float | int) and isinstance(other, float | int):
        return bool(np.isclose(one, other, atol=1e-5, rtol=1e-4))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_alike(one[name], other[name]) for name in one)
    return bool(one == other)


FAILING_TEXTS: Final = {
    "empty_text": "",
    "lone_surrogate": "half \ud83d",
    "nul_character": "a\0b",
    "text_too_long": "x" * (MAX_CHARS + 1),
}
STRANGE: Final = ("🙂🏽 e\u0301 ﬁ", "漢字 (か\u3099な)", "\u200b\u2028a", "[SEP] [CLS] ##a")
TEXTS: Final = (*SENTENCES[:9], *STRANGE)
LONG: Final = "a long text " * 100
SINGLE: Final[dict[str, Item]] = {code: {"text": text} for code, text in FAILING_TEXTS.items()}
PAIRS: Final = tuple(
    {"text": first, "text_pair": second} for first, second in zip(TEXTS, TEXTS[::-1], strict=True)
)
# Either text may be why a pair fails.
FAILING_PAIRS: Final[dict[str, Item]] = {
    code: {"text": "fine", "text_pair": text} if number % 2 else {"text": text, "text_pair": "fine"}
    for number, (code, text) in enumerate(FAILING_TEXTS.items())
}
# Records that hang on a logit near 0 may be others on another machine, and in another batch. Of these texts no logit is
# so near, with this schema, of which some of them are asked a second level.
SCHEMA: Final = {"人物": {"时间": None}, "地点": None, "机构": None}
STABLE: Final = ("ner_short", "re_short", "ee_sport", "english", "mixed_latin", "emoji", "punct")
EXTRACTED: Final = tuple({"text": find_case(name)["text"]} for name in STABLE)


def write_embedder(directory: Path) -> Path:
    return write_transformer(directory, "Bert")


def write_reranker(directory: Path) -> Path:
    """Of one label: what is compared of a sick process's answers is one number."""
    return write_classifier(directory, "bert", num_labels=1)


def write_worded(directory: Path) -> Path:
    """As Qwen3-Reranker, whose template the name of its folder tells."""
    return write_generative(directory.parent, directory.name)


def write_static_embedder(directory: Path) -> Path:
    return write_static(directory, normalize=True, truncated=64)


def link_extractor(directory: Path) -> Path:
    directory.symlink_to(GOLDEN / "model")
    return directory


def link_gliner(directory: Path) -> Path:
    directory.symlink_to(GLINER_GOLDEN / "deberta")
    return directory


KINDS: Final = (
    Kind("embedder", EMBED, write_embedder, tuple({"text": text} for text in TEXTS), SINGLE, {"text": LONG}),
    Kind(
        "embedder",
        EMBED,
        write_static_embedder,
        tuple({"text": text} for text in TEXTS),
        SINGLE,
        {"text": LONG},
        variant="static ",
        backend="auto",
    ),
    Kind(
        "embedder",
        JUDGE,
        write_embedder,
        PAIRS,
        FAILING_PAIRS | {"no_pair": {"text": "alone"}},
        {"text": "short", "text_pair": LONG},
    ),
    Kind(
        "classifier",
        JUDGE,
        write_reranker,
        (*PAIRS, {"text": "a text alone"}),
        FAILING_PAIRS,
        {"text": LONG, "text_pair": "short"},
        options={"activation": "raw"},
    ),
    Kind(
        "reranker",
        JUDGE,
        write_worded,
        PAIRS,
        FAILING_PAIRS | {"no_pair": {"text": "alone"}},
        {"text": "short", "text_pair": LONG},
        options={"prompt": "Is it the same?", "activation": "raw"},
        folder="Qwen3-Reranker-tiny",
    ),
    Kind(
        "extractor",
        EXTRACT,
        link_extractor,
        EXTRACTED,
        SINGLE,
        # Read in windows, but spans are found below whose many tokens nothing can be asked.
        {"text": EXTRACTED[1]["text"] * 18},
        options={"extract_schema": json.dumps(SCHEMA, ensure_ascii=False)},
    ),
    Kind(
        "extractor",
        EXTRACT,
        link_gliner,
        tuple({"text": text} for text in GLINER_KNOWN["texts"]),
        SINGLE,
        {"text": "word" * 400},  # a single word, of more tokens than a window has
        options={"extract_schema": json.dumps(dict.fromkeys(GLINER_KNOWN["labels"]))},
        variant="gliner ",
    ),
    # The worked example of docs/TASKS.md, whose rows stand in no table of the house.
    Kind(
        "tagger",
        TAG,
        write_tagger,
        tuple({"text": text} for text in TEXTS),
        SINGLE,
        {"text": LONG},
        factory="tests.tagging.encoder:load_tagger",
        register=register,
        pooling="mean",  # no table says how such a model is encoded
    ),
)
