"""Turn a job's options into an EncodingSpec, by the kind of its model and by the task.

Each kind of model has a row in MODEL_KINDS: how to recognize it, and its tasks. The workers' side of each
kind is in worker/tasks/table.py. docs/TASKS.md describes how to add a task.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from vectormill.domain.encoding import (
    DEFAULT_PASSAGE_OVERLAP_SHARE,
    FAIL,
    IN_WINDOWS,
    LATE,
    LATE_POOLING,
    PASSAGES,
    TRUNCATE,
    EncodingOptions,
    EncodingSpec,
)
from vectormill.domain.errors import InvalidOption
from vectormill.domain.options import list_options
from vectormill.domain.schema import parse_schema
from vectormill.domain.task import DENSE, EMBED, EXTRACT, JUDGE, MULTI_VECTOR, OUTPUTS, SPARSE
from vectormill.domain.vector_type import FLOAT_TYPES
from vectormill.models.model_card import GLINER, ModelCard
from vectormill.models.model_entry import SMALLEST_MAX_TOKENS
from vectormill.models.prompt_room import require_room
from vectormill.models.suggestions import suggest_model

# The minimum for two texts together: RoBERTa has four special tokens. With fewer, every pair of long texts
# has the same score.
SMALLEST_PAIR_TOKENS: Final = 6
CHOICES: Final = {
    option.name: option.help.choices for option in list_options(EncodingOptions) if option.help.choices
}

MakeSpec = Callable[[ModelCard, EncodingOptions], EncodingSpec]


@dataclass(frozen=True, slots=True)
class TaskRow:
    """A task that a kind of model supports: the options that affect it and the function making its spec."""

    options: tuple[str, ...]
    make: MakeSpec


@dataclass(frozen=True, slots=True)
class ModelKind:
    """One kind of model. A job that names no task gets the first of `tasks`."""

    name: str
    recognizes: Callable[[ModelCard], bool]
    tasks: Mapping[str, TaskRow]


def make_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """Return the spec, which holds everything that determines a job's results.

    Raise InvalidOption with the limits, and UnsupportedModel if the model's files have a setting that cannot be
    honoured.
    """
    card.require_honoured()
    for name, choices in CHOICES.items():
        chosen = getattr(options, name)
        if chosen not in (None, *choices):
            raise InvalidOption(f"{name} must be one of {', '.join(choices)}; got {chosen!r}.")
    tasks = find_kind(card).tasks
    task = options.task or find_own_task(card)
    if task not in tasks:
        raise InvalidOption(
            f"The model {card.name!r} supports the task {' or '.join(tasks)}, not {task}.{suggest_model(task)}"
        )
    own = list_own_options(card, task)
    for option in list_options(EncodingOptions):
        if option.name not in own and getattr(options, option.name) is not None:
            raise InvalidOption(
                f"{option.name} has no effect for the task {task} with the model {card.name!r}; omit it."
            )
    spec = tasks[task].make(card, options)
    require_room(card, spec)
    return spec


def find_kind(card: ModelCard) -> ModelKind:
    return next(kind for kind in MODEL_KINDS if kind.recognizes(card))


def list_own_options(card: ModelCard, task: str) -> tuple[str, ...]:
    """Return the options that affect this task of a model; any other option is refused."""
    row = find_kind(card).tasks.get(task)
    return ("task", *(() if row is None else row.options))


def find_own_task(card: ModelCard) -> str:
    """Return the default task of a model."""
    return next(iter(find_kind(card).tasks))


def name_model(card: ModelCard) -> dict[str, Any]:
    names = {"model": card.name, "revision": card.revision, "pooling": "+".join(card.pooling)}
    return {**names, "aliases": card.aliases}


def settle_spec(card: ModelCard, stored: EncodingSpec) -> EncodingSpec:
    """Return a stored spec as the model's card names it now, with its former names if it gives the same vectors."""
    if stored.revision not in card.revisions or card.reads_as_before(stored.revision):
        return stored
    return replace(stored, revision=card.revision, aliases=() if card.rereads else card.aliases)


def make_vector_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """Return the spec for vectors of an embedding model. Raise InvalidOption for values it cannot have."""
    own = name_model(card)
    outputs = _choose_outputs(card, options)
    max_tokens = choose_max_tokens(card, options, SMALLEST_MAX_TOKENS)
    long_texts = TRUNCATE if options.long_texts is None else options.long_texts
    if outputs != (DENSE,):
        _check_outputs(outputs, options)
    elif long_texts == LATE and (f"{own['pooling']}/{LATE}" != LATE_POOLING or card.static is not None):
        raise InvalidOption(
            f"long_texts={LATE!r} takes the mean of a passage's states, which the model {card.name!r} does not pool "
            f"so; use another model, or long_texts={PASSAGES!r}."
        )
    if long_texts == LATE:
        own["pooling"] = LATE_POOLING
    dimensions, normalize = 0, False
    if DENSE in outputs:
        usual = card.default_dimensions or card.dimension
        dimensions = min(usual, card.dimension) if options.dimensions is None else options.dimensions
        if not 1 <= dimensions <= card.dimension:
            raise InvalidOption(
                f"dimensions must be from 1 to {card.dimension} for model {card.name!r}; got {dimensions}."
            )
        normalize = card.normalize if options.normalize is None else options.normalize
    spec = EncodingSpec(
        **own,
        normalize=normalize,
        dimensions=dimensions,
        prompt=_find_prompt(card, options),
        max_tokens=max_tokens,
        long_texts=long_texts,
        passage_overlap=_choose_overlap(long_texts, options.passage_overlap, max_tokens),
        vector_type=options.vector_type,
        outputs=",".join(outputs),
        sparse_dimensions=card.sparse_dimensions if SPARSE in outputs else 0,
        token_dimensions=card.token_dimensions if MULTI_VECTOR in outputs else 0,
    )
    # Vectors of length 1 have equal similarities of both kinds, and signs have no length.
    has_length = DENSE in outputs and not normalize and card.similarity in spec.kept_type.distances
    return replace(spec, similarity=card.similarity) if has_length else spec


def make_extract_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """Return the spec of an extraction, which reads texts of any length in windows.

    Raise InvalidOption for values it cannot have.
    """
    if options.extract_schema is None:
        raise InvalidOption(
            f'The {EXTRACT} task requires a schema, for example {{"person": null, "company": {{"founder": null}}}}.'
        )
    schema = parse_schema(options.extract_schema)
    nested = next((name for name, children in schema.items() if children), None)
    if card.extractor == GLINER and nested is not None:
        raise InvalidOption(
            f"schema.{nested}: {card.name!r} is a {GLINER}, which finds spans of labels and nothing below them; name "
            'all labels on one level, for example {"company": null, "person": null}.'
        )
    return EncodingSpec(
        **name_model(card),
        normalize=False,
        dimensions=0,
        prompt="",
        max_tokens=card.max_tokens,
        task=EXTRACT,
        extract_schema=json.dumps(schema, ensure_ascii=False, separators=(",", ":")),
        confidences=bool(options.confidences),
    )


def make_score_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """Return the spec for scores of a classifier, or of comparing two vectors.

    Raise InvalidOption for values it cannot have.
    """
    classifier = card.classifier
    if card.unread:
        raise InvalidOption(
            f"The model {card.name!r} cannot compute scores: with the pooling set for it, the part that scores is "
            f"ignored ({card.unread}), and the cosine of its vectors is a different number.{suggest_model(JUDGE)}"
        )
    if classifier is None and DENSE not in card.outputs:
        raise InvalidOption(
            f"The model {card.name!r} cannot compute scores: they are cosines of dense vectors, and it has none."
            f"{suggest_model(JUDGE)}"
        )
    template = None if classifier is None else classifier.template
    if options.prompt and template is not None and not template.takes_instructions:
        raise InvalidOption(f"The template of the model {card.name!r} has no place for a prompt; omit it.")
    max_tokens = choose_max_tokens(
        card, options, SMALLEST_MAX_TOKENS if classifier is None else SMALLEST_PAIR_TOKENS
    )
    if options.long_texts in IN_WINDOWS:
        raise InvalidOption(f"A {JUDGE} applies to whole texts: long_texts must be {TRUNCATE!r} or {FAIL!r}.")
    return EncodingSpec(
        **name_model(card),
        normalize=True,
        dimensions=1 if classifier is None else len(classifier.labels),
        prompt=_find_prompt(card, options),
        max_tokens=max_tokens,
        long_texts=options.long_texts or TRUNCATE,
        task=JUDGE,
        # A model without labels reads pairs alone.
        labels=() if classifier is None or template is not None else classifier.labels,
        activation="" if classifier is None else options.activation or classifier.activation,
    )


def choose_max_tokens(card: ModelCard, options: EncodingOptions, least: int) -> int:
    """Return how many tokens are read: the model's maximum, or fewer if requested.

    Raise InvalidOption if the number is below `least` or above the maximum.
    """
    max_tokens = card.max_tokens if options.max_tokens is None else options.max_tokens
    if not least <= max_tokens <= card.max_tokens:
        raise InvalidOption(
            f"max_tokens must be from {least} to {card.max_tokens} for model {card.name!r}; got {max_tokens}."
        )
    return max_tokens


def _choose_outputs(card: ModelCard, options: EncodingOptions) -> tuple[str, ...]:
    """Return the requested outputs in the order of OUTPUTS; by default the model's first."""
    if options.outputs is None:
        return card.outputs[:1]
    named = {name.strip() for name in options.outputs.split(",")}
    if not named <= set(card.outputs):
        lacking = next((name for name in OUTPUTS if name in named - set(card.outputs)), "")
        suggested = suggest_model(lacking) if named <= set(OUTPUTS) else ""
        raise InvalidOption(
            f"outputs must be some of {', '.join(card.outputs)} for model {card.name!r}, separated by commas; "
            f"got {options.outputs!r}.{suggested}"
        )
    return tuple(name for name in OUTPUTS if name in named)


def _check_outputs(outputs: tuple[str, ...], options: EncodingOptions) -> None:
    """Raise InvalidOption for options that cannot be combined with other outputs than dense alone."""
    if options.long_texts in IN_WINDOWS:
        raise InvalidOption(
            f"long_texts={options.long_texts!r} averages dense vectors, which other outputs do not allow: it must be "
            f"{TRUNCATE!r} or {FAIL!r} with outputs={','.join(outputs)!r}."
        )
    if options.vector_type not in (None, *FLOAT_TYPES):
        raise InvalidOption(
            f"vector_type must be {' or '.join(sorted(FLOAT_TYPES))} with outputs={','.join(outputs)!r}; got "
            f"{options.vector_type}."
        )
    for name in ("normalize", "dimensions", "vector_type"):
        if DENSE not in outputs and getattr(options, name):
            raise InvalidOption(f"{name} has no effect without the output {DENSE}; omit it.")


def _find_prompt(card: ModelCard, options: EncodingOptions) -> str:
    if options.prompt is None:
        return card.default_prompt
    return card.prompts.get(options.prompt, options.prompt)


def _choose_overlap(long_texts: str, asked: int | None, max_tokens: int) -> int:
    """Return how many tokens neighbouring windows share; 0 if texts are not read in windows."""
    if long_texts not in IN_WINDOWS:
        if asked:
            raise InvalidOption(
                f"passage_overlap requires long_texts={PASSAGES!r} or {LATE!r}; omit it with long_texts={long_texts!r}."
            )
        return 0
    overlap = int(max_tokens * DEFAULT_PASSAGE_OVERLAP_SHARE) if asked is None else asked
    if not 0 <= overlap < max_tokens / 2:
        raise InvalidOption(
            f"passage_overlap must be less than half of max_tokens, from 0 to {(max_tokens - 1) // 2}; got {overlap}."
        )
    return overlap


_OF_LONG_TEXTS: Final = ("max_tokens", "long_texts", "passage_overlap")
_SCORE: Final = TaskRow(("prompt", "max_tokens", "long_texts", "activation"), make_score_spec)
# The first kind that recognizes a model applies.
MODEL_KINDS: list[ModelKind] = [
    ModelKind(
        "extractor",
        lambda card: card.is_extractor,
        {EXTRACT: TaskRow(("extract_schema", "confidences"), make_extract_spec)},
    ),
    ModelKind(
        "reranker",
        lambda card: card.classifier is not None and card.classifier.template is not None,
        {JUDGE: _SCORE},
    ),
    ModelKind("classifier", lambda card: card.classifier is not None, {JUDGE: _SCORE}),
    ModelKind(
        "embedder",
        lambda card: True,
        {
            EMBED: TaskRow(
                ("normalize", "dimensions", "prompt", *_OF_LONG_TEXTS, "vector_type", "outputs"),
                make_vector_spec,
            ),
            JUDGE: TaskRow(("prompt", "max_tokens", "long_texts"), make_score_spec),
        },
    ),
]
