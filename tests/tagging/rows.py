"""Tag, the worked example of docs/TASKS.md: its rows, which in the house itself stand in three tables."""

from collections.abc import Callable, Mapping

import pytest

from tests.tagging.task import Tag
from vectormill.domain.encoding import PASSAGES, TRUNCATE, EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.task import RECORD, TASKS, Task
from vectormill.models.model_card import ModelCard
from vectormill.models.model_entry import SMALLEST_MAX_TOKENS
from vectormill.models.specs import (
    MODEL_KINDS,
    ModelKind,
    TaskRow,
    choose_max_tokens,
)
from worker.tasks.table import TASKS_OF_KIND
from worker.tasks.task import WorkerTask
from worker.tokens.tokenizer import Tokenizer

TAG = "tag"
TASK = Task(TAG, "a label for each span of a text", RECORD)


def make_tag_spec(card: ModelCard, options: EncodingOptions) -> EncodingSpec:
    """Everything that decides the records of a job. Raises InvalidOption."""
    if options.long_texts == PASSAGES:
        raise InvalidOption("A text is tagged whole: long_texts is 'truncate' or 'fail'.")
    return EncodingSpec(
        model=card.name,
        revision=card.revision,
        pooling="+".join(card.pooling),
        normalize=False,
        dimensions=0,
        prompt="",
        max_tokens=choose_max_tokens(card, options, SMALLEST_MAX_TOKENS),
        long_texts=options.long_texts or TRUNCATE,
        task=TAG,
    )


KIND = ModelKind(
    "tagger",
    lambda card: card.architecture.endswith("ForTokenClassification"),
    {TAG: TaskRow(("max_tokens", "long_texts"), make_tag_spec)},
)


def make_tagger_tasks(
    card: ModelCard, gives_vectors: Callable[[], bool], make_tokenizer: Callable[[], Tokenizer]
) -> Mapping[str, WorkerTask]:
    return {TAG: Tag(card)}


def register(patch: pytest.MonkeyPatch) -> None:
    """As if the rows stood where they belong."""
    patch.setitem(TASKS, TAG, TASK)
    patch.setattr("vectormill.models.specs.MODEL_KINDS", [KIND, *MODEL_KINDS])
    patch.setitem(TASKS_OF_KIND, KIND.name, make_tagger_tasks)
