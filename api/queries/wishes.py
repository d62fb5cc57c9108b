"""Wishes: what clients of other APIs say of the vectors they want, and the spec that it comes to. Knows no bodies."""

import functools
from dataclasses import dataclass
from typing import Final

from fastapi.concurrency import run_in_threadpool

from api.intake.options import refuse_unstorable
from vectormill.domain.encoding import EncodingOptions, EncodingSpec
from vectormill.domain.errors import InvalidOption
from vectormill.domain.tasks.task import EMBED
from vectormill.models.registry import Registry, make_spec

QUERY: Final = "query"
DOCUMENT: Final = "document"
# Under which names models keep the prompts of what is looked for, and of what is found.
PROMPT_NAMES: Final = {QUERY: ("query",), DOCUMENT: ("document", "passage")}
# A spec takes longer to make than to send, and most requests want the same.
SPECS_KEPT: Final = 256


@dataclass(frozen=True, slots=True)
class Wish:
    """None leaves the model's own habit. `prompt` is the name of a prompt or text; `input_type` one of PROMPT_NAMES."""

    model: str
    dimensions: int | None = None
    prompt: str | None = None
    input_type: str | None = None
    normalize: bool | None = None
    long_texts: str | None = None


async def find_spec(registry: Registry, wish: Wish) -> EncodingSpec:
    """Raises UnknownModel, InvalidOption, and ModelError when the model's files are away."""
    if registry.is_read(wish.model):
        return make_wished_spec(registry, wish)
    return await run_in_threadpool(make_wished_spec, registry, wish)


@functools.lru_cache(maxsize=SPECS_KEPT)
def make_wished_spec(registry: Registry, wish: Wish) -> EncodingSpec:
    """As find_spec, which may wait for a hub."""
    card = registry.card(wish.model)
    try:
        prompt = refuse_unstorable(wish.prompt)
    except ValueError as error:
        raise InvalidOption(f"prompt cannot be put before a text: {error}.") from error
    if wish.input_type is not None:
        if prompt is not None:
            raise InvalidOption(
                "input_type chooses one of the model's prompts, and prompt is given too; leave one out."
            )
        prompt = next((name for name in PROMPT_NAMES[wish.input_type] if name in card.prompts), None)
    return make_spec(
        card,
        EncodingOptions(
            normalize=wish.normalize,
            dimensions=wish.dimensions,
            prompt=prompt,
            long_texts=wish.long_texts,
            task=EMBED,
        ),
    )
