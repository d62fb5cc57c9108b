"""Extract records of a schema from texts with RexUniNLU, level by level.

    extraction = Extraction(tokenizer, schema, texts)
    prompts = extraction.start()
    while prompts is not None:
        prompts = extraction.take(results of prompts)
    records = extraction.finish()

All (text, hint, window) of a level are sequences of one Prompts. A text that is finished or failed has no
sequences in the next level; a failure does not affect other texts.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from vectormill.domain.schema import WINDOW_STRIDE, Schema, list_types
from vectormill.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR, TOO_MANY_TOKENS, ItemFailure
from vectormill.ragged import Ragged
from worker.tasks.extract.extract import Prompts
from worker.tasks.extract.prompts import (
    Hint,
    HintTooLong,
    HintWriter,
    PromptTokenizer,
    Tokens,
    Window,
    cut_windows,
    find_inputs,
    join_ids,
    lay_out,
    put_token_in,
)
from worker.tasks.extract.records import (
    LimitExceeded,
    Limits,
    NonFiniteLogits,
    Record,
    TextState,
    TooManyCells,
    UnreadablePrompt,
    find_token,
)

FAILURE_CODES: Final[Mapping[type[Exception], str]] = {
    HintTooLong: TOO_MANY_TOKENS,
    LimitExceeded: ENCODING_FAILED,
    NonFiniteLogits: NON_FINITE_VECTOR,
    TooManyCells: ENCODING_FAILED,
    UnreadablePrompt: ENCODING_FAILED,
}


class Extraction:
    """The extraction of one schema from many texts. The schema must have been checked.

    With confidences each step has one, and a classified text has all labels instead of the chosen ones, as in
    the reference's `do_predict`.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        schema: Schema,
        texts: Sequence[str],
        *,
        limits: Limits | None = None,
        with_confidences: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._writer = HintWriter(tokenizer, (path[-1] for path in list_types(schema)))
        self._states = [
            TextState(text, schema, limits or Limits(), find_token(text), with_confidences=with_confidences)
            for text in texts
        ]
        self._asked: list[tuple[int, Window]] = []
        self._tokens: dict[str, Tokens] = {}

    @property
    def num_left_out(self) -> list[int]:
        """Return for each text the number of types left out because they or their paths are too long."""
        return [state.num_left_out for state in self._states]

    def start(self) -> Prompts | None:
        """Return the sequences of the first level; None if there is nothing to ask."""
        return self._ask()

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure] | None = None) -> Prompts | None:
        """Take a row of results for each sequence of the last level, and return the next level's sequences.

        Return None at the end. `failures` maps the numbers of sequences in the last Prompts to failures;
        their texts fail.
        """
        if len(results) != len(self._asked):
            raise ValueError(
                f"expected {len(self._asked)} rows of results, one per sequence; got {len(results)}"
            )
        for number, failure in (failures or {}).items():
            self._fail(self._states[self._asked[number][0]], failure)
        numbers_of: dict[int, list[int]] = {}
        for number, (index, _) in enumerate(self._asked):
            numbers_of.setdefault(index, []).append(number)
        for index, numbers in numbers_of.items():
            state = self._states[index]
            if state.failure is None:
                windows = [self._asked[number][1] for number in numbers]
                try:
                    state.read_level(windows, [results.row(number) for number in numbers])
                except tuple(FAILURE_CODES) as error:
                    self._fail(state, ItemFailure(FAILURE_CODES[type(error)], f"{error}."))
        return self._ask()

    def finish(self) -> list[list[Record] | ItemFailure]:
        """Return for each text its records, in the reference's order, or its failure."""
        return [state.answer() for state in self._states]

    def _ask(self) -> Prompts | None:
        """Return the sequences of all texts whose level has any; skip levels without sequences."""
        while True:
            live = [index for index, state in enumerate(self._states) if state.is_asking]
            if not live:
                self._asked, self._tokens = [], {}
                return None
            self._asked = self._cut(live)
            asking = {index for index, _ in self._asked}
            for index in live:
                if index not in asking and self._states[index].failure is None:
                    self._states[index].read_level([], [])
            if self._asked and (prompts := self._lay_out()) is not None:
                return prompts

    def _cut(self, live: Sequence[int]) -> list[tuple[int, Window]]:
        """Return the windows of the level's hints, in order, each with its text's index.

        One hint is cut for all texts before the next hint, because the windows of a classified text change
        the text.
        """
        states = [self._states[index] for index in live]
        written = self._writer.write([state.asked for state in states])
        cut: dict[int, list[Window]] = {index: [] for index in live}
        for state, hints in zip(states, written, strict=True):
            state.begin_level(hints.num_left_out)
        for number in range(max(len(hints.hints) for hints in written)):
            part = [
                (index, hints.hints[number])
                for index, hints in zip(live, written, strict=True)
                if number < len(hints.hints) and self._states[index].failure is None
            ]
            self._tokenize([self._states[index].text for index, _ in part])
            for index, hint in part:
                state = self._states[index]
                try:
                    for window in self._cut_hint(state, hint):
                        cut[index].append(window)
                        state.check_windows(len(cut[index]))
                except (HintTooLong, LimitExceeded) as error:
                    cut[index] = []
                    self._fail(state, ItemFailure(FAILURE_CODES[type(error)], f"{error}."))
        return [
            (index, window) for index in live for window in cut[index] if self._states[index].failure is None
        ]

    def _cut_hint(self, state: TextState, hint: Hint) -> Iterator[Window]:
        text, tokens = state.text, self._tokens[state.text]
        if state.token is None:
            yield from cut_windows(hint, text, tokens, self._tokenizer, WINDOW_STRIDE)
            return
        for number, window in enumerate(cut_windows(hint, text, tokens, self._tokenizer, 0)):
            if number:
                window = put_token_in(window, number, state.token, self._tokenizer)
                state.grow(window)
            yield window

    def _tokenize(self, texts: Sequence[str]) -> None:
        """Tokenize each text once and keep it while any level needs it.

        A text that has grown is a new text.
        """
        new = sorted(set(texts) - self._tokens.keys())
        self._tokens |= dict(zip(new, self._tokenizer.encode(new), strict=True))

    def _lay_out(self) -> Prompts | None:
        """Return the level's sequences as inputs; None if none of them can be laid out."""
        windows = [window for _, window in self._asked]
        layout = lay_out(join_ids(windows), self._tokenizer)
        for number in np.flatnonzero(~layout.is_whole).tolist():
            self._fail(
                self._states[self._asked[number][0]],
                ItemFailure(
                    ENCODING_FAILED,
                    "the text contains the special token [PREFIX], which is read as a prompt.",
                ),
            )
        if not layout.is_whole.all():
            self._asked = [pair for pair in self._asked if self._states[pair[0]].failure is None]
            return self._lay_out() if self._asked else None
        texts = np.array([index for index, _ in self._asked], dtype=np.int32)
        is_blank = np.array([self._states[index].is_blank for index in texts.tolist()], dtype=np.int32)
        return Prompts(find_inputs(windows, layout, is_blank), texts)

    @staticmethod
    def _fail(state: TextState, failure: ItemFailure) -> None:
        state.failure = state.failure or failure


class RexUniNLU:
    """RexUniNLU as it asks for a schema of any depth. Implements Author."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = PromptTokenizer(directory)

    def begin(self, schema: Schema, texts: Sequence[str], *, with_confidences: bool) -> Extraction:
        return Extraction(self._tokenizer, schema, texts, with_confidences=with_confidences)
