"""The room that a prompt leaves for a text among the tokens that a model reads of it."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.errors import InvalidOption, ModelError
from vectormill.models.model_card import ModelCard

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_PROMPT_CHARS: Final = 50_000
MOST_SHOWN_CHARS: Final = 60
# More special tokens than any model puts around a text.
MOST_SPECIAL: Final = 16
# A token has at least one byte. Normalization, which leaves ASCII as short as it is, makes at most so many of one.
MOST_PER_BYTE: Final = 12


def leaves_room(spec: EncodingSpec) -> bool:
    """Return True if the prompt is so short that it leaves room for a text, whatever its tokens are."""
    most = len(spec.prompt.encode(errors="replace")) * (1 if spec.prompt.isascii() else MOST_PER_BYTE)
    return not spec.prompt or most + MOST_SPECIAL < spec.max_tokens


def require_room(card: ModelCard, spec: EncodingSpec) -> None:
    """Raise InvalidOption if the prompt and the special tokens fill all that the model reads of a text.

    Templates, and marks of queries, are left to the worker.
    """
    if leaves_room(spec) or card.token_head is not None:
        return
    if len(spec.prompt) > MOST_PROMPT_CHARS:
        raise InvalidOption(
            f"The prompt has {len(spec.prompt):,} characters, more than {MOST_PROMPT_CHARS:,}."
        )
    folder = card.path / (card.static.folder if card.static else "")
    num_own = _count(folder, card.revision, spec.prompt.lower() if card.lowercase else spec.prompt)
    num_around = num_own + len(card.special.prefix) + len(card.special.suffix)
    if num_own and num_around >= spec.max_tokens:
        why = tell_no_room(spec.prompt, num_around, spec.max_tokens)
        raise InvalidOption(f"No text can be encoded: {why}.")


def tell_no_room(prompt: str, num_around: int, max_tokens: int) -> str:
    """Return the refusal of a prompt that has so many tokens with the special ones."""
    return (
        f"the prompt {prompt[:MOST_SHOWN_CHARS]!r} and the special tokens are {num_around} tokens, and max_tokens is "
        f"{max_tokens}, which leaves no room for the text; use a shorter prompt, or a larger max_tokens (of a "
        "collection by a re-index)"
    )


def open_tokenizer(path: Path) -> "Tokenizer | None":
    """Return the tokenizer of a tokenizer.json, which neither pads nor cuts; None without one. Raise ModelError."""
    from tokenizers import Tokenizer  # imported here, because few requests count tokens

    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"The file {path} cannot be read: {error}.") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@lru_cache(maxsize=100)
def _count(folder: Path, _: str, prompt: str) -> int:
    """Return the number of a prompt's own tokens; 0 if no tokenizer.json tells."""
    tokenizer = open_tokenizer(folder / "tokenizer.json")
    return 0 if tokenizer is None else len(tokenizer.encode(prompt, add_special_tokens=False))
