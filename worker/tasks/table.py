"""The tasks that a model can be given: those of the domain, as this worker does them."""

from collections.abc import Callable, Mapping

from vectormill.domain.tasks.task import EMBED, EXTRACT, JUDGE
from vectormill.models.model_card import ModelCard
from worker.tasks.course import WorkerTask
from worker.tasks.embed import Embed
from worker.tasks.extract.task import Extract
from worker.tasks.score import Classify, Compare
from worker.tokens.tokenizer import Tokenizer


def make_tasks(card: ModelCard, gives_vectors: Callable[[], bool] = lambda: True) -> Mapping[str, WorkerTask]:
    """By name, those that this model is for; `gives_vectors` as in Embed."""
    if card.is_extractor:
        return {EXTRACT: Extract(card.path)}
    tokenizer = Tokenizer(card.path, lowercase=card.lowercase)
    if card.classifier is not None:
        return {JUDGE: Classify(tokenizer, card.max_tokens)}
    embed = Embed(card, tokenizer, gives_vectors)
    return {EMBED: embed, JUDGE: Compare(embed)}
