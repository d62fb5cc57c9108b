"""Passages are overlapping windows of a text that is longer than the model reads. Their vectors become one.

Every window is as long as the model reads: the last one is moved back to end with the text. So each token is
read with as much context as possible, a batch of windows has no padding, and a text of one token too many
gets nearly the same vector as when it is cut. The price is at most one window's work more for each text than
with a short last window.

The vector of the text is the mean of its windows' vectors, each weighted by the number of its tokens that no
earlier window has: every token of the text counts once, whatever the overlap. Weighting the vectors of a long
text's parts by their length is what OpenAI's cookbook does ("Embedding texts that are longer than the model's
maximum context length"), there with parts that do not overlap. The mean is taken of the model's raw vectors,
and is normalized and cut to fewer dimensions once, at the end. So with mean pooling a model returns the mean
over all tokens of the text, `normalize` changes a vector's length and never its direction, and fewer
dimensions are the leading ones of the whole vector.

Late chunking gives vectors of passages instead: the vector of a passage is the mean of the states that its tokens have
in the whole text. A text is read once for all of its passages, or in windows if it is longer than the model reads. A
token's state is taken from the first window that has it. The first passage of a text also has the special tokens and
the prompt before it, and the last passage the special tokens after it. Source: Günther et al., Late Chunking,
arXiv 2409.04701, and its authors' code, github.com/jina-ai/late-chunking.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.jobs.item import (
    EMPTY_TEXT,
    ITEM_ERROR_CODES,
    PASSAGE_NOT_FOUND,
    PLACE_MARK,
    TOO_MANY_TOKENS,
    ItemFailure,
    find_side_failure,
    split_pair,
)
from vectormill.models.model_card import ModelCard
from vectormill.ragged import Ragged
from worker.tokens.tokenized import INPUT_IDS, SPANS, TokenizedTexts
from worker.tokens.tokenizer import PassageFrame, Tokenizer

# Limits what one text can take: 8192 windows of 256 tokens are 8 MiB of ids and, with 1024 dimensions, 32 MiB
# of vectors. A text of a million characters, the default limit, has 4,505 windows if each character is a
# token.
MAX_PASSAGES: Final = 8192
# The smallest share of a window that must be new, so that at most four times the text is computed.
SMALLEST_NEW_SHARE: Final = 1 / 4


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of sequences: the sequence of each, and its rank among those in whose row of bytes its vector is."""

    sequences: NDArray[np.int64]  # [pieces]
    ranks: NDArray[np.int64]  # [pieces]
    dimension: int

    def take(self, results: Ragged) -> NDArray[np.float32]:
        """Return the vectors [pieces, dimension], with zeros for those of a sequence that failed."""
        vectors = results.covered.view(np.float32).reshape(-1, self.dimension)
        places = results.offsets[self.sequences] // (4 * self.dimension) + self.ranks
        places[results.lengths[self.sequences] == 0] = len(vectors)
        taken: NDArray[np.float32] = np.append(vectors, np.zeros((1, self.dimension), np.float32), axis=0)[
            places
        ]
        return taken


@dataclass(frozen=True, slots=True)
class PassagedTexts:
    """Texts as sequences, of which text i has offsets[i]:offsets[i + 1], or pieces of them.

    Each text has at least one; a text that failed has one without ids. `weights` counts the tokens of each so that
    each token of a text counts once.
    """

    sequences: TokenizedTexts
    offsets: NDArray[np.int64]  # [n + 1]
    weights: NDArray[np.int64]  # [sequences or pieces]
    pieces: Pieces | None = None  # None if each is a whole sequence

    @classmethod
    def whole(cls, texts: TokenizedTexts) -> "PassagedTexts":
        """Return every text as one sequence."""
        return cls(texts, np.arange(len(texts) + 1), texts.lengths)

    @property
    def is_whole(self) -> bool:
        """Return True if each text is a single sequence."""
        return len(self.weights) == len(self.offsets) - 1

    @property
    def num_passages(self) -> NDArray[np.int32]:
        """Return the number of windows [n] of each text; 0 for a text that is a single sequence."""
        counts = np.diff(self.offsets)
        return np.where(counts > 1, counts, 0).astype(np.int32)

    @property
    def num_tokens(self) -> NDArray[np.int32]:
        """Return how many tokens [n] the model reads of each text. Repeated tokens count each time."""
        lengths = self.sequences.lengths if self.pieces is None else self.weights
        return (lengths if self.is_whole else np.add.reduceat(lengths, self.offsets[:-1])).astype(np.int32)

    @property
    def truncated(self) -> NDArray[np.bool_]:
        """Return which texts [n] were truncated."""
        firsts = self.offsets[:-1]
        return self.sequences.truncated[firsts if self.pieces is None else self.pieces.sequences[firsts]]

    def join_vectors(self, results: Ragged) -> NDArray[np.float32]:
        """Join the rows of sequences into vectors [n, dim]. The vector of a single sequence is not changed."""
        vectors: NDArray[np.float32] = results.matrix if self.pieces is None else self.pieces.take(results)
        if self.is_whole:
            return vectors
        joined = vectors[self.offsets[:-1]]
        for text in np.flatnonzero(self.num_passages).tolist():
            rows = slice(self.offsets[text], self.offsets[text + 1])
            weights = self.weights[rows].astype(np.float64)
            joined[text] = weights @ vectors[rows].astype(np.float64) / weights.sum()
        return joined

    def join_failures(self, failures: Mapping[int, ItemFailure]) -> dict[int, ItemFailure]:
        """Return the failures of texts. A text fails with the error of its first sequence that failed."""
        joined: dict[int, ItemFailure] = {}
        for sequence in sorted(failures):
            places = [sequence] if self.pieces is None else np.flatnonzero(self.pieces.sequences == sequence)
            for text in np.searchsorted(self.offsets, places, side="right") - 1:
                joined.setdefault(int(text), failures[sequence])
        return joined


def cut_passages(texts: TokenizedTexts, frame: PassageFrame) -> PassagedTexts:
    """Cut texts into sequences of at most `frame.max_tokens`. Texts that fit stay whole."""
    ids, text_lengths = texts.inputs[INPUT_IDS], texts.lengths
    long = np.flatnonzero(text_lengths > frame.max_tokens).tolist()
    if not long:
        return PassagedTexts.whole(texts)
    # For each sequence, the indices of its tokens in the values of every input
    tokens: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    weights: list[NDArray[np.int64]] = []
    counts = np.ones(len(texts), dtype=np.int64)
    failures = dict(texts.failures)
    for before, text in pairwise([-1, *long, len(texts)]):
        fitting = slice(before + 1, text)
        tokens.append(np.arange(ids.offsets[before + 1], ids.offsets[text]))
        lengths.append(text_lengths[fitting])
        weights.append(text_lengths[fitting])
        if text == len(texts):
            break
        windows, own, failure = _cut(ids.row(text), frame)
        if failure is not None:
            failures[text] = failure
        tokens.append(windows.reshape(-1) + ids.offsets[text])
        lengths.append(np.full(len(windows), windows.shape[1], dtype=np.int64))
        weights.append(own)
        counts[text] = len(windows)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    places, all_lengths = np.concatenate(tokens), np.concatenate(lengths)
    inputs = {
        name: Ragged.from_lengths(rows.values[places], all_lengths) for name, rows in texts.inputs.items()
    }
    return PassagedTexts(
        TokenizedTexts(
            inputs,
            np.zeros(len(all_lengths), dtype=np.bool_),
            {int(offsets[text]): failure for text, failure in failures.items()},
        ),
        offsets,
        np.concatenate(weights),
    )


def plan_windows(num_tokens: int, room: int, overlap: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where windows of `room` tokens start in a longer text, and how many new tokens each adds.

    Neighbours share `overlap` tokens; the last two share more if the last one would not be full otherwise.
    """
    stride = room - overlap
    num_windows = -(-(num_tokens - room) // stride) + 1
    starts = np.minimum(np.arange(num_windows) * stride, num_tokens - room)
    return starts, np.diff(starts + room, prepend=0)


def _cut(
    ids: NDArray[np.int32], frame: PassageFrame
) -> tuple[NDArray[np.int64], NDArray[np.int64], ItemFailure | None]:
    """Return a long text's windows as indices [windows, max_tokens], their weights, and a failure or None.

    The failure says why the text cannot be cut.
    """
    # The last token of a prompt may differ when a text follows it.
    num_common = min(len(ids), len(frame.leading_ids))
    differs = np.flatnonzero(ids[:num_common] != frame.leading_ids[:num_common])
    num_leading = int(differs[0]) if len(differs) else num_common
    num_own = len(ids) - num_leading - frame.num_suffix
    room = frame.max_tokens - num_leading - frame.num_suffix
    failure = None
    stride = room - frame.overlap
    if stride < max(frame.max_tokens * SMALLEST_NEW_SHARE, 1):
        failure = (
            f"the text has {len(ids)} tokens; the prompt, the special tokens and the passage_overlap of "
            f"{frame.overlap} leave {stride} of the {frame.max_tokens} tokens of a passage, less than a quarter"
        )
    elif num_own - room > (MAX_PASSAGES - 1) * stride:
        failure = (
            f"the text has {len(ids)} tokens and would need more than {MAX_PASSAGES} passages "
            f"of {frame.max_tokens}"
        )
    if failure is not None:
        return np.zeros((1, 0), np.int64), np.zeros(1, np.int64), ItemFailure(TOO_MANY_TOKENS, failure)
    starts, weights = plan_windows(num_own, room, frame.overlap)
    windows = np.empty((len(starts), frame.max_tokens), dtype=np.int64)
    windows[:, :num_leading] = np.arange(num_leading)
    windows[:, num_leading : num_leading + room] = num_leading + starts[:, np.newaxis] + np.arange(room)
    windows[:, num_leading + room :] = np.arange(len(ids) - frame.num_suffix, len(ids))
    return windows, weights, None


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
