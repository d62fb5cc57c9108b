"""Extract records of a schema from texts, level by level, and connect the extraction to the engine.

    extraction = Extraction(tokenizer, schema, texts)
    prompts = extraction.start()
    while prompts is not None:
        prompts = extraction.take(results of prompts)
    records = extraction.finish()

All (text, hint, window) of a level are sequences of one Prompts. A text that is finished or failed has no
sequences in the next level; a failure does not affect other texts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vectormill.domain.encoding import EncodingSpec
from vectormill.domain.schema import WINDOW_STRIDE, Schema, list_types
from vectormill.jobs.item import ENCODING_FAILED, NON_FINITE_VECTOR, TOO_MANY_TOKENS, ItemFailure
from vectormill.ragged import Ragged
from worker.tasks.extract.prompts import (
    IS_BLANK,
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
    CELL_WIDTH,
    LimitExceeded,
    Limits,
    NonFiniteLogits,
    Record,
    TextState,
    TooManyCells,
    UnreadablePrompt,
    find_token,
)
from worker.tasks.finishing import find_changed, read_texts
from worker.tasks.task import Finished
from worker.tokens.tokenized import INPUT_IDS, TokenizedTexts

FAILURE_CODES: Final[Mapping[type[Exception], str]] = {
    HintTooLong: TOO_MANY_TOKENS,
    LimitExceeded: ENCODING_FAILED,
    NonFiniteLogits: NON_FINITE_VECTOR,
    TooManyCells: ENCODING_FAILED,
    UnreadablePrompt: ENCODING_FAILED,
}


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """The sequences of one level of all texts.

    Sequence i belongs to text `texts[i]`; each input has a row for it.
    """

    inputs: Mapping[str, Ragged]
    texts: NDArray[np.int32]  # [n]

    def __len__(self) -> int:
        return len(self.texts)


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
        for index, numbers in self._numbers_by_text():
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

    def _numbers_by_text(self) -> Iterator[tuple[int, list[int]]]:
        numbers: dict[int, list[int]] = {}
        for number, (index, _) in enumerate(self._asked):
            numbers.setdefault(index, []).append(number)
        return iter(numbers.items())

    @staticmethod
    def _fail(state: TextState, failure: ItemFailure) -> None:
        state.failure = state.failure or failure


# The text of the canary, which is encoded like any other text.
SMALL_SCHEMA: Final[Schema] = {"a": None}


class Extract:
    """The task `extract` of one model. Implements WorkerTask."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = PromptTokenizer(directory)

    def begin(self, spec: EncodingSpec, texts: Sequence[bytes], max_chars: int) -> "ExtractionState":
        decoded, failures = read_texts(texts, max_chars)
        sound = [index for index in range(len(texts)) if index not in failures]
        schema, confidences = json.loads(spec.extract_schema), spec.confidences
        extraction = Extraction(self._tokenizer, schema, decoded, with_confidences=confidences)
        return ExtractionState(extraction, sound, failures, len(texts))

    def canary(self, text: str) -> Mapping[str, Ragged]:
        prompts = Extraction(self._tokenizer, SMALL_SCHEMA, [text]).start()
        assert prompts is not None
        inputs = name_inputs(prompts).inputs
        # A blank sequence returns the same cells whatever their signs. Otherwise their number would depend on
        # logits near 0, and a model that finds nothing in this text would return none to compare.
        return {**inputs, IS_BLANK: Ragged.from_scalars(np.ones(len(prompts), dtype=np.int32))}

    def find_flaw(self, results: Ragged, expected: "NDArray[Any]") -> str:
        """Return what is wrong with a canary's cells and logits; empty if they are nearly as expected."""
        if (results.lengths != len(expected)).any() or len(expected) < 1 + CELL_WIDTH:
            return "its answer has a different number of cells"
        known = expected[1:].reshape(-1, CELL_WIDTH)
        cells = results.matrix[:, 1:].reshape(len(results), -1, CELL_WIDTH)
        if (results.matrix[:, 0] != expected[0]).any() or (cells[:, :, :2] != known[:, :2]).any():
            return "its answer has different cells"
        logits = np.ascontiguousarray(cells[:, :, 2:]).reshape(len(results), -1)
        return find_changed(Ragged.from_matrix(logits), known[:, 2:].ravel())


class ExtractionState:
    """The state of one extract request. Implements RequestState.

    `sound` are the indices, among all texts, of those that can be read.
    """

    constants: Mapping[str, int] = {}

    def __init__(
        self,
        extraction: Extraction,
        sound: Sequence[int],
        failures: Mapping[int, ItemFailure],
        num_texts: int,
    ) -> None:
        self._extraction = extraction
        self._sound = np.array(sound, dtype=np.int64)
        self._failures = dict(failures)
        self._num_tokens = np.zeros(num_texts, dtype=np.int32)

    def start(self) -> TokenizedTexts:
        prompts = self._extraction.start()
        return EMPTY if prompts is None else self._give(prompts)

    def take(self, results: Ragged, failures: Mapping[int, ItemFailure]) -> TokenizedTexts | None:
        prompts = self._extraction.take(results, failures)
        return None if prompts is None else self._give(prompts)

    def finish(self) -> Finished:
        num_texts = len(self._num_tokens)
        rows = [b""] * num_texts
        for place, answer in zip(self._sound.tolist(), self._extraction.finish(), strict=True):
            if isinstance(answer, ItemFailure):
                self._failures[place] = answer
            else:
                rows[place] = json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()
        failed = list(self._failures)
        # A text for which types were left out is reported as truncated, so that nothing is left out silently.
        truncated = np.zeros(num_texts, dtype=np.bool_)
        truncated[self._sound] = np.array(self._extraction.num_left_out, dtype=np.int64) > 0
        self._num_tokens[failed], truncated[failed] = 0, False
        return Finished(
            Ragged.from_rows([np.frombuffer(row, dtype=np.uint8) for row in rows], np.uint8),
            self._failures,
            self._num_tokens,
            truncated,
            np.zeros(num_texts, dtype=np.int32),
        )

    def _give(self, prompts: Prompts) -> TokenizedTexts:
        sequences = name_inputs(prompts)
        np.add.at(self._num_tokens, self._sound[prompts.texts], sequences.lengths.astype(np.int32))
        return sequences


def name_inputs(prompts: Prompts) -> TokenizedTexts:
    """Return the sequences with every input present, because sequences of many requests share a batch."""
    blank = Ragged.from_scalars(np.zeros(len(prompts), dtype=np.int32))
    inputs = {IS_BLANK: blank, **prompts.inputs}
    return TokenizedTexts(inputs, np.zeros(len(prompts), dtype=np.bool_), {})


EMPTY: Final = TokenizedTexts({INPUT_IDS: Ragged.from_rows([], np.int32)}, np.zeros(0, dtype=np.bool_), {})
