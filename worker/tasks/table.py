"""Make the tasks of a model by its kind. The kinds themselves are in vectormill/models/specs.py."""

from collections.abc import Callable, Mapping
from functools import partial

from vectormill.domain.task import EMBED, EXTRACT, JUDGE
from vectormill.models.model_card import GLINER, ModelCard
from vectormill.models.specs import find_kind
from worker.tasks.embed import Embed
from worker.tasks.extract.extract import Extract
from worker.tasks.extract.extraction import RexUniNLU
from worker.tasks.extract.gliner import Gliner
from worker.tasks.score import Classify, Compare, Rerank
from worker.tasks.task import WorkerTask
from worker.tokens.tokenizer import StaticTokenizer, Tokenizer
from worker.tokens.word_cache import WordTally

Tasks = Mapping[str, WorkerTask]
MakeTokenizer = Callable[[], Tokenizer]


def make_tasks(
    card: ModelCard,
    gives_vectors: Callable[[], bool] = lambda: True,
    words: WordTally | None = None,
    num_free_cores: int = 0,
) -> Tasks:
    """Return the model's tasks by name. `gives_vectors` is passed to Embed, the others to Tokenizer."""
    make = partial(Tokenizer, card.path, lowercase=card.lowercase, special=card.special)
    tokenizer = partial(
        make if card.static is None else partial(StaticTokenizer, card),
        words=words,
        num_free_cores=num_free_cores,
    )
    return TASKS_OF_KIND[find_kind(card).name](card, tokenizer, gives_vectors)


def make_embedder_tasks(
    card: ModelCard, make_tokenizer: MakeTokenizer, gives_vectors: Callable[[], bool]
) -> Tasks:
    embed = Embed(card, make_tokenizer(), gives_vectors)
    return {EMBED: embed, JUDGE: Compare(embed)}


def make_judge_tasks(card: ModelCard, make_tokenizer: MakeTokenizer, _: Callable[[], bool]) -> Tasks:
    template = None if card.classifier is None else card.classifier.template
    if template is None:
        return {JUDGE: Classify(make_tokenizer(), card.max_tokens)}
    return {JUDGE: Rerank(make_tokenizer(), card.max_tokens, template)}


TASKS_OF_KIND: dict[str, Callable[[ModelCard, MakeTokenizer, Callable[[], bool]], Tasks]] = {
    "embedder": make_embedder_tasks,
    "classifier": make_judge_tasks,
    "reranker": make_judge_tasks,
    "extractor": lambda card, *_: {
        EXTRACT: Extract(Gliner(card) if card.extractor == GLINER else RexUniNLU(card.path))
    },
}
