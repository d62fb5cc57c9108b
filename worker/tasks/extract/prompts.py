"""Build the input sequences of an extraction: prompts ("hints"), windows of the text, and their layout.

A hint is [PREFIX] with the path of spans that was found so far (empty at the root), then [TYPE]name for each
type that is requested below that path, and so on for the next path. A window is a hint and as much of the
text as fits after it.

Position ids restart in every path of a hint and in every type below it. Tokens of different paths do not
attend to one another, nor do those of different types of one path. Instead of an attention matrix each token
has two numbers, its path and its type: two tokens attend to one another where both numbers are equal or one
of them is 0, as those of the text are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from vectormill.domain.errors import ModelError
from vectormill.domain.schema import (
    EMPTY_HINT_COST,
    FRAME_TOKENS,
    MAX_HINT_COST,
    MAX_WINDOW_TOKENS,
    Schema,
)
from vectormill.models.stored import read_stored
from vectormill.ragged import Ragged
from worker.batching.batch import POSITION_IDS, PREFIX_BLOCKS, TYPE_SEGMENTS
from worker.tokens.reference import group_texts
from worker.tokens.tokenized import INPUT_IDS, TOKEN_TYPE_IDS

PREFIX: Final = "[PREFIX]"
TYPE: Final = "[TYPE]"
CLASSIFY: Final = "[CLASSIFY]"
MULTICLASSIFY: Final = "[MULTICLASSIFY]"
# The order matters, because ids are assigned in it.
ADDED_TOKENS: Final = (PREFIX, TYPE, CLASSIFY, MULTICLASSIFY)
# The names by which a tokenizer's files declare its special tokens.
NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The tokens of one string without special tokens: their ids and their offsets in code points."""

    ids: NDArray[np.int32]  # [L]
    starts: NDArray[np.int32]  # [L]
    ends: NDArray[np.int32]  # [L]

    @classmethod
    def join(cls, parts: "Sequence[Tokens]", shifts: Sequence[int]) -> "Tokens":
        """Join parts of a string; offsets of part i are shifted by `shifts[i]`."""
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.starts + shift for part, shift in zip(parts, shifts, strict=True)]),
            np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)]),
        )

    def part(self, start: int, end: int) -> "Tokens":
        """Return a view of the tokens from `start` up to `end`."""
        return Tokens(self.ids[start:end], self.starts[start:end], self.ends[start:end])

    def __len__(self) -> int:
        return len(self.ids)


class PromptTokenizer:
    """A model's `tokenizer.json` with RexUniNLU's four special tokens added, which the published files lack.

    A pair is [CLS] hint [SEP] text [SEP], and a hint is a row of special tokens with strings between them.
    Special tokens are split off before a string is normalized, so the ids of a hint are the ids of its parts.
    Raises ModelError if the tokenizer joins pairs in another way.
    """

    def __init__(self, directory: Path) -> None:
        self._rust = _read_tokenizer(directory)
        self.cls_id, self.sep_id, self.text_type_id = _find_frame(self._rust)
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self.prefix_id, self.type_id = vocabulary[PREFIX], vocabulary[TYPE]
        self.classify_ids = {token: vocabulary[token] for token in (CLASSIFY, MULTICLASSIFY)}

    @property
    def num_ids(self) -> int:
        """Return the number of rows that the model's word embedding table must have."""
        return int(self._rust.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Tokenize each text, in groups, because the library keeps more than a hundred bytes per token."""
        return [_lay_out(encoding) for encoding in self._encode(texts)]

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text without special tokens."""
        return [len(encoding.ids) for encoding in self._encode(texts)]

    def _encode(self, texts: Sequence[str]) -> Iterator[Encoding]:
        for group in group_texts(texts):
            yield from self._rust.encode_batch(group, add_special_tokens=False)


def _lay_out(encoding: Encoding) -> Tokens:
    offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    return Tokens(
        np.array(encoding.ids, dtype=np.int32),
        np.ascontiguousarray(offsets[:, 0]),
        np.ascontiguousarray(offsets[:, 1]),
    )


def _read_tokenizer(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    try:
        rust = Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise ModelError(
            f"Cannot read the tokenizer {path}: {error}. If the model has only spm.model or vocab.txt, create the file "
            "with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)."
        ) from error
    rust.no_padding()
    rust.no_truncation()
    known = {token.content for token in rust.get_added_tokens_decoder().values()}
    # Special tokens that only the other files name are also found in a text, as in transformers.
    rust.add_special_tokens([token for token in _list_named_tokens(directory) if token not in known])
    rust.add_special_tokens([token for token in ADDED_TOKENS if token not in known])
    return rust


def _list_named_tokens(directory: Path) -> list[str]:
    """Return the distinct special tokens that the tokenizer's files other than tokenizer.json name."""
    named: list[str] = []
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_stored(directory / file, directory.name).values
        for name in NAMED_TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named.append(token)
    return list(dict.fromkeys(named))


def _find_frame(rust: Tokenizer) -> tuple[int, int, int]:
    """Return the ids of [CLS] and [SEP] and the type id of a text that follows a hint. Raises ModelError."""
    first, second = (rust.encode(word, add_special_tokens=False).ids for word in ("甲a", "乙b"))
    pair, single = rust.encode("甲a", "乙b"), rust.encode("甲a")
    cls_id, sep_id = pair.ids[0], pair.ids[-1]
    hint = [cls_id, *first, sep_id]
    text_type_id = pair.type_ids[-1]
    type_ids = [0] * len(hint) + [text_type_id] * (len(second) + 1)
    if single.ids != hint or pair.ids != [*hint, *second, sep_id] or pair.type_ids != type_ids:
        raise ModelError(
            "The tokenizer does not join two texts as [CLS] first [SEP] second [SEP] with type ids 0 for the first, "
            "which is the form of prompts."
        )
    return cls_id, sep_id, text_type_id


MAX_STRING_COST: Final = 125

# (type, span, (start, end)); where a text is classified, the confidence follows.
Step = tuple[Any, ...]
Prefix = tuple[Step, ...]
# The types that are requested below each path.
PlanRequest = Mapping[Prefix, Schema]


@dataclass(frozen=True, slots=True)
class Piece:
    """A special token and the string after it; `question` is the path and type it asks for, if any."""

    string: str
    question: tuple[Prefix, str] | None


@dataclass(frozen=True, slots=True, eq=False)
class Hint:
    """The prompt of one sequence: paths, each followed by the types that are requested below it.

    `tokens` are without [CLS] and [SEP]. `type_places` are the positions of each question's [TYPE] in a
    sequence, where [CLS] is 0, and `type_chars` its offsets in `text`.
    """

    text: str
    questions: tuple[tuple[Prefix, str], ...]
    tokens: Tokens
    type_places: NDArray[np.int64]  # [questions]
    type_chars: tuple[int, ...]


def write_prefix(prefix: Prefix) -> str:
    return ",".join(f"{step[0]}: {step[1]}" for step in prefix)


def cut_hints(asked: PlanRequest, costs: Mapping[str, int]) -> tuple[list[list[Piece]], int]:
    """Split what is asked into hints. Return the pieces of each hint and the number of types left out.

    Paths and types are sorted by code point. `costs` are the tokens of each path's string and of each type,
    including the special token before it; a string above MAX_STRING_COST is left out. A hint that would
    exceed MAX_HINT_COST is closed, and the next one begins with the path again.
    """
    hints: list[list[Piece]] = []
    num_left_out, hint_cost = 0, EMPTY_HINT_COST
    for prefix in sorted(asked):
        string = write_prefix(prefix)
        if costs[string] > MAX_STRING_COST:
            num_left_out += len(asked[prefix])
            continue
        is_first = True
        for name in sorted(asked[prefix]):
            if costs[name] > MAX_STRING_COST:
                num_left_out += 1
                continue
            opening = costs[string] if is_first else 0
            if not hints or hint_cost + opening + costs[name] > MAX_HINT_COST:
                hints.append([])
                opening, is_first, hint_cost = costs[string], True, EMPTY_HINT_COST
            if is_first:
                hints[-1].append(Piece(PREFIX + string, None))
            hints[-1].append(Piece(TYPE + name, (prefix, name)))
            hint_cost += opening + costs[name]
            is_first = False
    return hints, num_left_out


@dataclass(frozen=True, slots=True)
class Hints:
    """All hints of one text on one level.

    `num_left_out` types are not requested, because their strings are too long.
    """

    hints: tuple[Hint, ...]
    num_left_out: int


class HintWriter:
    """A writer of hints for many texts, which tokenizes the types of a schema only once."""

    def __init__(self, tokenizer: PromptTokenizer, types: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        names = sorted(set(types))
        self._costs = self._count_costs(names)
        self._pieces = self._tokenize([TYPE + name for name in names])
        self._roots: Hints | None = None

    def write(self, levels: Sequence[PlanRequest]) -> list[Hints]:
        """Return the hints of each text's level.

        The first level is the same for all texts and is written once.
        """
        others = [asked for asked in levels if list(asked) != [()]]
        written = iter(self._write(others))
        for asked in levels:
            if self._roots is None and list(asked) == [()]:
                self._roots = self._write([asked])[0]
        return [(self._roots if list(asked) == [()] else None) or next(written) for asked in levels]

    def _write(self, levels: Sequence[PlanRequest]) -> list[Hints]:
        strings = sorted({write_prefix(prefix) for asked in levels for prefix in asked})
        costs = self._costs | self._count_costs(strings)
        cut = [cut_hints(asked, costs) for asked in levels]
        used = {piece.string for hints, _ in cut for pieces in hints for piece in pieces}
        tokens = self._pieces | self._tokenize(sorted(used - self._pieces.keys()))
        return [
            Hints(tuple(_join_pieces(pieces, tokens) for pieces in hints), num_left_out)
            for hints, num_left_out in cut
        ]

    def _count_costs(self, strings: Sequence[str]) -> dict[str, int]:
        return {
            string: count + 1 for string, count in zip(strings, self._tokenizer.count(strings), strict=True)
        }

    def _tokenize(self, strings: Sequence[str]) -> dict[str, Tokens]:
        return dict(zip(strings, self._tokenizer.encode(strings), strict=True))


def _join_pieces(pieces: Sequence[Piece], tokens: Mapping[str, Tokens]) -> Hint:
    parts = [tokens[piece.string] for piece in pieces]
    chars = list(accumulate((len(piece.string) for piece in pieces), initial=0))
    places = list(accumulate((len(part) for part in parts), initial=1))
    asks = [index for index, piece in enumerate(pieces) if piece.question is not None]
    return Hint(
        text="".join(piece.string for piece in pieces),
        questions=tuple(piece.question for piece in pieces if piece.question is not None),
        tokens=Tokens.join(parts, chars[:-1]),
        type_places=np.array([places[index] for index in asks], dtype=np.int64),
        type_chars=tuple(chars[index] for index in asks),
    )


class HintTooLong(Exception):
    """The hint is so long that a window has no room for text."""


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One sequence: [CLS] hint [SEP] part of the text [SEP]. Offsets refer to the hint's text or to the text.

    `num_hint_tokens` is the number of tokens with type id 0; the text's tokens follow them, including the
    last [SEP]. `grows_at` is where the classification token is inserted into the text before this window is
    read; None if it is not.
    """

    hint: Hint
    tokens: Tokens  # [L]; special tokens have offsets (0, 0)
    type_ids: NDArray[np.int32]  # [L]
    num_hint_tokens: int
    grows_at: int | None = None

    def __len__(self) -> int:
        return len(self.tokens)


def cut_windows(
    hint: Hint, text: str, tokens: Tokens, tokenizer: PromptTokenizer, stride: int
) -> Iterator[Window]:
    """Yield the windows of a text with this hint. Raises HintTooLong.

    Neighbouring windows share `stride` tokens, 0 in a classified text.
    """
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
            # When the library cuts a text into windows, the type ids of the template apply only to the first
            # window and to [SEP]: the text of later windows has 1, whatever the template says. With a
            # template of zeros [SEP] then counts as a hint token.
            type_ids[len(hint.tokens) + 2 : -1] = 1
        yield _lay_window(hint, joined, type_ids, tokenizer)


def put_token_in(window: Window, number: int, token: str, tokenizer: PromptTokenizer) -> Window:
    """Return the window with the classification token at the start of the text and its last token dropped.

    `number` is the window's number, 1 or later. Offsets move by what all windows before have inserted, even
    where not all of it lies before this window.
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


def _lay_window(
    hint: Hint, tokens: Tokens, type_ids: NDArray[np.int32], tokenizer: PromptTokenizer
) -> Window:
    if not type_ids.any():
        # The tokenizer gives 0 everywhere: 1 after the first [SEP] of a hint.
        is_sep = tokens.ids == tokenizer.sep_id
        begins = np.zeros(len(is_sep), dtype=np.int32)
        begins[1:] = is_sep[:-1] & ~is_sep[1:]
        type_ids = np.minimum(np.cumsum(begins), 1).astype(np.int32)
    return Window(hint, tokens, type_ids, int((type_ids == 0).sum()))


def _join_tokens(tokenizer: PromptTokenizer, *parts: Tokens) -> Tokens:
    """Return [CLS] and the parts, each followed by [SEP]."""
    nowhere = np.zeros(1, np.int32)
    cls, sep = (
        Tokens(np.array([token], np.int32), nowhere, nowhere)
        for token in (tokenizer.cls_id, tokenizer.sep_id)
    )
    joined = [cls]
    for part in parts:
        joined += [part, sep]
    return Tokens.join(joined, [0] * len(joined))


def _shift_offsets(
    before: NDArray[np.int32], token: int, offsets: NDArray[np.int32], inside: slice, shift: int
) -> NDArray[np.int32]:
    return np.concatenate([before, [token], offsets[inside] + shift, offsets[-1:]]).astype(np.int32)


# One value per sequence: 1 where only the first token of the text is read. The input is omitted if it is 0
# for all sequences.
IS_BLANK: Final = "is_blank"


@dataclass(frozen=True, slots=True, eq=False)
class PromptLayout:
    """Index arrays (int32) of all sequences, one after another.

    `is_whole[i]` is False if sequence i has a [PREFIX] without a [TYPE] next to other paths, for example
    because the text contains "[PREFIX]"; the reference raises IndexError for these.
    """

    position_ids: NDArray[np.int32]  # [total]
    prefix_blocks: NDArray[np.int32]  # [total], from 1; 0 outside
    type_segments: NDArray[np.int32]  # [total], from 1 in each sequence; 0 outside
    is_whole: NDArray[np.bool_]  # [n]


def lay_out(ids: Ragged, tokenizer: PromptTokenizer) -> PromptLayout:
    """Return the layout of sequences that begin with [CLS][PREFIX], without a Python loop over them."""
    tokens, starts = ids.covered, (ids.offsets[:-1] - ids.offsets[0])
    num_sequences, total = len(ids), len(tokens)
    place = np.arange(total)
    sequence = np.repeat(np.arange(num_sequences), ids.lengths)
    is_first = place == starts[sequence]
    is_prefix, is_type, is_sep = (
        (tokens == token) & ~is_first for token in (tokenizer.prefix_id, tokenizer.type_id, tokenizer.sep_id)
    )
    # The last special token before a token determines which path or type it belongs to.
    opened_at = np.maximum.accumulate(np.where(is_first | is_prefix | is_type | is_sep, place, 0))
    in_prefix, in_type, in_text = is_prefix[opened_at], is_type[opened_at], is_sep[opened_at]
    # Paths are numbered across all sequences, so that one array can hold a value for each path.
    path = np.cumsum(is_prefix)
    is_structure = in_prefix | in_type
    prefix_lengths = np.bincount(path[in_prefix], minlength=path[-1] + 1 if total else 1)
    positions = np.where(is_structure, place - opened_at + 1, 0)
    positions[in_type] += prefix_lengths[path[in_type]]
    positions = _continue_in_text(positions, in_text, sequence, starts)
    # A path ends with its last type, whatever tokens lie between.
    last_of_path = np.full(len(prefix_lengths), -1)
    last_of_path[path[in_type]] = place[in_type]
    path_before = path[starts] if total else starts
    block = path - path_before[sequence]
    segment = np.cumsum(is_type)
    segment -= segment[starts][sequence] if total else 0
    has_path = block > 0
    paths = np.bincount(sequence[is_prefix], minlength=num_sequences)
    endless = is_prefix & (last_of_path[path] < 0)
    # Position ids are in the reference's order, those of the hint first, then those of the text. It differs from the
    # order of the tokens only where tokens of the text were read as structure of the hint.
    written_order = np.argsort(2 * sequence + in_text, kind="stable")
    return PromptLayout(
        positions[written_order].astype(np.int32),
        np.where(has_path & (place <= last_of_path[path]), block, 0).astype(np.int32),
        np.where(in_type, segment, 0).astype(np.int32),
        (paths < 2) | (np.bincount(sequence[endless], minlength=num_sequences) == 0),
    )


def find_inputs(
    windows: Sequence[Window], layout: PromptLayout, is_blank: NDArray[np.int32]
) -> dict[str, Ragged]:
    """Return the model's inputs for the windows, by name, with one row per window; `is_blank` is [n]."""
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
    """Return position ids [total] in which the text continues from the largest position of the hint."""
    if not len(positions):
        return positions
    greatest = np.maximum.reduceat(positions, starts)
    number = np.cumsum(in_text)
    before: NDArray[np.int64] = number[starts] - in_text[starts]
    return np.where(in_text, greatest[sequence] + number - before[sequence], positions)
