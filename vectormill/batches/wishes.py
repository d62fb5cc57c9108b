"""Wishes: what a body of a request says of the model and its options, and the spec that it comes to.

A body that is answered while somebody waits and one that is a line of a batch become the same wish.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, Final

from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.models.registry import Registry, make_spec

QUERY: Final = "query"
DOCUMENT: Final = "document"
# Under which names models keep the prompts of what is looked for, and of what is found.
PROMPT_NAMES: Final = {QUERY: ("query",), DOCUMENT: ("document", "passage")}
# A spec takes longer to make than to send, and most requests want the same.
SPECS_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class Wish:
    """A model's name and what is asked of it. `input_type` is one of PROMPT_NAMES, and chooses the prompt."""

    model: str
    options: EncodingOptions
    input_type: str | None = None

    def find(self, name: str) -> Any:
        """Give what was said of an option, or of input_type."""
        return self.input_type if name == "input_type" else getattr(self.options, name)


@functools.lru_cache(maxsize=SPECS_KEPT)
def make_wished_spec(registry: Registry, wish: Wish) -> EncodingSpec:
    """Make the spec of a wish. May wait for a hub.

    Raises UnknownModel, InvalidOption, and ModelError when the model's files are away.
    """
    card = registry.card(wish.model)
    options = wish.options
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in options.prompt or ""):
        raise InvalidOption(
            "prompt cannot be put before a text: it contains a NUL character or half of a UTF-16 surrogate pair."
        )
    if wish.input_type is not None:
        if options.prompt is not None:
            raise InvalidOption(
                "input_type chooses one of the model's prompts, and prompt is given too; leave one out."
            )
        named = next((name for name in PROMPT_NAMES[wish.input_type] if name in card.prompts), None)
        options = replace(options, prompt=named)
    return make_spec(card, options)
