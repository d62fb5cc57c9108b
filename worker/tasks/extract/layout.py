"""Layout: windows as named inputs of one value a token. Knows tokens by their ids, and neither hints nor texts.

Positions restart in every path of a hint and in every type below it, and paths do not see one another, nor do the types
of one path. Instead of a matrix a token has two numbers, its path and its type: two tokens see one another where both
numbers are equal or one of them is 0, as a text's are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.ragged import Ragged
from worker.batching.batch import POSITION_IDS, PREFIX_BLOCKS, TYPE_SEGMENTS
from worker.tasks.extract.prompt_tokenizer import PromptTokenizer
from worker.tasks.extract.windows import Window
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

# One value a sequence: 1 where only the first token of the text is looked at. Left out where it is 0 for all.
IS_BLANK: Final = "is_blank"


@dataclass(frozen=True, slots=True, eq=False)
class PromptLayout:
    """Index arrays of all sequences together, int32. `is_whole[i]` is False where sequence i has a [PREFIX] without a
    [TYPE] beside others, as a text with [PREFIX] in it; the reference raises IndexError there.
    """

    position_ids: NDArray[np.int32]  # [total]
    prefix_blocks: NDArray[np.int32]  # [total], from 1; 0 outside
    type_segments: NDArray[np.int32]  # [total], from 1 in each sequence; 0 outside
    is_whole: NDArray[np.bool_]  # [n]


def lay_out(ids: Ragged, tokenizer: PromptTokenizer) -> PromptLayout:
    """Return the layout of sequences that begin with [CLS][PREFIX]. No step is taken a sequence."""
    tokens, starts = ids.covered, (ids.offsets[:-1] - ids.offsets[0])
    num_sequences, total = len(ids), len(tokens)
    place = np.arange(total)
    sequence = np.repeat(np.arange(num_sequences), ids.lengths)
    is_first = place == starts[sequence]
    is_prefix, is_type, is_sep = (
        (tokens == token) & ~is_first for token in (tokenizer.prefix_id, tokenizer.type_id, tokenizer.sep_id)
    )
    # The last special token before a token says what it belongs to.
    opened_at = np.maximum.accumulate(np.where(is_first | is_prefix | is_type | is_sep, place, 0))
    in_prefix, in_type, in_text = is_prefix[opened_at], is_type[opened_at], is_sep[opened_at]
    # Paths are counted over all sequences, so that one array holds something of each.
    path = np.cumsum(is_prefix)
    is_structure = in_prefix | in_type
    prefix_lengths = np.bincount(path[in_prefix], minlength=path[-1] + 1 if total else 1)
    positions = np.where(is_structure, place - opened_at + 1, 0)
    positions[in_type] += prefix_lengths[path[in_type]]
    positions = _continue_in_text(positions, in_text, sequence, starts)
    # A path reaches to the end of its last type, whatever stands between.
    last_of_path = np.full(len(prefix_lengths), -1)
    last_of_path[path[in_type]] = place[in_type]
    path_before = path[starts] if total else starts
    block = path - path_before[sequence]
    segment = np.cumsum(is_type)
    segment -= segment[starts][sequence] if total else 0
    has_path = block > 0
    paths = np.bincount(sequence[is_prefix], minlength=num_sequences)
    endless = is_prefix & (last_of_path[path] < 0)
    return PromptLayout(
        _in_written_order(positions, in_text, sequence).astype(np.int32),
        np.where(has_path & (place <= last_of_path[path]), block, 0).astype(np.int32),
        np.where(in_type, segment, 0).astype(np.int32),
        (paths < 2) | (np.bincount(sequence[endless], minlength=num_sequences) == 0),
    )


def find_inputs(
    windows: Sequence[Window], layout: PromptLayout, is_blank: NDArray[np.int32]
) -> dict[str, Ragged]:
    """Return the inputs of the windows by name, a row each; `is_blank` is [n]."""
    ids = join_ids(windows)
    inputs = {
        INPUT_IDS: ids,
        TOKEN_TYPE_IDS: Ragged.from_rows([window.type_ids for window in windows], np.int32),
        POSITION_IDS: Ragged(layout.position_ids, ids.offsets),
        PREFIX_BLOCKS: Ragged(layout.prefix_blocks, ids.offsets),
        TYPE_SEGMENTS: Ragged(layout.type_segments, ids.offsets),
    }
    if is_blank.any():
        inputs[IS_BLANK] = Ragged.from_scalars(is_blank)
    return inputs


def join_ids(windows: Sequence[Window]) -> Ragged:
    return Ragged.from_rows([window.tokens.ids for window in windows], np.int32)


def _continue_in_text(
    positions: NDArray[np.int64],
    in_text: NDArray[np.bool_],
    sequence: NDArray[np.int64],
    starts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return positions [total] in which text tokens count on from the greatest position of the hint."""
    if not len(positions):
        return positions
    greatest = np.maximum.reduceat(positions, starts)
    number = np.cumsum(in_text)
    before: NDArray[np.int64] = number[starts] - in_text[starts]
    return np.where(in_text, greatest[sequence] + number - before[sequence], positions)


def _in_written_order(
    positions: NDArray[np.int64], in_text: NDArray[np.bool_], sequence: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return positions [total] in the order of the reference: those of the hint first, then those of the text.

    So tokens of a text that were read as structure move those of others. Else the order is that of the tokens.
    """
    return positions[np.argsort(2 * sequence + in_text, kind="stable")]
