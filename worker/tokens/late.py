"""Late chunking: the vector of a passage is the mean of the states that its tokens have in the whole text.

A text is read once for all of its passages, or in the windows of worker.tokens.passages if it is longer than the model
reads. A token's state is taken from the first window that has it. The first passage of a text also has the special
tokens and the prompt before it, and the last passage the special tokens after it. Source: Günther et al., Late
Chunking, arXiv 2409.04701, and its authors' code, github.com/jina-ai/late-chunking.
"""

from collections.abc import Sequence

import numpy as np

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import (
    EMPTY_TEXT,
    ITEM_ERROR_CODES,
    PASSAGE_NOT_FOUND,
    PLACE_MARK,
    ItemFailure,
    find_side_failure,
    split_pair,
)
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.tokens.passages import PassagedTexts, Pieces, cut_passages
from worker.tokens.tokenized import INPUT_IDS, SPANS, TokenizedTexts
from worker.tokens.tokenizer import Tokenizer


def read_passages(
    tokenizer: Tokenizer, card: ModelCard, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int
) -> tuple[PassagedTexts, dict[int, ItemFailure]]:
    """Return the tokens of n distinct items, and the failures among them.

    Each is a passage with its text, or a text that is a single passage.
    """
    failures: dict[int, ItemFailure] = {}
    # The passages of each text: the item, and from which character up to which it is.
    wholes: dict[str, list[tuple[int, int, int]]] = {}
    for index, text in enumerate(texts):
        if (failure := find_side_failure(text, max_chars)) is not None:
            failures[index] = failure
            continue
        passage, *rest = (side.decode() for side in split_pair(text) if side is not None)
        (whole,) = rest or [passage]
        marked = f"{PLACE_MARK}{passage}"
        start = whole.find(marked if marked in whole else passage)
        if start < 0:
            failures[index] = ItemFailure(PASSAGE_NOT_FOUND, ITEM_ERROR_CODES[PASSAGE_NOT_FOUND])
            continue
        found = index, start, start + len(passage)
        wholes.setdefault(whole.replace(marked, passage, 1), []).append(found)
    ids, characters = tokenizer.encode_with_characters([spec.prompt + whole for whole in wholes])
    frame = tokenizer.frame(spec.prompt, spec.max_tokens, spec.passage_overlap)
    windows = cut_passages(TokenizedTexts({INPUT_IDS: ids}, np.zeros(len(ids), np.bool_), {}), frame)
    num_left_out = 0 if card.include_prompt else tokenizer.count_prompt_tokens(spec.prompt)
    pieces: list[tuple[int, int, int, int]] = []  # sequence, item, and tokens from and to in the sequence
    for number, passages in enumerate(wholes.values()):
        sequence, length = int(windows.offsets[number]), int(ids.lengths[number])
        num_prefix, end_of_text = tokenizer.num_prefix, length - frame.num_suffix
        # From which character each token of the text is, and up to which; those of the prompt end at 0 or before.
        bounds = characters.row(number).reshape(-1, 2)[num_prefix:end_of_text] - len(spec.prompt)
        begins, ends = np.maximum.accumulate(bounds).T
        # Window i gives the tokens limits[i] to limits[i + 1] of the text, which are at their place minus shifts[i].
        new = np.cumsum(windows.weights[sequence : int(windows.offsets[number + 1])])
        limits = np.concatenate(([0], new[:-1] + end_of_text - new[-1], [length]))
        shifts = new - new[0]
        for index, start, end in passages:
            first = num_prefix + int(np.searchsorted(ends, start, side="right"))
            last = num_prefix + int(np.searchsorted(begins, end))
            if sequence in windows.sequences.failures:
                failures[index] = windows.sequences.failures[sequence]
            elif first >= last:
                failures[index] = ItemFailure(EMPTY_TEXT, "the passage has no token that the model knows")
            else:
                is_first = first == num_prefix + np.searchsorted(ends, 0, side="right")
                span = num_left_out if is_first else first, length if last == end_of_text else last
                of_windows = np.searchsorted(limits, span[0], "right") - 1, np.searchsorted(limits, span[1])
                for window in range(*of_windows):
                    own = np.clip(span, *limits[window : window + 2]) - shifts[window]
                    pieces.append((sequence + window, index, *own.tolist()))
    # Each failed item gets an empty piece of an empty sequence, so that every item has one.
    num_sequences = len(windows.sequences)
    pieces += [(num_sequences, index, 0, 0) for index in failures]
    rows = np.array(sorted(pieces), np.int64).reshape(-1, 4)
    read, places, counts = np.unique(rows[:, 0], return_inverse=True, return_counts=True)
    known = windows.sequences.spread(range(num_sequences), num_sequences + 1)
    inputs = {
        INPUT_IDS: known.inputs[INPUT_IDS].take(read),
        SPANS: Ragged.from_lengths(rows[:, 2:].astype(np.int32).ravel(), 2 * counts),
    }
    order = np.argsort(rows[:, 1], kind="stable")
    ranks = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    late = PassagedTexts(
        TokenizedTexts(inputs, np.zeros(len(read), np.bool_), {}),
        np.searchsorted(rows[order, 1], np.arange(len(texts) + 1)),
        (rows[:, 3] - rows[:, 2])[order],
        Pieces(places[order], ranks[order], card.dimension),
    )
    return late, failures
