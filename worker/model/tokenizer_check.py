"""The check of a tokenizer: that ours gives the tokens that transformers gives. For the model's process alone."""

import logging

from vectormill.domain.errors import UnsupportedModel
from vectormill.models.model_card import ModelCard
from vectormill.models.special_tokens import has_code, read_special_tokens
from worker.model.classifiers.published import is_published
from worker.model.runtime import transformers
from worker.tokens.reference import Reference
from worker.tokens.tokenizer import SAMPLE

logger = logging.getLogger(__name__)


def check_tokenizer(card: ModelCard) -> None:
    """Compare `tokenizer.json` with AutoTokenizer on texts of many scripts. Raises UnsupportedModel where they differ.

    A tokenizer by code of its own is not compared: its code is not run, and a table says what it adds.
    """
    if is_published(card) or has_code(card.path):
        return
    flags = dict(read_special_tokens(card.name, card.path).flags)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(
            card.path, local_files_only=True, trust_remote_code=False, **flags
        )
    except (OSError, ValueError, KeyError, AttributeError, ImportError, TypeError) as error:
        logger.warning(
            "The tokenizer of %s was not compared with transformers', which cannot read it: %s",
            card.name,
            error,
        )
        return
    texts = [line for line in SAMPLE.read_text(encoding="utf-8").splitlines() if line]
    ours = Reference(card.path, lowercase=card.lowercase).encode(texts)
    # sentence-transformers lowers the case of a text before it is tokenized.
    given = [text.lower() for text in texts] if card.lowercase else texts
    for number, expected in enumerate(theirs(given, verbose=False)["input_ids"]):
        found = ours.row(number).tolist()
        if found != expected:
            raise UnsupportedModel(
                f"The tokenizer.json of model {card.name!r} gives other tokens than transformers' own class, such as "
                f"{found[:8]} instead of {expected[:8]} for {texts[number][:40]!r}. Write it anew where you trust it: "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)."
            )
