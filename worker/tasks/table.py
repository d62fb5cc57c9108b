"""The tasks that a worker does, by the kind of its model, of which vectormill.models.specs has a row each."""

from collections.abc import Callable, Mapping

from vectormill.domain.tasks.task import EMBED, EXTRACT, JUDGE
from vectormill.models.model_card import ModelCard
from vectormill.models.specs import find_kind
from worker.tasks.course import WorkerTask
from worker.tasks.embed import Embed
from worker.tasks.extract.task import Extract
from worker.tasks.score import Classify, Compare
from worker.tokens.tokenizer import Tokenizer
from worker.tokens.word_cache import WordTally

Tasks = Mapping[str, WorkerTask]


def make_tasks(
    card: ModelCard, gives_vectors: Callable[[], bool] = lambda: True, words: WordTally | None = None
) -> Tasks:
    """By name, those that this model is for; `gives_vectors` as in Embed, words are counted in `words`."""
    return TASKS_OF_KIND[find_kind(card).name](card, gives_vectors, words or WordTally())


def _of_embedder(card: ModelCard, gives_vectors: Callable[[], bool], words: WordTally) -> Tasks:
    embed = Embed(card, Tokenizer(card.path, lowercase=card.lowercase, words=words), gives_vectors)
    return {EMBED: embed, JUDGE: Compare(embed)}


def _of_classifier(card: ModelCard, gives_vectors: Callable[[], bool], words: WordTally) -> Tasks:
    return {JUDGE: Classify(Tokenizer(card.path, lowercase=card.lowercase, words=words), card.max_tokens)}


def _of_extractor(card: ModelCard, gives_vectors: Callable[[], bool], words: WordTally) -> Tasks:
    return {EXTRACT: Extract(card.path)}


TASKS_OF_KIND: dict[str, Callable[[ModelCard, Callable[[], bool], WordTally], Tasks]] = {
    "embedder": _of_embedder,
    "classifier": _of_classifier,
    "extractor": _of_extractor,
}
