"""Windows: a hint and as much of a text as fits beside it, to the end of the text. Knows no layout, no results."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.tasks.prompt_size import FRAME_TOKENS, MAX_WINDOW_TOKENS
from worker.tasks.extract.hints import Hint
from worker.tasks.extract.prompt_tokenizer import PromptTokenizer, Tokens


class HintTooLong(Exception):
    """The hint leaves no room for the text."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One sequence: [CLS] hint [SEP] part of the text [SEP]. Offsets are in the hint's text or in the text's.

    `num_hint_tokens` is the number of type ids 0; text tokens are those behind, the closing [SEP] with them.
    `grows_at` is where the text has the classification token put in before this window is read.
    """

    hint: Hint
    tokens: Tokens  # [L], special ones with offsets (0, 0)
    type_ids: NDArray[np.int32]  # [L]
    num_hint_tokens: int
    grows_at: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def cut_windows(
    hint: Hint, text: str, tokens: Tokens, tokenizer: PromptTokenizer, stride: int
) -> Iterator[Window]:
    """Yield the text's windows with this hint; those of classified texts do not overlap. Raises HintTooLong."""
    room = MAX_WINDOW_TOKENS - len(hint.tokens) - FRAME_TOKENS
    if room <= stride:
        raise HintTooLong(f"a prompt of {len(hint.tokens)} tokens leaves no room for the text")
    if not text:
        joined = _join_tokens(tokenizer, hint.tokens)
        yield _lay_window(hint, joined, np.zeros(len(joined), np.int32), tokenizer)
        return
    for start in range(0, max(1, len(tokens) - stride), room - stride):
        joined = _join_tokens(tokenizer, hint.tokens, tokens.part(start, start + room))
        type_ids = np.zeros(len(joined), np.int32)
        type_ids[len(hint.tokens) + 2 :] = tokenizer.text_type_id
        if start:
            # Where the library cuts, the template's type ids reach only the first window and [SEP]: the text of later
            # ones has 1 whatever the template says. With a template of zeros [SEP] is then a hint token, by number.
            type_ids[len(hint.tokens) + 2 : -1] = 1
        yield _lay_window(hint, joined, type_ids, tokenizer)


def put_token_in(window: Window, number: int, token: str, tokenizer: PromptTokenizer) -> Window:
    """Return window `number` (1 or later) with the classification token first in the text and the last token gone.

    Offsets move by what all windows before have put in, though not all of it stands before this one.
    """
    ids = window.tokens.ids
    first = int(np.flatnonzero(ids == tokenizer.sep_id)[0]) + 1
    grows_at = int(window.tokens.starts[first])
    before, inside, last = window.tokens.part(0, first), slice(first, len(ids) - 2), slice(len(ids) - 1, None)
    shift = number * len(token)
    tokens = Tokens(
        np.concatenate([before.ids, [tokenizer.classify_ids[token]], ids[inside], ids[last]]).astype(
            np.int32
        ),
        _shift_offsets(before.starts, grows_at + shift - len(token), window.tokens.starts, inside, shift),
        _shift_offsets(before.ends, grows_at + shift, window.tokens.ends, inside, shift),
    )
    return replace(window, tokens=tokens, grows_at=grows_at)


def rebuild_type_ids(ids: NDArray[np.int32], sep_id: int) -> NDArray[np.int32]:
    """Return type ids [L] for tokenizers that give 0 everywhere: 1 from behind the first [SEP] of a hint."""
    is_sep = ids == sep_id
    begins = np.zeros(len(ids), dtype=np.int32)
    begins[1:] = is_sep[:-1] & ~is_sep[1:]
    return np.minimum(np.cumsum(begins), 1).astype(np.int32)


def _lay_window(
    hint: Hint, tokens: Tokens, type_ids: NDArray[np.int32], tokenizer: PromptTokenizer
) -> Window:
    if not type_ids.any():
        type_ids = rebuild_type_ids(tokens.ids, tokenizer.sep_id)
    return Window(hint, tokens, type_ids, int((type_ids == 0).sum()))


def _join_tokens(tokenizer: PromptTokenizer, *parts: Tokens) -> Tokens:
    """Return [CLS], and each part with [SEP] behind it."""
    cls, sep = (_special(token) for token in (tokenizer.cls_id, tokenizer.sep_id))
    joined = [cls]
    for part in parts:
        joined += [part, sep]
    return Tokens.join(joined, [0] * len(joined))


def _special(token_id: int) -> Tokens:
    nowhere = np.zeros(1, np.int32)
    return Tokens(np.array([token_id], np.int32), nowhere, nowhere)


def _shift_offsets(
    before: NDArray[np.int32], token: int, offsets: NDArray[np.int32], inside: slice, shift: int
) -> NDArray[np.int32]:
    return np.concatenate([before, [token], offsets[inside] + shift, offsets[-1:]]).astype(np.int32)
